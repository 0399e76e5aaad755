"""Workflows, graders and contexts out of plain functions, for tests of the backend."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from typing import Any

import trio
from attrs import evolve

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    ExecutionRequest,
    Grader,
    GraderConfig,
    LocalBackend,
    RolloutContext,
)

MESSAGES = [{"role": "user", "content": "What is 6 * 7?"}]
SECRET = "sk-hunter2/with+marks"


class Progress:
    """Takes reports as a server does, and keeps them with their time."""

    start_pending = False

    def __init__(self):
        self.events = []
        self.agent_started_at = None

    def report_status(self, status):
        self.events.append((str(status), trio.current_time()))

    def report_agent_started(self, at=None):
        self.events.append(("started", trio.current_time()))
        self.agent_started_at = self.agent_started_at or at or datetime.now(UTC)

    def settle(self, outcome):
        end = RolloutContext(rollout_id="r").settle(outcome)
        return evolve(end, agent_started_at=self.agent_started_at)

    @property
    def names(self):
        return [name for name, _ in self.events]


def workflow(body: Any) -> type[AgentWorkflow[Any]]:
    """A workflow class around ``body(ctx)``, async or plain as the body is."""
    if inspect.iscoroutinefunction(body):

        class Async(AgentWorkflow[Any]):
            async def run(self, ctx):
                return await body(ctx)

        return Async

    class Plain(AgentWorkflow[Any]):
        def run(self, ctx):
            return body(ctx)

    return Plain


def grader(body: Any) -> type[Grader]:
    """A grader class around ``body(ctx)``, async or plain as the body is."""
    if inspect.iscoroutinefunction(body):

        class Async(Grader):
            async def grade(self, ctx):
                return await body(ctx)

        return Async

    class Plain(Grader):
        def grade(self, ctx):
            return body(ctx)

    return Plain


async def echo(ctx: Any) -> Any:
    return ctx.prompt


async def full_marks(ctx: Any) -> None:
    ctx.set_reward(1.0)


def backend(
    run: Any = echo,
    grade: Any = None,
    *,
    slots: int | None = 4,
    grader_slots: int | None = None,
    depth: int | None = None,
) -> LocalBackend:
    """A LocalBackend around two functions."""
    return LocalBackend(
        workflow=run if inspect.isclass(run) else workflow(run),
        workflow_config=AgentWorkflowConfig(
            name="w", concurrency=ConcurrencyConfig(max_concurrent=slots)
        ),
        grader=grade if grade is None or inspect.isclass(grade) else grader(grade),
        grader_config=GraderConfig(
            name="g", concurrency=ConcurrencyConfig(max_concurrent=grader_slots)
        ),
        max_queue_depth=depth,
    )


async def execute(
    local: LocalBackend, rollout_id: str = "r", *, progress: Progress | None = None, **fields: Any
) -> Any:
    """Execute one rollout in a context of its own, ungraded unless the fields say otherwise."""
    fields.setdefault("grade", False)
    fields.setdefault("prompt", [dict(message) for message in MESSAGES])
    with RolloutContext(
        chat_completions_url="http://chat/v1",
        api_key=SECRET,
        rollout_id=rollout_id,
        progress=progress or Progress(),
    ):
        return await local.execute(ExecutionRequest(id=rollout_id, **fields))


def counts(local: LocalBackend) -> tuple[int, int]:
    """How many rollouts wait and run, as health reports them."""
    concurrency = local.health()["concurrency"]
    return concurrency["queued"], concurrency["running"]


def assert_nothing_is_left(local: LocalBackend) -> None:
    """Every slot and every place is free again."""
    assert counts(local) == (0, 0)
    assert local.has_capacity()
    assert local.executions == {}
    for slots in (local.slots, local._grader_slots):
        statistics = slots.limiter.statistics()
        assert statistics.borrowed_tokens == 0
        assert statistics.tasks_waiting == 0
