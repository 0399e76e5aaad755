"""A server for subprocesses: ``python scripted_app.py`` prints its URL and serves."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import local_backend, make_app

from rollout.server import ShutdownBudget, serve

app = make_app(local_backend(max_concurrent=None), configure_logging=True)


async def main() -> None:
    async with trio.open_nursery() as nursery:

        async def run(
            *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
        ) -> None:
            budget = ShutdownBudget(drain_sec=float(sys.argv[1]))
            await serve(app, bind="127.0.0.1:0", shutdown=budget, task_status=task_status)

        urls = await nursery.start(run)
        print(urls[0], flush=True)  # noqa: T201 - what the parent process reads


if __name__ == "__main__":
    trio.run(main)
