"""A worker as a process: the scripted workflow of the tests, which can end its process, too."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import Script, local_backend, make_app

from rollout.server import serve


class Deadly(Script):
    async def run(self, ctx: Any) -> Any:
        script = ctx.prompt[0]
        if "exit" in script:
            os._exit(script["exit"])
        return await super().run(ctx)


async def main(bind: str) -> None:
    await serve(make_app(local_backend(Deadly)), bind=bind)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
