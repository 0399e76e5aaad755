"""A server process that can crash and come back, and the requests that reach it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from attrs import define, field

from rollout.server import RolloutServer
from rollout.simulation.store import Disk, SimulatedStore
from rollout.simulation.trace import Trace

__all__ = ["Exchange", "SimulatedServer"]


@define(eq=False)
class Exchange:
    """One request on its way through the server.

    Attributes:
        status: The status of the answer, once there is one.
        headers: Its headers.
        body: Its body.
        over: Set when the answer is complete, or the server process is gone.
        gone: Set when the client's connection is.
        streamed: Whether the answer is read as it comes.
        write_sec: For a streamed answer, how long each write of the server takes, in seconds.
        on_write: For a streamed answer, called with every chunk that the server is to write.
        chunks: What was written of a streamed answer.
        moved: For a streamed answer, set when there is more of it. Readers replace it.
    """

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(factory=list)
    body: bytes = b""
    complete: bool = False
    over: trio.Event = field(factory=trio.Event)
    gone: trio.Event = field(factory=trio.Event)
    streamed: bool = False
    write_sec: float = 0.0
    on_write: Callable[[bytes], None] | None = None
    chunks: list[bytes] = field(factory=list)
    moved: trio.Event = field(factory=trio.Event)

    def end(self) -> None:
        """End the exchange: nothing more comes."""
        self.over.set()
        self.moved.set()

    async def write(self, chunk: bytes) -> None:
        """Write a chunk of a streamed answer, which takes `write_sec`."""
        if self.on_write is not None:
            self.on_write(chunk)
        await trio.sleep(self.write_sec)
        self.chunks.append(chunk)
        self.moved.set()

    def disconnect(self) -> None:
        """Tell the server that the client's connection is gone."""
        self.gone.set()


@define(eq=False)
class SimulatedServer:
    """Runs an application, process after process.

    Attributes:
        build: Makes the application of a new process.
        trace: Where to record.
        disk: What the processes have committed, where they have a state.
        app: The application of the running process; ``None`` while there is none.
        number: Which process this is, counted from 1.
        keep_running: Set it to false to let `run` return after the current process.
    """

    build: Callable[[], RolloutServer]
    trace: Trace
    disk: Disk
    app: RolloutServer | None = None
    number: int = 0
    down_sec: float = 0.0
    keep_running: bool = True
    _nursery: trio.Nursery | None = None
    _process: trio.CancelScope | None = None
    _stopped: trio.Event = field(factory=trio.Event)
    _open: set[Exchange] = field(factory=set)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run processes until one is stopped for good. Cancelling this crashes the process."""
        started = False
        while self.keep_running:
            with trio.CancelScope() as self._process:
                app = self.build()
                async with app.serving(), trio.open_nursery() as nursery:
                    self.number += 1
                    self.app, self._nursery = app, nursery
                    self.trace.add("world", "server-up", process=self.number)
                    if not started:
                        started = True
                        task_status.started()
                    await self._stopped.wait()
                    self.trace.add("world", "shutdown-begins", process=self.number)
                    await app.shutdown_stages.run()
                    self.trace.add("world", "shutdown-ends", process=self.number)
                    self.vanish()
                    nursery.cancel_scope.cancel()
            self.app = self._nursery = None
            self.trace.add("world", "server-gone", process=self.number)
            if self._stopped.is_set():
                self.trace.add("world", "server-down", process=self.number)
                return
            self._lose_connections()
            await trio.sleep(self.down_sec)

    def crash(self, *, down_sec: float, power_cut: bool = False) -> None:
        """Kill the process: its memory and all connections are lost; a new one follows."""
        self.down_sec = down_sec
        if self._process is not None and self.app is not None:
            self.trace.add("world", "server-crashed", process=self.number)
            if isinstance(self.app.registry.store, SimulatedStore):
                self.app.registry.store.dead = True
            if power_cut:
                self.disk.cut_power()
            self._process.cancel()
            self.vanish()

    def vanish(self) -> None:
        """Refuse connections from now on, and lose those that are open."""
        self.app = self._nursery = None
        self._lose_connections()

    def stop(self) -> None:
        """Shut the process down in stages, for good."""
        self._stopped.set()

    def spawn(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task that ends with the running process, if one runs."""
        if self._nursery is not None:
            self._nursery.start_soon(function, *args)

    def start(
        self, scope: dict[str, Any], body: bytes, exchange: Exchange | None = None
    ) -> Exchange | None:
        """Start a request in the running process; return ``None`` while no process runs."""
        if self._nursery is None or self.app is None:
            return None
        exchange = exchange or Exchange()
        self._open.add(exchange)
        self._nursery.start_soon(self._handle, self.app, scope, body, exchange)
        return exchange

    def _lose_connections(self) -> None:
        for exchange in self._open:
            exchange.end()
        self._open.clear()

    async def _handle(
        self, app: RolloutServer, scope: dict[str, Any], body: bytes, exchange: Exchange
    ) -> None:
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        # A step of a task costs more here than what it does, so there is one where the server
        # has to wait, and one between the head and the body of its answer.
        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await exchange.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.headers = list(message["headers"])
                exchange.moved.set()
                await trio.lowlevel.checkpoint()
            elif message["type"] == "http.response.body":
                chunk = message.get("body", b"")
                exchange.body += chunk
                if exchange.streamed and chunk:
                    await exchange.write(chunk)
                if not message.get("more_body", False):
                    exchange.complete = True
                    exchange.end()

        try:
            await app(scope, receive, send)  # type: ignore[arg-type]
        finally:
            exchange.end()
            self._open.discard(exchange)
