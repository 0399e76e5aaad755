"""What each workflow and grader gets for itself, and where a sample may come from."""

from __future__ import annotations

from typing import ClassVar

import pytest
import trio
import trio.testing
from backend.helpers import (
    MESSAGES,
    Progress,
    assert_nothing_is_left,
    backend,
    echo,
    execute,
    full_marks,
)

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ExecutionRequest,
    Grader,
    GraderConfig,
    LocalBackend,
    RolloutContext,
    RolloutSample,
    RolloutStatus,
    SampleSource,
    get_rollout_context,
)
from rollout.errors import SampleSourceError
from rollout.types import RolloutErrorCategory


class Tooled(AgentWorkflowConfig):
    tools: list[str] = []  # noqa: RUF012 - configs copy their mutable defaults


class Judge(GraderConfig):
    rubric: list[str] = []  # noqa: RUF012 - configs copy their mutable defaults


class Vandal(AgentWorkflow[Tooled]):
    seen: ClassVar = []

    async def run(self, ctx):
        assert self.config is ctx.config
        Vandal.seen.append(
            ([dict(m) for m in ctx.prompt], dict(ctx.metadata), list(ctx.config.tools))
        )
        ctx.metadata["nested"]["before"] = ctx.metadata["nested"]["key"]
        ctx.prompt[0]["content"] = "spoiled"
        ctx.prompt.append({"role": "spoiled"})
        ctx.metadata["nested"]["key"] = "spoiled"
        ctx.config.tools.append("spoiled")
        return ctx.prompt


class VandalJudge(Grader):
    seen: ClassVar = []

    async def grade(self, ctx):
        VandalJudge.seen.append((dict(ctx.metadata["nested"]), list(self.config.rubric)))
        ctx.metadata["nested"]["key"] = "spoiled by the grader"
        self.config.rubric.append("spoiled")
        ctx.set_reward(1)


async def test_prompt_metadata_and_configs_are_copies_of_the_rollouts_own():
    Vandal.seen.clear()
    VandalJudge.seen.clear()
    tooled, judge = Tooled(name="t", tools=["hammer"]), Judge(name="j", rubric=["fair"])
    local = LocalBackend(
        workflow=Vandal, workflow_config=tooled, grader=VandalJudge, grader_config=judge
    )
    request = ExecutionRequest(
        id="r", prompt=[{"role": "user", "content": "hi"}], metadata={"nested": {"key": "value"}}
    )
    for _ in range(2):
        outcome = await local.execute(request)
        assert outcome.result.status is RolloutStatus.SUCCESS
    assert request.prompt == [{"role": "user", "content": "hi"}]
    assert request.metadata == {"nested": {"key": "value"}}
    assert (tooled.tools, judge.rubric) == (["hammer"], ["fair"])
    prompt = [{"role": "user", "content": "hi"}]
    assert [seen[0] for seen in Vandal.seen] == [prompt, prompt]
    assert [seen[2] for seen in Vandal.seen] == [["hammer"], ["hammer"]]
    # The grader sees what the workflow has changed; the next rollout does not.
    assert [seen[1]["nested"]["before"] for seen in Vandal.seen] == ["value", "value"]
    assert VandalJudge.seen == [({"before": "value", "key": "spoiled"}, ["fair"])] * 2


@pytest.mark.parametrize("where", ["workflow_config", "grader_config", "metadata"])
async def test_what_cannot_be_copied_is_a_failure(where):
    class Stubborn:
        def __deepcopy__(self, memo):
            raise TypeError("not to be copied")

    local = backend(grade=full_marks)
    metadata = {}
    if where == "metadata":
        metadata = {"x": Stubborn()}
    else:
        object.__setattr__(getattr(local, where), "description", Stubborn())
    outcome = await execute(local, grade=True, metadata=metadata)
    assert outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert outcome.result.err_message == "not to be copied"
    assert_nothing_is_left(local)


@pytest.mark.parametrize("phase", ["workflow", "grader"])
async def test_a_constructor_that_raises_is_a_failure(phase):
    class Broken:
        def __init__(self, config):
            raise OSError("no model here")

        async def run(self, ctx):
            raise AssertionError

        grade = run

    local = backend(Broken) if phase == "workflow" else backend(echo, Broken)
    outcome = await execute(local, grade=phase == "grader", label="x")
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert outcome.result.err_message == "no model here"
    assert_nothing_is_left(local)


async def test_each_rollout_has_instances_of_its_own():
    made = []

    class Flow(AgentWorkflow):
        def __init__(self, config):
            super().__init__(config)
            made.append((self, get_rollout_context()))

        async def run(self, ctx):
            return ctx.prompt

    local = backend(Flow)
    for name in ("a", "b"):
        await local.execute(ExecutionRequest(id=name, prompt=[], grade=False))
    (first, first_context), (second, second_context) = made
    assert first is not second
    assert (first_context.rollout_id, second_context.rollout_id) == ("a", "b")


@pytest.mark.parametrize("value", ["text", 42, {"role": "user"}, ("a",), [1], ["text"], object()])
async def test_garbage_from_a_workflow_is_a_failure(value):
    async def run(ctx):
        return value

    outcome = await execute(backend(run))
    assert outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert outcome.result.sample is None


# --- contexts -----------------------------------------------------------------------------------


