"""Who grades a trial, and what becomes of it. No Harbor is needed for that."""

from __future__ import annotations

import json
import os
import re

import pytest
import trio

from rollout import Grader, GraderConfig, RolloutContext, get_rollout_context
from rollout.backend.harbor.errors import GraderError, UserCodeError, WorkflowError
from rollout.backend.harbor.grading.grader import grade
from rollout.backend.harbor.grading.verifier import (
    check_gradable,
    verifier_fields,
    with_placeholder_tests,
)
from rollout.backend.harbor.handover import Handover, current_handover
from rollout.backend.harbor.plan import ResolvedTask, TrialPlan
from rollout.backend.harbor.result.facts import TrialError, TrialFacts
from rollout.backend.harbor.result.outcomes import categorize_trial_error, outcome_of
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.types import ExecutionRequest, RolloutErrorCategory, RolloutSample, RolloutStatus

KEY = "sk-hunter2-hunter2"
UNSET = "reward was not set by the grader: call set_reward"
MISSING = (
    "sample is missing: the workflow returned no messages and registered no sample source, so "
    "there is nothing to grade"
)


@pytest.fixture
def plan(tmp_path):
    def make(*, own_tests=False, grader_sec=None, **request):
        return TrialPlan(
            request=ExecutionRequest(id="r", prompt=[], **request),
            context=RolloutContext(api_key=KEY, rollout_id="r"),
            workspace=tmp_path,
            name="r-1",
            task=ResolvedTask(
                name="t", source={"path": "t"}, folder=tmp_path / "t", own_tests=own_tests
            ),
            grader_timeout_sec=grader_sec,
        )

    return make


class Scripted(Grader):
    def grade(self, ctx):
        return ctx.metadata["do"](ctx)


class AsyncScripted(Grader):
    async def grade(self, ctx):
        await trio.lowlevel.checkpoint()
        return ctx.metadata["do"](ctx)


def handover(plan, do, *, grader=AsyncScripted, sample=None, **fields):
    return Handover(
        plan=plan(metadata={"do": do}, **fields),
        read_sample=lambda _: sample or RolloutSample(messages=[{"content": "42"}]),
        grader_cls=grader,
        grader_config=GraderConfig(name="g"),
    )


def throw(error):
    raise error


# --- the grader -------------------------------------------------------------------------------


@pytest.mark.parametrize("grader", [Scripted, AsyncScripted])
async def test_a_grader_sees_its_rollout_and_leaves_marks(plan, grader):
    seen = {}

    def do(ctx):
        seen.update(
            label=ctx.label, project=ctx.project_path, artifacts=ctx.artifacts_dir,
            rollout=get_rollout_context().rollout_id,
        )  # fmt: skip
        ctx.sample.metrics["m"] = 1
        ctx.set_reward(0.5)

    over = handover(plan, do, grader=grader, label="42")
    graded = await grade(over)
    assert graded is over.graded
    assert (graded.reward, graded.metrics) == (0.5, {"m": 1})
    assert seen["label"] == "42"
    assert seen["rollout"] == "r"
    assert seen["project"] == str(over.plan.task.folder)
    assert seen["artifacts"].is_dir()
    assert seen["artifacts"].is_relative_to(over.plan.trial_dir / "artifacts")


@pytest.mark.parametrize("grader", [Scripted, AsyncScripted])
@pytest.mark.parametrize(
    ("do", "category", "message"),
    [
        (lambda ctx: throw(TimeoutError("slow")), "timeout", "slow"),
        (lambda ctx: throw(ValueError(f"no {KEY}")), "validation_error", "no [redacted]"),
        (lambda ctx: throw(KeyError("k")), "agent_error", "KeyError: 'k'"),
        (lambda ctx: throw(SystemExit(3)), "agent_error", "SystemExit: 3"),
        (lambda ctx: None, "validation_error",
         UNSET),
        (lambda ctx: 1.0, "validation_error",
         f"{UNSET} (a value that grade() returns is ignored)"),
        (lambda ctx: ctx.set_reward(float("inf")), "validation_error",
         "reward must be a finite number, not inf"),
        (lambda ctx: setattr(ctx, "sample", 7), "validation_error",
         "the sample must be a RolloutSample, not int"),
        (lambda ctx: setattr(ctx, "sample", None), "validation_error",
         MISSING),
    ],
)  # fmt: skip
async def test_what_a_grader_does_wrong(plan, grader, do, category, message, caplog):
    over = handover(plan, do, grader=grader)
    with pytest.raises(GraderError) as raised:
        await grade(over)
    assert over.graded is None
    error = TrialError(
        type="GraderError", message=str(raised.value), in_verifier=True, exception=raised.value
    )
    assert categorize_trial_error(error) == category
    outcome = outcome_of(TrialFacts(errors=(error,)), RolloutSample(), grade=True, secrets=[KEY])
    assert outcome.result.err_message == message
    assert outcome.result.err_category == category
    assert "the grader failed" in caplog.text
    assert KEY not in caplog.text


async def test_a_removed_sample_needs_no_reward(plan):
    over = handover(plan, lambda ctx: setattr(ctx.sample, "remove_sample", True))
    graded = await grade(over)
    outcome = outcome_of(TrialFacts(), RolloutSample(), grade=True, secrets=[], graded=graded)
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample is graded
    assert outcome.result.sample.reward is None


