"""The official package, in a process of its own: servers and clients on asyncio.

``python -m interop.official control`` prints the address of a control connection that takes
one JSON command a line (see `Session`), and ends when its standard input does.
``python -m interop.official serve OPTIONS`` prints its URL and serves until it is stopped.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

import uvicorn
from interop.script import LEASE_SEC, WAIT_SEC, Gates, Traffic, answer, compare
from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
)
from osmosis_ai.rollout.client import RolloutClient
from osmosis_ai.rollout.server import create_rollout_server

GATES = Gates(asyncio.Event, nullcontext)


class Scripted(AgentWorkflow):
    async def run(self, ctx: Any) -> Any:
        return await answer(ctx, GATES)


class Comparing(Grader):
    async def grade(self, ctx: Any) -> None:
        await compare(ctx, GATES)


class BoundedBackend(LocalBackend):
    """The official LocalBackend, with a bound on its queue (it has none of its own)."""

    def __init__(self, *, bound: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.bound = bound

    def has_capacity(self) -> bool:
        taken = self.limiter.queued + self.limiter.running
        return self.bound is None or taken < self.bound


def build_app(options: dict[str, Any]) -> Any:
    """Make a server application out of JSON options."""
    slots, depth = options.get("max_concurrent", 4), options.get("max_queue_depth")
    backend = BoundedBackend(
        bound=None if depth is None else slots + depth,
        workflow=Scripted,
        workflow_config=AgentWorkflowConfig(
            name="scripted", concurrency=ConcurrencyConfig(max_concurrent=slots)
        ),
        grader=Comparing if options.get("grader", True) else None,
    )
    times = {"result_wait_timeout_sec": WAIT_SEC, "polling_lease_timeout_sec": LEASE_SEC}
    return create_rollout_server(backend=backend, **{**times, **options.get("server", {})})


class Server(uvicorn.Server):
    """A uvicorn server that says when it has started."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(uvicorn.Config(build_app(options), log_level="warning"))
        self.listener = socket.create_server(("127.0.0.1", options.get("port", 0)))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.ready = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def run_in_background(self) -> None:
        self.task = asyncio.create_task(self.serve([self.listener]))
        waiting = asyncio.create_task(self.ready.wait())
        await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            raise RuntimeError("the official server did not start") from self.task.exception()

    async def stop(self) -> None:
        self.should_exit = True
        assert self.task is not None
        await self.task


class Session:
    """The commands of one control connection; its clients and handles end with it."""

    servers: dict[str, Server] = {}  # noqa: RUF012 - shared by all sessions on purpose

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.numbers = count()
        self.clients: dict[int, tuple[RolloutClient, Traffic]] = {}
        self.handles: dict[int, Any] = {}
        self.closing = False

    async def run(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while line := await self.reader.readline():
            task = asyncio.create_task(self.reply(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self.closing = True
        pending = [*tasks, *(handle.result_task for handle in self.handles.values())]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for client, _ in self.clients.values():
            await client.aclose()
        self.writer.close()

    async def reply(self, command: dict[str, Any]) -> None:
        message: dict[str, Any] = {"n": command["n"]}
        try:
            message["value"] = await getattr(self, f"do_{command['op']}")(**command["args"])
        except BaseException as error:
            if self.closing:
                raise
            message["error"] = {
                "kinds": [cls.__name__ for cls in type(error).__mro__],
                "message": str(error),
                "status_code": getattr(error, "status_code", None),
            }
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()

    async def do_serve(self, options: dict[str, Any]) -> str:
        """Serve; equal options share a server, so that most tests start none."""
        key = json.dumps(options, sort_keys=True)
        if key not in self.servers:
            self.servers[key] = Server(options)
            await self.servers[key].run_in_background()
        return self.servers[key].url

    async def do_reached(self, gate: str) -> None:
        await GATES.reached(gate)

    async def do_release(self, gate: str) -> None:
        GATES.release(gate)

    async def do_let_through(self, gate: str) -> None:
        GATES.let_through(gate)

    async def do_client(self, poll_gate: str | None, options: dict[str, Any]) -> int:
        client, traffic = RolloutClient(**options), Traffic(asyncio.Event, GATES, poll_gate)
        traffic.watch(client.http_client)
        number = next(self.numbers)
        self.clients[number] = client, traffic
        return number

    async def do_answered(self, client: int, **what: Any) -> list[dict[str, Any]]:
        return await self.clients[client][1].answered(**what)

    async def do_run(self, client: int, request: dict[str, Any]) -> Any:
        return dump(await self.clients[client][0].run_rollout(**request))

    async def do_start(self, client: int, request: dict[str, Any]) -> int:
        number = next(self.numbers)
        self.handles[number] = await self.clients[client][0].run_rollout_async(**request)
        return number

    async def do_wait(self, handle: int, milestone: str) -> str:
        return str(await getattr(self.handles[handle], f"wait_for_{milestone}")())

    async def do_completion(self, handle: int) -> Any:
        result = await self.handles[handle]
        assert await self.handles[handle].wait_for_completion() is result
        return dump(result)

    async def do_look(self, handle: int) -> dict[str, Any]:
        it = self.handles[handle]
        latest = None if it.latest_result is None else dump(it.latest_result)
        return {"status": str(it.status), "done": it.done(), "latest": latest}

    async def do_stop(self, handle: int) -> bool:
        return self.handles[handle].cancel()

    async def do_cancel(self, client: int, rollout_id: str) -> dict[str, str]:
        answer = await self.clients[client][0].cancel_rollout(rollout_id)
        return dict(answer.dispositions)

    async def do_health(self, client: int) -> dict[str, Any]:
        return await self.clients[client][0].health()

    async def do_wait_idle(self, client: int, options: dict[str, Any]) -> dict[str, Any]:
        return await self.clients[client][0].wait_idle(**options)


def dump(result: Any) -> dict[str, Any]:
    """A result as JSON, without what never travels."""
    value = result.model_dump(mode="json")
    if value["sample"] is not None:
        del value["sample"]["trajectory_messages"]
    return value


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def control() -> None:
    """Serve control connections until standard input ends."""
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin
    )
    sessions: set[asyncio.Task[None]] = set()

    def open_session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(Session(reader, writer).run())
        sessions.add(task)
        task.add_done_callback(sessions.discard)

    server = await asyncio.start_server(open_session, "127.0.0.1", limit=2**24)
    say(str(server.sockets[0].getsockname()[1]))
    await stdin.read()
    server.close()
    GATES.open_all()
    await asyncio.gather(*sessions, *(it.stop() for it in Session.servers.values()))


async def serve(options: dict[str, Any]) -> None:
    """Serve one server until a signal."""
    server = Server(options)
    await server.run_in_background()
    say(server.url)
    assert server.task is not None
    await server.task


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(control() if sys.argv[1] == "control" else serve(json.loads(sys.argv[2])))
