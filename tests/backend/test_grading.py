"""Grading: what it takes to begin, and what a grader may leave behind."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing
from backend.helpers import (
    Progress,
    assert_nothing_is_left,
    backend,
    counts,
    echo,
    execute,
    full_marks,
)

from rollout import RolloutSample, RolloutStatus
from rollout.types import AgentWorkflowOutput, RolloutErrorCategory


def assert_invalid(outcome, *words):
    assert outcome.result.status is RolloutStatus.FAILURE
    assert outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    for word in words:
        assert word in outcome.result.err_message


PRECONDITIONS = [
    (None, {"label": "42"}, "no grader"),
    (None, {"metadata": {"a": 1}}, "no grader"),
    (full_marks, {}, "neither a label nor metadata"),
]


@pytest.mark.parametrize(("grade", "fields", "words"), PRECONDITIONS)
async def test_what_is_missing_fails_before_the_agent_runs(grade, fields, words):
    ran = []

    async def run(ctx):
        ran.append(ctx)

    local, progress = backend(run, grade), Progress()
    outcome = await execute(local, progress=progress, grade=True, **fields)
    assert_invalid(outcome, words, "grade=false")
    assert outcome.grader is None
    assert ran == []
    assert progress.names == []
    assert_nothing_is_left(local)


@pytest.mark.parametrize(("grade", "fields", "words"), PRECONDITIONS)
async def test_it_fails_at_once_while_all_slots_are_taken(autojump_clock, grade, fields, words):
    async def run(ctx):
        await trio.sleep(60)

    local = backend(run, grade, slots=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: execute(local, "first"))
        await trio.testing.wait_all_tasks_blocked()
        assert_invalid(await execute(local, "second", grade=True, **fields), words)
        assert trio.current_time() == 0
        assert counts(local) == (0, 1)


@pytest.mark.parametrize(
    "fields", [{"label": ""}, {"label": "42"}, {"metadata": {}}, {"label": "", "metadata": {}}]
)
async def test_an_empty_label_or_empty_metadata_is_enough(fields):
    outcome = await execute(backend(grade=full_marks), grade=True, **fields)
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample.reward == 1.0
    assert outcome.result.sample.label == fields.get("label")


async def test_ungraded_rollouts_leave_the_grader_alone():
    called = []

    async def grade(ctx):
        called.append(ctx)

    progress = Progress()
    outcome = await execute(backend(grade=grade), progress=progress, label="42", grade=False)
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample.reward is None
    assert outcome.grader is None
    assert called == []
    assert progress.names == ["started"]


async def test_a_failed_workflow_is_not_graded():
    called = []

    async def run(ctx):
        raise KeyError("x")

    async def grade(ctx):
        called.append(ctx)

    progress = Progress()
    outcome = await execute(backend(run, grade), progress=progress, label="42", grade=True)
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert outcome.grader is None
    assert called == []
    assert progress.names == ["started"]


async def test_the_grader_sees_sample_label_and_metadata():
    seen = []

    async def run(ctx):
        return AgentWorkflowOutput(messages=[*ctx.prompt, {"role": "assistant"}], metrics={"n": 1})

    async def grade(ctx):
        seen.append(ctx)
        ctx.set_reward(0.25)

    outcome = await execute(
        backend(run, grade), grade=True, label="42", metadata={"difficulty": "hard"}
    )
    (ctx,) = seen
    assert ctx.label == "42"
    assert ctx.metadata == {"difficulty": "hard"}
    assert ctx.sample is outcome.result.sample
    assert ctx.sample.messages[-1] == {"role": "assistant"}
    assert ctx.sample.metrics == {"n": 1}
    assert ctx.sample.label == "42"
    assert ctx.sample.reward == 0.25


@pytest.mark.parametrize("returned", [None, 1.0, "good"])
async def test_a_grader_that_sets_no_reward_is_a_failure(returned):
    async def grade(ctx):
        return returned

    local = backend(grade=grade)
    outcome = await execute(local, grade=True, label="42")
    assert_invalid(outcome, "reward was not set", "set_reward")
    assert ("returns is ignored" in outcome.result.err_message) == (returned is not None)
    assert outcome.result.sample is outcome.workflow.sample
    assert_nothing_is_left(local)


async def test_a_removed_sample_needs_no_reward():
    async def grade(ctx):
        ctx.sample.remove_sample = True

    outcome = await execute(backend(grade=grade), grade=True, label="42")
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample.remove_sample is True


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1.0", [], 10**400])
async def test_a_reward_of_another_kind_is_a_failure(reward):
    async def grade(ctx):
        ctx.set_reward(reward)

    outcome = await execute(backend(grade=grade), grade=True, label="42")
    assert_invalid(outcome, "reward must be a finite number")
    assert outcome.result.sample.reward is None


async def test_a_workflow_without_messages_leaves_nothing_to_grade():
    async def run(ctx):
        return None

    ungraded = await execute(backend(run, full_marks), grade=False)
    assert ungraded.result.status is RolloutStatus.SUCCESS
    assert ungraded.result.sample is None
    outcome = await execute(backend(run, full_marks), grade=True, label="42")
    assert_invalid(outcome, "sample is missing")


async def test_a_grader_that_only_looks_at_nothing_is_told_what_is_missing():
    async def run(ctx):
        return None

    async def grade(ctx):
        return None

    outcome = await execute(backend(run, grade), grade=True, label="42")
    assert_invalid(outcome, "the workflow returned no messages")


async def test_a_grader_may_put_another_sample_in_place():
    async def grade(ctx):
        ctx.sample = RolloutSample(messages=[{"role": "tool"}], reward=0.5)

    outcome = await execute(backend(grade=grade), grade=True, label="42")
    assert outcome.result.sample.messages == [{"role": "tool"}]
    assert outcome.result.sample.reward == 0.5


async def test_garbage_in_place_of_the_sample_is_a_failure():
    async def grade(ctx):
        ctx.sample = {"reward": 1.0}

    outcome = await execute(backend(grade=grade), grade=True, label="42")
    assert_invalid(outcome, "must be a RolloutSample, not dict")
    assert outcome.result.sample is outcome.workflow.sample


async def test_a_failing_grader_keeps_the_sample():
    async def grade(ctx):
        ctx.set_reward(1.0)
        raise RuntimeError("boom")

    outcome = await execute(backend(echo, grade), grade=True, label="42")
    assert outcome.result.status is RolloutStatus.FAILURE
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert outcome.result.err_message == "boom"
    assert outcome.result.sample is outcome.workflow.sample
