"""Uses the public face as users do; the type checkers read it, nothing runs it."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

from rollout import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, Grader, GraderContext
from rollout.client import (
    FinishedRollout,
    RolloutClient,
    RolloutGroup,
    RolloutHandle,
    RolloutRetry,
)
from rollout.evaluation import AttemptRecord, EvaluationMetrics, evaluate, load_config
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import (
    RolloutInitRequest,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)


class SolverConfig(AgentWorkflowConfig):
    temperature: float = 0.7


class Solve(AgentWorkflow[SolverConfig]):
    async def run(self, ctx: AgentWorkflowContext[SolverConfig]) -> list[dict[str, str]]:
        assert ctx.config is not None
        assert_type(ctx.config.temperature, float)
        assert_type(ctx.artifacts_dir, Path | None)
        return [{"role": "assistant", "content": "42"}]


class Compare(Grader):
    def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(1.0)


config = SolverConfig(name="solver", temperature=0.2)
contexts = (
    AgentWorkflowContext(prompt=[], config=config, artifacts_dir=Path("artifacts")),
    GraderContext(label="42", artifacts_dir=Path("artifacts")),
)


async def use(client: RolloutClient) -> None:
    handle = await client.run_rollout_async([], "http://127.0.0.1/v1", "id")
    assert_type(handle, RolloutHandle)
    assert_type(await handle, RolloutResultResponse)
    assert_type(await handle.wait_for_grading(), RolloutStatus)
    async for status in handle.statuses():
        assert_type(status, RolloutStatus)
    result = await client.run_rollout([], "http://127.0.0.1/v1", "id", grade=False, run="run")
    assert_type(result.sample.reward if result.sample else None, float | None)


async def use_many(client: RolloutClient, requests: list[RolloutInitRequest]) -> None:
    async with client.run_rollouts(requests, max_in_flight=2, retry=RolloutRetry()) as finished:
        async for ended in finished:
            request, outcome = ended
            assert_type(request, RolloutInitRequest)
            assert_type(outcome, RolloutResultResponse | Exception)
            assert ended.admitted in {"yes", "no", "unknown"}
    for call in (await client.fetch_trajectory("r")).calls:
        assert_type(call.completion_token_ids, list[int] | None)
    async with client.run_groups(requests, samples=2, deadline_sec=60) as groups:
        async for group in groups:
            assert_type(group, RolloutGroup)
            assert_type(group.samples, list[RolloutSample])
            assert_type(group.failures, list[FinishedRollout])
    found = await client.first_successes(requests, 1)
    assert_type(found[0], FinishedRollout)
    assert_type(found.failures, list[FinishedRollout])


async def evaluate_all() -> EvaluationMetrics | None:
    async with evaluate(load_config("eval.toml"), retry_failed=True) as run:
        async for record in run:
            assert_type(record, AttemptRecord)
            assert_type(record.reward, float | None)
    return run.metrics


async def count(up_to: int) -> int:
    return up_to


async def bridged() -> None:
    async with open_asyncio_bridge() as bridge:
        assert_type(await bridge.run(count, 3), int)
