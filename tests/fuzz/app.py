"""The server that is fuzzed. Its times and limits are small, so that no input takes long."""

from __future__ import annotations

from typing import Any

import trio

from rollout import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, Grader, LocalBackend
from rollout.server import create_rollout_server

KEY = "fuzz-key"


class Echo(AgentWorkflow[Any]):
    """Answers after a moment."""

    async def run(self, ctx: Any) -> Any:
        await trio.sleep(0.01)
        return [*ctx.prompt, {"role": "assistant", "content": "42"}]


class Compare(Grader):
    """Rewards an answer that equals the label."""

    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))


app = create_rollout_server(
    backend=LocalBackend(
        workflow=Echo,
        grader=Compare,
        workflow_config=AgentWorkflowConfig(
            name="echo", concurrency=ConcurrencyConfig(max_concurrent=64)
        ),
        max_queue_depth=1024,
    ),
    api_key=KEY,
    result_wait_timeout_sec=0.1,
    polling_lease_timeout_sec=1.0,
    result_retention_sec=1.0,
    max_request_bytes=1024 * 1024,
)