async def test_there_is_no_context_outside_and_nested_ones_restore():
    assert get_rollout_context() is None
    outer, inner = RolloutContext(rollout_id="outer"), RolloutContext(rollout_id="inner")
    with outer as entered:
        assert entered is outer
        assert get_rollout_context() is outer
        with inner, outer:
            assert get_rollout_context() is outer
        assert get_rollout_context() is outer
        with pytest.raises(KeyError), inner:
            assert get_rollout_context() is inner
            raise KeyError
        assert get_rollout_context() is outer
    assert get_rollout_context() is None


async def test_tasks_may_enter_one_context_at_the_same_time():
    context = RolloutContext(rollout_id="shared")
    seen = []

    async def enter(index):
        for _ in range(index):
            await trio.lowlevel.checkpoint()
        with context:
            for _ in range(5 - index):
                await trio.lowlevel.checkpoint()
            seen.append(get_rollout_context())
        seen.append(get_rollout_context())

    with RolloutContext(rollout_id="outer") as outer:
        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(enter, index)
    assert seen.count(context) == 3
    assert seen.count(outer) == 3


async def test_rollouts_side_by_side_see_their_own_context():
    seen = {}

    async def run(ctx):
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            seen.setdefault(ctx.metadata["name"], set()).add(get_rollout_context().rollout_id)
        return ctx.prompt

    local = backend(run)
    async with trio.open_nursery() as nursery:
        for name in ("a", "b", "c"):
            nursery.start_soon(lambda name=name: execute(local, name, metadata={"name": name}))
    assert seen == {"a": {"a"}, "b": {"b"}, "c": {"c"}}


async def test_a_context_without_a_server_reports_to_nobody():
    context = RolloutContext(rollout_id="r")
    context.report_status(RolloutStatus.GRADING)
    context.mark_agent_started()
    await context.set_status(RolloutStatus.RUNNING)
    assert await context.get_sample() is None


async def test_a_report_stands_even_if_setting_the_status_is_cancelled():
    progress = Progress()
    context = RolloutContext(rollout_id="r", progress=progress)
    with trio.CancelScope() as scope:
        scope.cancel()
        await context.set_status(RolloutStatus.GRADING)
    assert scope.cancelled_caught
    assert progress.names == ["grading"]


def test_a_context_hides_its_key():
    context = RolloutContext("http://chat", "sk-hunter2", "r")
    assert context.api_key == "sk-hunter2"
    assert "hunter2" not in repr(context)
    assert "rollout_id='r'" in repr(context)


# --- sample sources -----------------------------------------------------------------------------


class Source(SampleSource):
    def __init__(self, sample):
        self.sample = sample
        self.asked = 0

    async def get_sample(self):
        self.asked += 1
        await trio.lowlevel.checkpoint()
        if isinstance(self.sample, BaseException):
            raise self.sample
        return self.sample


def registering(*sources, returned=None):
    async def run(ctx):
        for source in sources:
            get_rollout_context().set_sample_source(source)
        return returned

    return run


@pytest.mark.parametrize(("own", "label"), [(None, "42"), ("mine", "mine")])
async def test_a_registered_source_makes_the_sample(own, label):
    source = Source(RolloutSample(messages=MESSAGES, label=own, metrics={"turns": 3}))
    outcome = await execute(backend(registering(source), full_marks), grade=True, label="42")
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample is source.sample
    assert outcome.result.sample.reward == 1.0
    assert outcome.result.sample.label == label
    assert source.asked == 1


async def test_returned_messages_win_over_a_source():
    source = Source(RolloutSample(label="source"))
    outcome = await execute(backend(registering(source, returned=[{"role": "user"}])))
    assert outcome.result.sample.messages == [{"role": "user"}]
    assert source.asked == 0


async def test_a_second_source_is_an_error():
    one = Source(RolloutSample())
    outcome = await execute(backend(registering(one, one)))
    assert outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert "sample source already" in outcome.result.err_message
    context = RolloutContext()
    context.set_sample_source(one)
    with pytest.raises(SampleSourceError):
        context.set_sample_source(Source(None))
    assert context.sample_source is one


async def test_no_source_means_no_sample():
    outcome = await execute(backend(registering()))
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample is None


async def test_a_source_without_a_sample_yet():
    outcome = await execute(backend(registering(Source(None))), label="x")
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample is None


@pytest.mark.parametrize("garbage", [{}, [], "text", 42, [{"role": "user"}]])
async def test_a_source_that_returns_garbage_is_a_failure(garbage):
    local = backend(registering(Source(garbage)))
    outcome = await execute(local)
    assert outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert "must be a RolloutSample" in outcome.result.err_message
    assert_nothing_is_left(local)


@pytest.mark.parametrize(
    ("error", "category"), [(ValueError("bad"), "validation_error"), (OSError("io"), "agent_error")]
)
async def test_a_source_that_raises_is_a_failure(error, category):
    outcome = await execute(backend(registering(Source(error))))
    assert outcome.result.err_category == category
    assert outcome.result.err_message == str(error)


async def test_a_slow_source_is_within_the_agents_time(autojump_clock):
    class Slow(SampleSource):
        async def get_sample(self):
            await trio.sleep(60)

    outcome = await execute(backend(registering(Slow())), agent_timeout_sec=5)
    assert outcome.result.err_category is RolloutErrorCategory.TIMEOUT
    assert trio.current_time() == 5
