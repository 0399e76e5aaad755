"""A real server process and real signals: every caller that polls gets its result."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from support import CHAT_URL, prompt

from rollout.client import RolloutClient
from rollout.types import RolloutStatus

SCRIPT = Path(__file__).parent / "scripted_app.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


class Lines:
    """The lines of a process's output, as they come."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self.stream = stream
        self.text = ""

    async def until(self, wanted: str) -> str:
        """Read on until a line holds *wanted*; return that line."""
        while True:
            *lines, rest = self.text.split("\n")
            for number, line in enumerate(lines):
                if wanted in line:
                    self.text = "\n".join([*lines[number + 1 :], rest])
                    return line
            self.text = rest
            data = await self.stream.receive_some()
            assert data, f"the process ended without a line that says {wanted!r}"
            self.text += data.decode()

    async def drain(self) -> None:
        """Keep reading, so that the process never waits for its reader."""
        async for data in self.stream:
            self.text += data.decode()


class Server:
    def __init__(self, process: trio.Process, url: str, log: Lines) -> None:
        self.process = process
        self.url = url
        self.log = log


@asynccontextmanager
async def server_process(*command: str, cwd: Path | None = None) -> AsyncGenerator[Server, None]:
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            lambda task_status: trio.run_process(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                check=False,
                cwd=cwd,
                task_status=task_status,
            )
        )
        assert process.stdout is not None
        assert process.stderr is not None
        log = Lines(process.stderr)
        if "hypercorn" in command:
            line = await log.until("Running on")
        else:
            line = await Lines(process.stdout).until("http")
        url = next(word for word in line.split() if word.startswith("http"))
        yield Server(process, url, log)
        nursery.cancel_scope.cancel()


async def start(client, number, **script):
    handle = await client.run_rollout_async(
        prompt(**script), CHAT_URL, f"rollout-{number}", label="42"
    )
    await handle.wait_for_running()
    return handle


async def test_sigterm_while_fifty_rollouts_run():
    async with server_process(str(SCRIPT), "0.2") as server:
        async with RolloutClient(url=server.url) as client:
            handles = [await start(client, number, sleep=3600) for number in range(50)]
            server.process.send_signal(signal.SIGTERM)
            statuses = [(await handle).status for handle in handles]
        with trio.fail_after(30):
            code = await server.process.wait()
    assert statuses == [RolloutStatus.CANCELLED] * 50
    assert code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_work_that_ends_within_the_drain_succeeds(number):
    async with server_process(str(SCRIPT), "60") as server:
        async with RolloutClient(url=server.url) as client:
            handle = await start(client, 0, sleep=0.5)
            server.process.send_signal(number)
            result = await handle
        with trio.fail_after(30):
            code = await server.process.wait()
    assert result.status is RolloutStatus.SUCCESS
    assert code == 0


async def test_a_second_signal_skips_the_drain():
    async with server_process(str(SCRIPT), "3600") as server:
        async with RolloutClient(url=server.url) as client:
            handle = await start(client, 0, sleep=3600)
            server.process.send_signal(signal.SIGTERM)
            await server.log.until("shutting down: waiting for rollouts")
            server.process.send_signal(signal.SIGTERM)
            result = await handle
        with trio.fail_after(30):
            code = await server.process.wait()
    assert result.status is RolloutStatus.CANCELLED
    assert code == 0


async def test_a_server_without_work_exits_at_once():
    async with server_process(str(SCRIPT), "3600") as server:
        server.process.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await server.process.wait() == 0


async def test_the_app_runs_under_plain_hypercorn_too():
    command = ("-m", "hypercorn", "-k", "trio", "-b", "127.0.0.1:0", "scripted_app:app")
    async with server_process(*command, cwd=SCRIPT.parent) as server:
        async with RolloutClient(url=server.url) as client:
            result = await client.run_rollout(prompt(), CHAT_URL, "a", label="42")
        server.process.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await server.process.wait() == 0
    assert result.status is RolloutStatus.SUCCESS
