"""What becomes of a rollout, by what its trial left behind. No Harbor is needed for that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from rollout.backend.harbor.errors import grader_error, workflow_error
from rollout.backend.harbor.result.facts import TrialError, TrialFacts, TrialProgress, facts_of
from rollout.backend.harbor.result.outcomes import categorize_trial_error, outcome_of
from rollout.backend.harbor.trial.plan import trial_name
from rollout.types import RolloutErrorCategory, RolloutSample, RolloutStatus

SAMPLE = RolloutSample(messages=[{"role": "assistant", "content": "done"}])
KEY = "sk-hunter2-hunter2"


def decide(*, grade=True, **facts):
    return outcome_of(TrialFacts(**facts), SAMPLE, grade=grade, secrets=[KEY])


def test_a_verified_reward_is_the_reward():
    outcome = decide(rewards={"reward": 1})
    assert outcome.result.status is RolloutStatus.SUCCESS
    assert outcome.result.sample.reward == 1.0
    assert outcome.result.sample.messages == SAMPLE.messages
    assert SAMPLE.reward is None  # the agent's sample itself is left alone


def test_a_reward_needs_no_conversation():
    outcome = outcome_of(TrialFacts(rewards={"reward": 1}), None, grade=True, secrets=[])
    assert outcome.workflow.sample is None
    assert outcome.result.sample.reward == 1.0
    assert outcome.result.sample.messages == []


def test_other_channels_are_kept_beside_the_reward():
    outcome = decide(rewards={"reward": 0.5, "style": 0.25})
    assert outcome.result.sample.reward == 0.5
    assert outcome.result.sample.extra_fields == {"rewards": {"style": 0.25}}


@pytest.mark.parametrize(
    "rewards",
    [None, {}, {"score": 1.0}, {"reward": None}, {"reward": float("nan")}, {"reward": True},
     {"reward": "1.0"}, {"reward": float("inf")}],
)  # fmt: skip
def test_no_usable_reward_fails_the_grading(rewards):
    outcome = decide(rewards=rewards)
    assert outcome.workflow.status is RolloutStatus.SUCCESS
    assert outcome.result.status is RolloutStatus.FAILURE
    assert outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert "reward" in outcome.result.err_message
    assert outcome.result.sample.reward is None


def test_without_grading_nothing_is_missing():
    outcome = decide(grade=False)
    assert outcome.grader is None
    assert outcome.result.status is RolloutStatus.SUCCESS


def test_an_error_of_the_agent_goes_before_the_grading():
    error = TrialError(type="NonZeroAgentExitCodeError", message="exit code 3")
    outcome = decide(errors=(error,), rewards={"reward": 1.0})
    assert outcome.result.status is RolloutStatus.FAILURE
    assert outcome.result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert outcome.result.err_message == "NonZeroAgentExitCodeError: exit code 3"
    assert outcome.result_to_save.sample.reward == 1.0  # kept, though it does not count


def test_an_error_of_the_agent_without_a_reward_is_all_there_is():
    outcome = decide(errors=(TrialError(type="AgentTimeoutError", message="after 5 s"),))
    assert outcome.grader is None
    assert outcome.result.err_category is RolloutErrorCategory.TIMEOUT


def test_an_error_of_the_verifier_is_the_graders():
    error = TrialError(type="VerifierTimeoutError", message="after 5 s", in_verifier=True)
    outcome = decide(errors=(error,))
    assert outcome.workflow.status is RolloutStatus.SUCCESS
    assert outcome.result.err_category is RolloutErrorCategory.TIMEOUT
    assert outcome.result.sample.messages == SAMPLE.messages


@pytest.mark.parametrize(
    ("category", "source", "expected"),
    [
        ("agent_error", "model_endpoint", "model_endpoint"),
        ("agent_error", None, None),
        ("timeout", None, None),
    ],
)
@pytest.mark.parametrize("make", [workflow_error, grader_error])
def test_a_failure_of_the_models_endpoint_stays_one(make, category, source, expected):
    raised = make(RolloutErrorCategory(category), "no answer", source)
    error = TrialError(
        type=type(raised).__name__, message=str(raised), in_verifier=make is grader_error
    )
    result = decide(errors=(error,)).result
    assert (result.err_category, result.err_source) == (RolloutErrorCategory(category), expected)
    assert result.err_message == "no answer"


def test_a_message_never_shows_the_key():
    outcome = decide(errors=(TrialError(type="RuntimeError", message=f"401 for {KEY}"),))
    assert KEY not in outcome.result.err_message
    assert "401" in outcome.result.err_message


@pytest.mark.parametrize(
    ("name", "message", "category"),
    [
        ("TimeoutError", "", "timeout"),
        ("AgentSetupTimeoutError", "", "timeout"),
        ("EnvironmentStartTimeoutError", "", "timeout"),
        ("SandboxTimeoutException", "", "timeout"),
        ("ValueError", "", "validation_error"),
        ("RewardFileNotFoundError", "", "validation_error"),
        ("SandboxConnectionException", "", "http_error"),
        ("SandboxApiException", "Create sandbox failed: HTTP 503", "http_error"),
        ("SandboxApiException", "the server said 404", "agent_error"),
        ("SandboxApiException", "sandbox 15035 is gone", "agent_error"),
        ("RuntimeError", "", "agent_error"),
    ],
)
def test_categories(name, message, category):
    assert categorize_trial_error(TrialError(type=name, message=message)) == category


# --- Harbor's result --------------------------------------------------------------------------

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def timing(start, seconds):
    return SimpleNamespace(started_at=start, finished_at=start + timedelta(seconds=seconds))


def harbor_error(name, at):
    return SimpleNamespace(
        exception_type=name, exception_message="m", exception_traceback="t", occurred_at=at
    )


def harbor_result(**fields):
    return SimpleNamespace(
        **{
            "exception_info": None,
            "verifier": None,
            "verifier_result": None,
            "agent_info": SimpleNamespace(name="oracle", version="1"),
            "step_results": None,
            "compute_token_cost_totals": lambda: (7, None, 3, None),
            **fields,
        }
    )


def test_facts_tell_whose_error_it_was():
    later = NOON + timedelta(seconds=1)
    verifier = timing(NOON, 5)
    facts = facts_of(
        harbor_result(exception_info=harbor_error("VerifierTimeoutError", later), verifier=verifier)
    )
    assert facts.errors == (
        TrialError(type="VerifierTimeoutError", message="m", traceback="t", in_verifier=True),
    )
    facts = facts_of(
        harbor_result(
            exception_info=harbor_error("AgentTimeoutError", NOON - timedelta(seconds=1)),
            verifier=verifier,
        )
    )
    assert not facts.errors[0].in_verifier


def test_facts_take_errors_of_steps_tokens_and_timings():
    step = SimpleNamespace(exception_info=harbor_error("RuntimeError", NOON), verifier=None)
    facts = facts_of(
        harbor_result(
            step_results=[step],
            agent_execution=timing(NOON, 2.5),
            verifier_result=SimpleNamespace(rewards={"reward": 1.0}),
        )
    )
    assert [error.type for error in facts.errors] == ["RuntimeError"]
    assert (facts.prompt_tokens, facts.completion_tokens, facts.cost_usd) == (7, 3, None)
    assert facts.timings == {"agent_execution": 2.5}
    assert facts.rewards == {"reward": 1.0}
    assert facts.agent == ("oracle", "1")


@pytest.mark.parametrize(
    ("marks", "phase"),
    [
        ({}, "its trial was set up"),
        ({"environment_started"}, "its environment was set up"),
        ({"environment_started", "agent_started"}, "its agent ran"),
        ({"agent_started", "verification_started", "verifying"}, "its verifier ran"),
        # The second step of a task.
        ({"agent_started", "verification_started"}, "its agent ran"),
    ],
)
def test_progress_names_the_phase(marks, phase):
    assert TrialProgress(**dict.fromkeys(marks, True)).phase == phase


def test_names_of_trials_are_readable_safe_and_never_the_same():
    names = {trial_name("Group 7/../x" * 20) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("group-7-x") and len(name) < 60 for name in names)
    assert trial_name("…").startswith("rollout-")


@pytest.mark.parametrize("name", ["RecursionError", "IsADirectoryError", "MemoryError"])
def test_a_reward_that_cannot_be_read_is_no_fault_of_the_agent(name):
    traceback = 'File "verifier.py", line 98, in _parse_reward_json'
    error = TrialError(type=name, in_verifier=True, traceback=traceback)
    assert categorize_trial_error(error) == "validation_error"
    elsewhere = TrialError(type=name, in_verifier=True, traceback="in some_grader")
    assert categorize_trial_error(elsewhere) == "agent_error"
