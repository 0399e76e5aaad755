"""``rollout serve`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager

import trio
from trial_support import Rollouts

from rollout.client import RolloutClient


class Process:
    def __init__(self, process, lines):
        self.process = process
        self.lines = lines

    @property
    def log(self):
        return "".join(self.lines)


@asynccontextmanager
async def server_process(file, tmp_path, *options, **variables):
    """`rollout serve`, and a client of it; reads its log all the while."""
    lines: list[str] = []
    send, receive = trio.open_memory_channel(1)
    environ = os.environ | {
        "TMPDIR": str(tmp_path / "tmp"),
        "HOME": str(tmp_path / "home"),
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    command = [sys.executable, "-m", "rollout.cli", "serve", f"{file}:app"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            lambda task_status: trio.run_process(
                [*command, "--bind", "127.0.0.1:0", *options],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                check=False,
                task_status=task_status,
            )
        )

        async def read(stream):
            rest = ""
            async for data in stream:
                *whole, rest = (rest + data.decode()).split("\n")
                for line in whole:
                    lines.append(line + "\n")
                    if "http://127.0.0.1:" in line and not announced:
                        announced.append(True)
                        await send.send(line)

        announced: list[bool] = []
        nursery.start_soon(read, process.stdout)
        nursery.start_soon(read, process.stderr)
        with trio.fail_after(120):
            line = await receive.receive()
        url = next(word for word in line.split() if word.startswith("http")).rstrip(".,")
        async with RolloutClient(url=url) as client:
            yield Process(process, lines), Rollouts(url, client, None)
        nursery.cancel_scope.cancel()