async def test_a_grader_cannot_change_the_request_or_its_config(plan):
    def do(ctx):
        ctx.metadata["do"] = None
        ctx.set_reward(1)

    over = handover(plan, do)
    await grade(over)
    assert over.plan.request.metadata["do"] is do


@pytest.mark.parametrize("grader", [Scripted, AsyncScripted])
async def test_a_cancelled_grading_leaves_nothing(plan, grader, autojump_clock):
    class Forever(grader):
        async def grade(self, ctx):
            await trio.sleep_forever()

    over = handover(plan, None, grader=Forever)
    with trio.move_on_after(5) as scope:
        await grade(over)
    assert scope.cancelled_caught
    assert over.graded is None


# --- the handover -----------------------------------------------------------------------------


async def test_the_handover_is_that_of_the_trial(plan):
    with pytest.raises(BackendConfigurationError, match="HarborBackend"):
        current_handover()
    outer, inner = handover(plan, None), handover(plan, None)
    with outer:
        with inner:
            assert current_handover() is inner
            assert await trio.to_thread.run_sync(current_handover) is inner
        assert current_handover() is outer


# --- who grades -------------------------------------------------------------------------------


def test_nobody_grades_what_is_not_to_be_graded(plan):
    for own_tests in (True, False):
        assert verifier_fields(plan(own_tests=own_tests, grade=False)) == {"disable": True}


def test_own_tests_go_before_the_grader(plan):
    fields = verifier_fields(plan(own_tests=True, label="4\n2", metadata={"a": ["ü"]}))
    assert fields == {"env": {"ROLLOUT_LABEL": "4\n2", "ROLLOUT_METADATA": '{"a":["\\u00fc"]}'}}
    assert verifier_fields(plan(own_tests=True)) == {"env": {}}


def test_the_grader_grades_where_there_are_none(plan):
    fields = verifier_fields(plan(label="x", grader_sec=2.5))
    assert fields == {
        "import_path": "rollout.backend.harbor.grading.grader_verifier:GraderVerifier",
        "override_timeout_sec": 2.5,
    }
    fields = verifier_fields(plan(metadata={}, grader_sec=0.0))
    assert 0 < fields["override_timeout_sec"] < 0.1


@pytest.mark.parametrize(
    ("grader", "request_fields", "message"),
    [
        (None, {"label": "x"}, "no grader"),
        (Scripted, {}, "neither a label nor metadata"),
    ],
)
def test_what_cannot_be_graded_says_so_before_it_runs(plan, grader, request_fields, message):
    made = plan(**request_fields)
    with pytest.raises(InvalidFieldError, match=message):
        check_gradable(made.request, made.task, grader)


@pytest.mark.parametrize("label", ["${HOME}", "${HOME:-x}", "${A}${B}", "$HOME", "${HOME} ", "${}"])
def test_a_label_is_no_template_of_this_process(plan, label, monkeypatch):
    """Harbor replaces a value that is a template as a whole; what it makes of ours is the label."""
    monkeypatch.setenv("HOME", "/secret")
    value = verifier_fields(plan(own_tests=True, label=label))["env"]["ROLLOUT_LABEL"]
    assert as_harbor_resolves(value) == label


def as_harbor_resolves(value):
    match = re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", value)
    if match is None:
        return value
    return os.environ.get(match[1], match[2])


@pytest.mark.parametrize("label", ["a\0b", "${A\nB}"])
def test_labels_that_no_environment_variable_can_hold(plan, label):
    with pytest.raises(InvalidFieldError, match="label"):
        verifier_fields(plan(own_tests=True, label=label))


def test_what_is_too_long_for_a_variable_is_left_out(plan, caplog):
    fields = verifier_fields(plan(own_tests=True, label="x", metadata={"a": "b" * 200_000}))
    assert fields["env"] == {"ROLLOUT_LABEL": "x"}
    assert "ROLLOUT_METADATA is too long" in caplog.text


def test_a_task_without_tests_gets_some_that_fail(tmp_path):
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "task.toml").write_text("version = '1.0'\n")
    task = ResolvedTask(name="t", source={"path": str(folder)}, folder=folder, own_tests=False)
    copy = with_placeholder_tests(task, tmp_path / "work")
    assert copy.source == {"path": str(copy.folder)}
    assert copy.folder.name == "task"
    assert "exit 1" in (copy.folder / "tests" / "test.sh").read_text()
    assert (copy.folder / "task.toml").read_text() == "version = '1.0'\n"
    assert not (folder / "tests").exists()
    assert copy.own_tests is False


def test_a_task_with_tests_stays_where_it_is(tmp_path):
    task = ResolvedTask(name="t", source={"path": "t"}, folder=tmp_path, own_tests=True)
    assert with_placeholder_tests(task, tmp_path) is task


@pytest.mark.parametrize("category", list(RolloutErrorCategory))
def test_every_category_has_an_error_for_workflows_and_graders(category):
    users = {"timeout", "validation_error", "http_error"}
    expected = category if category in users else RolloutErrorCategory.AGENT_ERROR
    for kind in (GraderError, WorkflowError):
        error = kind("m", category)
        assert isinstance(error, UserCodeError)
        assert not isinstance(error, TimeoutError)  # Harbor would take that for its own deadline
        assert error.category is expected


def test_metadata_is_json_in_the_tests_environment(plan):
    metadata = {"a": [None, 1.5, {"b": "\ud800"}]}
    fields = verifier_fields(plan(own_tests=True, metadata=metadata))
    assert json.loads(fields["env"]["ROLLOUT_METADATA"]) == metadata
