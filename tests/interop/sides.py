"""One face for two systems, so that a scenario is written once and run every way round.

An `OfficialSide` speaks to the process of `interop.official`; an `OurSide` runs here. Both
make servers and clients that take the same calls, give results as plain JSON, and raise
`Failed` for whatever their system raised.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from interop.ours import build_app, build_backend, new_gates
from interop.script import CHAT_URL, Traffic
from support import make_app

from rollout.client import RolloutClient
from rollout.codec import unstructure
from rollout.pool import PoolBackend
from rollout.server import RolloutServer, serve

TESTS = Path(__file__).parent.parent


class Failed(Exception):
    """What a client raised: the names of its classes, its text, its status code."""

    def __init__(self, kinds: list[str], message: str, status_code: int | None) -> None:
        super().__init__(f"{kinds[0]}({status_code}): {message}")
        self.kinds = set(kinds)
        self.status_code = status_code


@contextmanager
def failures() -> Generator[None, None, None]:
    """Raise errors of the block as `Failed`."""
    try:
        yield
    except Exception as error:
        kinds = [cls.__name__ for cls in type(error).__mro__]
        raise Failed(kinds, str(error), getattr(error, "status_code", None)) from error


def with_defaults(request: dict[str, Any]) -> dict[str, Any]:
    """Complete a request: a prompt around its ``script``, and an endpoint."""
    script = request.pop("script", {})
    message = {"role": "user", "content": "What is 6 * 7?", "script": script}
    return {"initial_messages": [message], "chat_completions_url": CHAT_URL, **request}


# --- the official side ------------------------------------------------------------------------


class Control:
    """A control connection to the official process; any number of calls at a time."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._numbers = count()
        self._sending = trio.Lock()
        self._replies: dict[int, trio.MemorySendChannel[dict[str, Any]]] = {}

    async def call(self, op: str, **args: Any) -> Any:
        number = next(self._numbers)
        send, receive = trio.open_memory_channel[dict[str, Any]](1)
        self._replies[number] = send
        line = json.dumps({"n": number, "op": op, "args": args}) + "\n"
        async with self._sending:
            await self._stream.send_all(line.encode())
        with send, receive:
            reply = await receive.receive()
        if "error" in reply:
            raise Failed(**reply["error"])
        return reply["value"]

    async def read_replies(self) -> None:
        async for line in lines(self._stream):
            reply = json.loads(line)
            channel = self._replies.pop(reply["n"])
            try:
                channel.send_nowait(reply)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                continue  # its caller was cancelled


async def lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    """The lines of a stream, without their ends."""
    buffer = b""
    async for data in stream:
        *complete, buffer = (buffer + data).split(b"\n")
        for line in complete:
            yield line


async def first_line(stream: trio.abc.ReceiveStream) -> str:
    """The first line of a stream, empty if there is none."""
    line = b""
    while not line.endswith(b"\n") and (data := await stream.receive_some(1)):
        line += data
    return line.decode().strip()


class OfficialServer:
    def __init__(self, control: Control, url: str) -> None:
        self._control = control
        self.url = url

    async def reached(self, gate: str) -> None:
        await self._control.call("reached", gate=gate)

    async def release(self, gate: str) -> None:
        await self._control.call("release", gate=gate)


class OfficialHandle:
    def __init__(self, control: Control, number: int) -> None:
        self._call = partial(control.call, handle=number)

    async def running(self) -> str:
        return await self._call("wait", milestone="running")

    async def grading(self) -> str:
        return await self._call("wait", milestone="grading")

    async def completion(self) -> dict[str, Any]:
        return await self._call("completion")

    async def look(self) -> dict[str, Any]:
        return await self._call("look")

    async def stop(self) -> bool:
        return await self._call("stop")


