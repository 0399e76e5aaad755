"""What the workers of these tests serve: agents that say where they run, and do as told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import trio

from rollout import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, LocalBackend
from rollout.server import create_rollout_server

CALLERS_KEY = "key-of-the-callers"


class Told(AgentWorkflow[Any]):
    """Notes its start in a file, and answers with the id of its process."""

    async def run(self, ctx: Any) -> Any:
        script = ctx.prompt[0]
        if "starts" in script:
            with Path(script["starts"]).open("a") as file:
                file.write(f"{script['name']} {os.getpid()}\n")
        if script.get("exit"):
            os._exit(3)
        if script.get("block"):
            time.sleep(600)
        while "until" in script and not Path(script["until"]).exists():
            await trio.sleep(0.02)
        answer = __file__ if script.get("file") else str(os.getpid())
        return [*ctx.prompt, {"role": "assistant", "content": answer}]


app = create_rollout_server(
    backend=LocalBackend(
        workflow=Told,
        workflow_config=AgentWorkflowConfig(
            name="told", concurrency=ConcurrencyConfig(max_concurrent=2)
        ),
    ),
    api_key=CALLERS_KEY,
)
