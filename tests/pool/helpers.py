"""Fronts and workers in one trio run: real servers on sockets, or in process for a MockClock."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import define, field
from feed.streaming import StreamingTransport
from support import CHAT_URL, Compare, Script, local_backend, make_app

from rollout.client import RolloutClient
from rollout.pool import PoolBackend, WorkerAddress
from rollout.server import RolloutServer, serve

TIMES = {"result_wait_timeout_sec": 10, "polling_lease_timeout_sec": 60}


class Agents:
    """What the agents of a test do, and how often each was started."""

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()
        self.arrived = trio.Event()
        self.go_on = trio.Event()

    async def run(self, name: str) -> None:
        self.started[name] += 1
        self.arrived.set()
        await self.go_on.wait()

    async def until_started(self, *names: str) -> None:
        while not all(self.started[name] for name in names):
            self.arrived = trio.Event()
            await self.arrived.wait()


def workflow_of(agents: Agents) -> type[Script]:
    """A workflow that counts its starts, then waits for ``go_on`` if its prompt says ``hold``."""

    class Counted(Script):
        async def run(self, ctx: Any) -> Any:
            script = ctx.prompt[0]
            if "hold" in script:
                await agents.run(script["hold"])
            return await super().run(ctx)

    return Counted


def worker_app(agents: Agents | None = None, *, slots: int | None = 4, **options: Any) -> Any:
    """The application of a worker."""
    workflow = Script if agents is None else workflow_of(agents)
    depth = options.pop("max_queue_depth", None)
    grader = options.pop("grader", Compare)
    backend = local_backend(workflow, grader, max_concurrent=slots, max_queue_depth=depth)
    return make_app(backend, **options)


@define(eq=False)
class Served:
    """A server on a socket that can be cut off as a kill would.

    Attributes:
        app: The application.
        url: Where it listens.
        scope: Cancelled, its listeners, connections and executions are gone.
    """

    app: RolloutServer
    url: str = ""
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    gone: trio.Event = field(factory=trio.Event)

    async def run(self, bind: str, task_status: trio.TaskStatus[None]) -> None:
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    (self.url,) = await nursery.start(
                        partial(serve, self.app, bind=bind, handle_signals=False)
                    )
                    self.url = self.url.removeprefix("http://") if "unix:" in self.url else self.url
                    task_status.started()
        finally:
            self.gone.set()

    async def kill(self) -> None:
        self.scope.cancel()
        await self.gone.wait()


@define(eq=False)
class Net:
    """The nursery of the servers of a test."""

    nursery: trio.Nursery

    async def serve(self, app: RolloutServer, bind: str = "127.0.0.1:0") -> Served:
        server = Served(app)

        async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            await server.run(bind, task_status)

        await self.nursery.start(run)
        return server


@asynccontextmanager
async def net() -> AsyncGenerator[Net, None]:
    """Servers for the length of the block."""
    async with trio.open_nursery() as nursery:
        yield Net(nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def front_over(
    backend: PoolBackend, **options: Any
) -> AsyncGenerator[tuple[RolloutClient, PoolBackend], None]:
    """A front on a socket, once as many workers are up as it has, and its client."""
    async with net() as servers:
        server = await servers.serve(make_app(backend, **options))
        async with RolloutClient(url=server.url) as client:
            yield client, backend


async def until(condition: Callable[[], object], backend: PoolBackend) -> None:
    """Wait until a condition of a pool holds."""
    with trio.fail_after(60):
        while not condition():
            assert backend._workers is not None
            await backend._workers.changed.wait()


def statuses(backend: PoolBackend) -> list[str]:
    return [worker["status"] for worker in backend.health()["workers"]]


async def all_up(backend: PoolBackend, count: int) -> None:
    await until(lambda: statuses(backend).count("up") == count, backend)


@define(eq=False)
class Machine:
    """A worker in process, whose network can be cut: for tests on a MockClock."""

    name: str
    transport: StreamingTransport
    scope: trio.CancelScope

    def cut(self) -> None:
        """Lose every connection, and let none come."""
        self.transport.down = httpx.ConnectError("cut off")
        self.transport.break_streams()

    def mend(self) -> None:
        self.transport.down = None


@asynccontextmanager
async def machines(
    *apps: RolloutServer, **options: Any
) -> AsyncGenerator[tuple[RolloutClient, PoolBackend, list[Machine]], None]:
    """A front in process over workers in process, once they are up."""
    async with trio.open_nursery() as nursery:
        found: dict[str, Machine] = {}
        for number, app in enumerate(apps):
            transport = StreamingTransport(app.asgi_app, nursery)
            name = f"127.0.0.{number + 1}:80"
            found[name] = Machine(name, transport, trio.CancelScope())
            await nursery.start(_serving, app, found[name].scope)
        backend = PoolBackend([f"http://{name}" for name in found], **options)

        def make(address: WorkerAddress) -> RolloutClient:
            http = httpx.AsyncClient(transport=found[address.name].transport)
            return RolloutClient(url=address.url, http_client=http)

        backend._make_client = make
        front = make_app(backend, **TIMES)
        async with front.serving():
            transport = StreamingTransport(front.asgi_app, nursery)
            async with (
                httpx.AsyncClient(transport=transport) as http,
                RolloutClient(url="http://front.test", http_client=http) as client,
            ):
                await all_up(backend, len(apps))
                yield client, backend, list(found.values())
        nursery.cancel_scope.cancel()


async def _serving(
    app: RolloutServer,
    scope: trio.CancelScope,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with scope:
        async with app.serving():
            task_status.started()
            await trio.sleep_forever()


async def ask(client: RolloutClient, rollout_id: str, *, label: str = "42", **more: Any) -> Any:
    """Run one rollout; what is not an argument of a request goes into the prompt."""
    names = ("run", "agent_timeout_sec", "grader_timeout_sec", "metadata", "grade")
    fields = {name: more.pop(name) for name in names if name in more}
    message = {"role": "user", "content": "What is 6 * 7?", **more}
    return await client.run_rollout([message], CHAT_URL, rollout_id, label=label, **fields)


async def start(client: RolloutClient, rollout_id: str, *, label: str = "42", **more: Any) -> Any:
    """Start one rollout, as `ask`; returns its handle."""
    names = ("run", "agent_timeout_sec", "grader_timeout_sec", "metadata", "grade")
    fields = {name: more.pop(name) for name in names if name in more}
    message = {"role": "user", "content": "What is 6 * 7?", **more}
    return await client.run_rollout_async([message], CHAT_URL, rollout_id, label=label, **fields)


def unix_bind(folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}.sock"
