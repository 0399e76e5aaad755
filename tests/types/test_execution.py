"""What backends answer: which of two results counts, and what they may hold."""

from __future__ import annotations

import itertools

import pytest

from rollout.errors import InvalidFieldError
from rollout.types import (
    ExecutionOutcome,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)

SUCCESS, FAILURE, CANCELLED = (
    RolloutStatus.SUCCESS,
    RolloutStatus.FAILURE,
    RolloutStatus.CANCELLED,
)


def result(status, sample=None):
    return ExecutionResult(status=status, sample=sample)


MADE = RolloutSample(label="made")
GRADED = RolloutSample(label="graded")


def test_a_successful_workflow_without_a_grader_is_the_result():
    workflow = result(SUCCESS, MADE)
    outcome = ExecutionOutcome(workflow=workflow)
    assert outcome.result is workflow
    assert outcome.result_to_save is workflow


@pytest.mark.parametrize("status", [SUCCESS, FAILURE, CANCELLED])
def test_after_a_successful_workflow_the_grader_has_the_word(status):
    workflow, grader = result(SUCCESS, MADE), result(status, GRADED)
    outcome = ExecutionOutcome(workflow=workflow, grader=grader)
    assert outcome.result is grader
    assert outcome.result_to_save is grader


def test_a_grader_without_a_sample_leaves_the_workflows_sample_to_be_saved():
    workflow, grader = result(SUCCESS, MADE), result(FAILURE)
    outcome = ExecutionOutcome(workflow=workflow, grader=grader)
    assert outcome.result is grader
    assert outcome.result_to_save is workflow


@pytest.mark.parametrize(
    ("status", "grader"),
    list(
        itertools.product(
            [FAILURE, CANCELLED], [None, result(SUCCESS), result(SUCCESS, GRADED), result(FAILURE)]
        )
    ),
)
def test_a_workflow_that_failed_with_a_sample_is_the_result(status, grader):
    workflow = result(status, MADE)
    outcome = ExecutionOutcome(workflow=workflow, grader=grader)
    assert outcome.result is workflow
    graded = grader is not None and grader.sample is not None
    assert outcome.result_to_save is (grader if graded else workflow)


@pytest.mark.parametrize("status", [FAILURE, CANCELLED])
def test_a_workflow_that_failed_without_a_sample_reports_the_graders(status):
    workflow = ExecutionResult(
        status=status, err_message="boom", err_category=RolloutErrorCategory.AGENT_ERROR
    )
    outcome = ExecutionOutcome(workflow=workflow, grader=result(SUCCESS, GRADED))
    assert outcome.result.status is status
    assert outcome.result.sample is GRADED
    assert outcome.result.err_message == "boom"
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert workflow.sample is None
    assert outcome.result_to_save is outcome.grader


@pytest.mark.parametrize("status", [FAILURE, CANCELLED])
@pytest.mark.parametrize("grader", [None, result(SUCCESS)])
def test_no_sample_anywhere(status, grader):
    workflow = result(status)
    outcome = ExecutionOutcome(workflow=workflow, grader=grader)
    assert outcome.result is workflow
    assert outcome.result_to_save is workflow


def test_a_status_and_a_category_by_name_count_like_the_members():
    outcome = ExecutionOutcome(
        workflow=ExecutionResult(status="success", sample=MADE),
        grader=ExecutionResult(status="failure", err_category="timeout"),
    )
    assert outcome.result is outcome.grader
    assert outcome.result.err_category is RolloutErrorCategory.TIMEOUT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", "done"),
        ("status", None),
        ("sample", {"messages": []}),
        ("err_message", ValueError("x")),
        ("err_category", "oops"),
        ("extra_fields", []),
    ],
)
def test_a_bad_field_of_a_result_is_refused_by_name(field, value):
    with pytest.raises(InvalidFieldError, match=f"^{field} must be"):
        ExecutionResult(**{"status": SUCCESS, field: value})


@pytest.mark.parametrize("field", ["workflow", "grader"])
@pytest.mark.parametrize("value", [{}, "success", RolloutSample()])
def test_an_outcome_holds_results_only(field, value):
    with pytest.raises(InvalidFieldError, match=f"^{field} must be"):
        ExecutionOutcome(**{"workflow": result(SUCCESS), field: value})