class OfficialClient:
    def __init__(self, control: Control, number: int) -> None:
        self._control = control
        self._call = partial(control.call, client=number)

    async def run(self, **request: Any) -> dict[str, Any]:
        return await self._call("run", request=with_defaults(request))

    async def start(self, **request: Any) -> OfficialHandle:
        number = await self._call("start", request=with_defaults(request))
        return OfficialHandle(self._control, number)

    async def cancel(self, rollout_id: str) -> dict[str, str]:
        return await self._call("cancel", rollout_id=rollout_id)

    async def health(self) -> dict[str, Any]:
        return await self._call("health")

    async def wait_idle(self, **options: Any) -> dict[str, Any]:
        return await self._call("wait_idle", options=options)

    async def answered(self, route: str, **what: Any) -> list[dict[str, Any]]:
        return await self._call("answered", route=route, **what)

    async def let_polls_pass(self, gate: str) -> None:
        await self._control.call("release", gate=gate)

    async def hold_polls(self, gate: str) -> None:
        """Let the poll through that waits at the gate, if one does, and hold the next one."""
        await self._control.call("let_through", gate=gate)
        await self._control.call("reached", gate=gate)


class OfficialSide:
    ours = False
    module = "interop.official"

    def __init__(self, control: Control) -> None:
        self._control = control

    async def server(self, options: dict[str, Any]) -> OfficialServer:
        return OfficialServer(self._control, await self._control.call("serve", options=options))

    async def client(self, poll_gate: str | None, options: dict[str, Any]) -> OfficialClient:
        number = await self._control.call("client", poll_gate=poll_gate, options=options)
        return OfficialClient(self._control, number)


# --- our side ---------------------------------------------------------------------------------


class OurServer:
    def __init__(self, gates: Any, url: str) -> None:
        self._gates = gates
        self.url = url

    async def reached(self, gate: str) -> None:
        await self._gates.reached(gate)

    async def release(self, gate: str) -> None:
        self._gates.release(gate)
        await trio.lowlevel.checkpoint()


