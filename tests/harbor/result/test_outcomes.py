"""What becomes of a rollout, by what its trial left behind. No Harbor is needed for that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import attrs
import pytest

from rollout.backend.harbor.errors import GraderError, WorkflowError
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.plan import trial_name
from rollout.backend.harbor.result.facts import TrialError, TrialFacts, facts_of
from rollout.backend.harbor.result.outcomes import categorize_trial_error, outcome_of
from rollout.backend.harbor.trial.run import TrialRun
from rollout.context import RolloutContext
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


@pytest.mark.parametrize(
    "errors", [(), (TrialError(type="GraderError", message="no sample", in_verifier=True),)]
)
def test_a_grading_needs_a_sample(errors):
    facts = TrialFacts(rewards={"reward": 1}, errors=errors)
    outcome = outcome_of(facts, None, grade=True, secrets=[], missing="it left no trajectory")
    assert outcome.workflow.status is RolloutStatus.SUCCESS
    assert outcome.result.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert outcome.result.err_message == "there is no sample to grade: it left no trajectory"
    ungraded = outcome_of(TrialFacts(), None, grade=False, secrets=[], missing="as above")
    assert (ungraded.result.status, ungraded.result.sample) == (RolloutStatus.SUCCESS, None)


def test_a_removed_sample_needs_no_reward():
    removed = attrs.evolve(SAMPLE, remove_sample=True)
    for rewards in (None, {}, {"style": 0.25}, {"reward": None}):
        result = outcome_of(TrialFacts(rewards=rewards), removed, grade=True, secrets=[]).result
        assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, None)
        assert result.sample.remove_sample


def test_a_reward_that_the_agent_set_stays_without_the_verifiers():
    preset = attrs.evolve(SAMPLE, reward=0.75)

    def reward(rewards):
        facts = TrialFacts(rewards=rewards)
        return outcome_of(facts, preset, grade=True, secrets=[]).result.sample.reward

    assert reward({"style": 0.25}) == 0.75
    assert reward({"reward": 0.5}) == 0.5


@pytest.mark.parametrize("changes", [{"reward": 0.75}, {"remove_sample": True}])
def test_a_damaged_reward_fails_whatever_the_agent_set(changes):
    facts = TrialFacts(rewards={"reward": float("nan")})
    sample = attrs.evolve(SAMPLE, **changes)
    assert outcome_of(facts, sample, grade=True, secrets=[]).result.status == "failure"


def test_tokens_and_cost_are_metrics_that_the_agents_own_go_before():
    usage = {"prompt_tokens": 7, "cached_tokens": None, "completion_tokens": 3, "cost_usd": 0.25}
    own = attrs.evolve(SAMPLE, metrics={"turns": 2, "output_tokens": 4})
    expected = {"input_tokens": 7, "output_tokens": 4, "cost_usd": 0.25, "turns": 2}
    graded = attrs.evolve(own, reward=1.0)
    for grade, judged in ((True, None), (True, graded), (False, None)):
        facts = TrialFacts(rewards={"reward": 1.0}, usage=usage)
        outcome = outcome_of(facts, own, grade=grade, secrets=[], graded=judged)
        assert outcome.result.sample.metrics == expected
        assert outcome.workflow.sample.metrics == expected
    error = TrialError(type="AgentTimeoutError")
    failed = outcome_of(TrialFacts(errors=(error,), usage=usage), own, grade=True, secrets=[])
    assert failed.workflow.sample.metrics == expected
    assert own.metrics == {"turns": 2, "output_tokens": 4}


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
@pytest.mark.parametrize("kind", [WorkflowError, GraderError])
def test_a_failure_of_the_models_endpoint_stays_one(kind, category, source, expected):
    raised = kind("no answer", RolloutErrorCategory(category), source)
    error = TrialError(
        type=kind.__name__,
        message=str(raised),
        in_verifier=kind is GraderError,
        exception=raised,
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
    assert facts.errors == (TrialError(type="VerifierTimeoutError", message="m", in_verifier=True),)
    facts = facts_of(
        harbor_result(
            exception_info=harbor_error("AgentTimeoutError", NOON - timedelta(seconds=1)),
            verifier=verifier,
        )
    )
    assert not facts.errors[0].in_verifier


def test_facts_have_the_exceptions_that_were_seen():
    seen, other = ValueError("m"), KeyError("m")
    result = harbor_result(exception_info=harbor_error("ValueError", NOON))
    assert facts_of(result, [other, seen]).errors[0].exception is seen
    assert facts_of(result, [other, ValueError("n")]).errors[0].exception is None


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
    assert facts.usage == {
        "prompt_tokens": 7,
        "cached_tokens": None,
        "completion_tokens": 3,
        "cost_usd": None,
    }
    assert facts.timings == {"agent_execution": 2.5}
    assert facts.rewards == {"reward": 1.0}
    assert facts.agent == ("oracle", "1")


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ("", "its trial was set up"),
        ("START ENVIRONMENT_START", "its environment was set up"),
        ("START ENVIRONMENT_START AGENT_START AGENT_END", "its agent ran"),
        ("AGENT_START VERIFICATION_START", "its verifier ran"),
        # The second step of a task.
        ("AGENT_START VERIFICATION_START AGENT_START", "its agent ran"),
    ],
)
def test_the_phase_follows_from_the_events(events, phase):
    trial = TrialRun(RolloutContext(), lambda _: None, EnvironmentWatch("t", 1.0))
    for name in events.split():
        trial.take(name)
    assert trial.phase == phase


def test_names_of_trials_are_readable_safe_and_never_the_same():
    names = {trial_name("Group 7/../x" * 20) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("group-7-x") and len(name) < 60 for name in names)
    assert trial_name("…").startswith("rollout-")


@pytest.mark.parametrize("name", ["RecursionError", "IsADirectoryError", "MemoryError"])
def test_a_reward_that_cannot_be_read_is_no_fault_of_the_agent(name):
    error = TrialError(type=name, in_verifier=True)
    assert categorize_trial_error(error) == "validation_error"
    assert categorize_trial_error(TrialError(type=name)) == "agent_error"
