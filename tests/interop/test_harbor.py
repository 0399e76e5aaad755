"""The rules of Harbor trials, by the official package and by this one, on the same input."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace

import pytest

from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.result.facts import facts_of
from rollout.backend.harbor.result.outcomes import outcome_of
from rollout.backend.harbor.trial.network import chat_url_inside
from rollout.types import RolloutSample

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("osmosis_ai", "harbor")),
        reason="needs osmosis-ai[harbor]",
    ),
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MESSAGES = [{"role": "assistant", "content": "42"}]
REWARDS = [{"reward": 1.0}, {"reward": 0.5, "style": 1.0}, {"style": 1.0}, {}, None]
SAMPLES = [{}, {"reward": 0.75}, {"remove_sample": True}, {"metrics": {"output_tokens": 9}}, None]
TOKENS = [(7, None, 3, 0.25), (None, None, None, None)]


def trial_result(rewards, tokens, sample):
    """Harbor's result of a trial whose workflow handed a sample back."""
    handed = {"status": "success"}
    if sample is not None:
        handed["sample"] = {"messages": MESSAGES, **sample}
    return SimpleNamespace(
        exception_info=None,
        agent_info=None,
        agent_result=SimpleNamespace(metadata=handed),
        environment_setup=None,
        agent_setup=None,
        agent_execution=None,
        verifier=None,
        verifier_result=SimpleNamespace(rewards=rewards),
        started_at=None,
        finished_at=None,
        step_results=None,
        compute_token_cost_totals=lambda: tokens,
    )


@pytest.fixture
def official(tmp_path):
    from harbor.trial.queue import TrialQueue
    from osmosis_ai.rollout.backend.harbor import HarborBackend

    backend = HarborBackend(orchestrator=TrialQueue(1), tasks_dir=tmp_path, agent="oracle")
    backend.native = None  # as for a workflow, which the constructor would package

    def outcome(result):
        pending = SimpleNamespace(label=None, api_key=None)
        return backend.grader_outcome(SimpleNamespace(result=result), "r", pending)

    return outcome


def known(result):
    sample = result.sample
    seen = None if sample is None else (sample.reward, sample.remove_sample, sample.metrics)
    return str(result.status.value), str(result.err_category and result.err_category.value), seen


@pytest.mark.parametrize(
    ("rewards", "sample", "tokens"), list(itertools.product(REWARDS, SAMPLES, TOKENS))
)
def test_the_same_comes_out(official, rewards, sample, tokens):
    result = trial_result(rewards, tokens, sample)
    ours = outcome_of(
        facts_of(result),
        None if sample is None else RolloutSample(messages=MESSAGES, **sample),
        grade=True,
        secrets=[],
    )
    assert known(ours.result) == known(official(result))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "docker"},
        {"type": "singularity"},
        {"type": "modal"},
        {"type": "daytona"},
        {"type": "daytona", "kwargs": {"auto_stop_interval_mins": 5}},
        {"type": "daytona", "delete": False},
        {"import_path": "some.module:Environment", "kwargs": {"a": 1}},
    ],
)
@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_environments_and_the_loopback_of_the_host(monkeypatch, tmp_path, fields, system):
    from harbor.models.trial.config import EnvironmentConfig
    from harbor.trial.queue import TrialQueue
    from osmosis_ai.rollout.backend.harbor import HarborBackend
    from osmosis_ai.rollout.backend.harbor import environment as official

    monkeypatch.setattr("platform.system", lambda: system)
    config = EnvironmentConfig(**fields)
    theirs = HarborBackend(
        orchestrator=TrialQueue(1), tasks_dir=tmp_path, agent="oracle", environment_config=config
    ).environment_config
    ours = EnvironmentSpec(config)
    assert EnvironmentConfig(**ours.fields({})).kwargs == theirs.kwargs
    for url in ("http://127.0.0.1:9000/v1", "http://[::1]/v1", "http://u:p@localhost:1/v1?a=b"):
        inside = chat_url_inside(url, ours)
        reached = ours.shares_host_network or inside != url
        assert reached == official.sandbox_reaches_host_loopback(theirs)
        if fields.get("type") == "docker":
            assert inside == official.rewrite_url_for_docker(url)