class OurHandle:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def running(self) -> str:
        with failures():
            return str(await self._handle.wait_for_running())

    async def grading(self) -> str:
        with failures():
            return str(await self._handle.wait_for_grading())

    async def completion(self) -> dict[str, Any]:
        with failures():
            result = await self._handle
            assert await self._handle.wait_for_completion() is result
            return unstructure(result)

    async def look(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        latest = self._handle.latest_result
        return {
            "status": str(self._handle.status),
            "done": self._handle.done(),
            "latest": None if latest is None else unstructure(latest),
        }

    async def stop(self) -> bool:
        await trio.lowlevel.checkpoint()
        return self._handle.cancel()


class OurClient:
    def __init__(self, client: RolloutClient, traffic: Traffic, gates: Any) -> None:
        self._client = client
        self._gates = gates
        self.answered = traffic.answered

    async def run(self, **request: Any) -> dict[str, Any]:
        with failures():
            return unstructure(await self._client.run_rollout(**with_defaults(request)))

    async def start(self, **request: Any) -> OurHandle:
        with failures():
            return OurHandle(await self._client.run_rollout_async(**with_defaults(request)))

    async def cancel(self, rollout_id: str) -> dict[str, str]:
        with failures():
            return (await self._client.cancel_rollout(rollout_id)).dispositions

    async def cancel_many(self, **selector: Any) -> dict[str, str]:
        """Cancel by another selector than ids; the official client has no call for that."""
        with failures():
            return (await self._client.cancel_rollouts(**selector)).dispositions

    async def health(self) -> dict[str, Any]:
        with failures():
            return await self._client.health()

    async def wait_idle(self, **options: Any) -> dict[str, Any]:
        with failures():
            return await self._client.wait_idle(**options)

    async def let_polls_pass(self, gate: str) -> None:
        self._gates.release(gate)
        await trio.lowlevel.checkpoint()


class OurSide:
    ours = True
    module: str | None = "interop.ours"

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def server(self, options: dict[str, Any]) -> OurServer:
        gates = new_gates()
        return OurServer(gates, await self._serve(build_app(options, gates)))

    async def _serve(self, app: RolloutServer) -> str:
        urls = await self._nursery.start(
            partial(serve, app, bind="127.0.0.1:0", handle_signals=False)
        )
        return urls[0]

    async def client(self, poll_gate: str | None, options: dict[str, Any]) -> OurClient:
        gates = new_gates()
        with failures():
            client = RolloutClient(**options)
        traffic = Traffic(trio.Event, gates, poll_gate)
        traffic.watch(client.http_client)
        await self._nursery.start(_keep_open, client)
        return OurClient(client, traffic, gates)


class FrontSide(OurSide):
    """Servers of ours that are fronts over two workers, which share the slots."""

    module = None

    async def server(self, options: dict[str, Any]) -> OurServer:
        gates = new_gates()
        slots = options.get("max_concurrent", 4)
        shares = [None, None] if slots is None else [slots // 2, slots - slots // 2]
        workers = [
            await self._serve(make_app(build_backend({**options, "max_concurrent": share}, gates)))
            for share in shares
            if share != 0
        ]
        backend = PoolBackend(workers, max_queue_depth=options.get("max_queue_depth"))
        url = await self._serve(build_app(options, gates, backend))
        with trio.fail_after(30):
            while any(each["status"] != "up" for each in backend.health()["workers"]):
                await trio.sleep(0.01)
        return OurServer(gates, url)


async def _keep_open(client: RolloutClient, task_status: trio.TaskStatus[None]) -> None:
    async with client:
        task_status.started()
        await trio.sleep_forever()


# --- both -------------------------------------------------------------------------------------


class Pair:
    """A client of one side and servers of another."""

    def __init__(self, client_side: Any, server_side: Any) -> None:
        self._client_side = client_side
        self._server_side = server_side

    @property
    def our_server(self) -> bool:
        """Whether the server is ours."""
        return self._server_side.ours

    async def server(self, **options: Any) -> Any:
        """Serve with these options; the official side shares a server among equal ones."""
        return await self._server_side.server(options)

    async def client(self, url: str, *, poll_gate: str | None = None, **options: Any) -> Any:
        """Make a client; with a *poll_gate* its polls wait there before they are sent."""
        return await self._client_side.client(poll_gate, {"url": url, **options})

    async def connect(self, **options: Any) -> tuple[Any, Any]:
        """A server, and a client of it."""
        server = await self.server(**options)
        return server, await self.client(server.url)

    def launched(self, **options: Any) -> Any:
        """A server in a process of its own; see `launched`."""
        if self._server_side.module is None:
            pytest.skip("fronts are not launched as processes here")
        return launched(self._server_side.module, options)


def command(module: str, *args: str) -> list[str]:
    """The command line that runs one of the scripts of this folder."""
    return [sys.executable, "-m", module, *args]


def environment(home: str) -> dict[str, str]:
    """The environment for them: these modules, the package as installed, and no proxy.

    The official backend keeps files of every rollout in the user's home, so it gets another.
    """
    return {
        **os.environ,
        "HOME": home,
        "USERPROFILE": home,
        "PYTHONPATH": str(TESTS),
        "PYTHONSAFEPATH": "1",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }


@asynccontextmanager
async def launched(
    module: str, options: dict[str, Any]
) -> AsyncGenerator[tuple[trio.Process, str], None]:
    """Run a server as a process of its own for the length of the block; yields it and its URL.

    It is killed at the end of the block if it still runs.
    """
    with tempfile.TemporaryDirectory(prefix="interop-") as home:
        process = await trio.lowlevel.open_process(
            command(module, "serve", json.dumps(options)),
            stdout=subprocess.PIPE,
            cwd=home,
            env=environment(home),
        )
        assert process.stdout is not None
        try:
            with trio.fail_after(60):
                url = await first_line(process.stdout)
            assert url, f"{module} ended before it served"
            yield process, url
        finally:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
                await process.stdout.aclose()
