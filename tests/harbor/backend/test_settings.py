"""Settings of a backend that reach its trials."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout.backend.harbor import TaskMode
from rollout.backend.harbor.trial import network
from rollout.errors import BackendConfigurationError
from rollout.types import RolloutErrorCategory

pytestmark = pytest.mark.harbor

FLOW = """
from rollout import AgentWorkflow, AgentWorkflowOutput, get_rollout_context


class Agent(AgentWorkflow):
    async def run(self, ctx):
        url = get_rollout_context().chat_completions_url
        return AgentWorkflowOutput(messages=[{"role": "assistant", "content": url}])
"""


@pytest.fixture
def agent(tmp_path, monkeypatch):
    (tmp_path / "flow_of_settings_test.py").write_text(FLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "flow_of_settings_test:Agent"


async def test_the_setup_of_an_agent_may_have_less_time(make_task, make_backend, serving, agent):
    make_task()
    async with serving(make_backend(agent=agent, agent_setup_timeout_sec=0.001)) as rollouts:
        result = await rollouts.run()
    assert result.err_category is RolloutErrorCategory.TIMEOUT
    assert "AgentSetupTimeoutError" in result.err_message


async def test_docker_on_macos_reaches_the_loopback_of_the_host(
    make_task, make_backend, serving, agent, monkeypatch
):
    make_task()
    monkeypatch.setattr(network, "platform", SimpleNamespace(system=lambda: "Darwin"))
    backend = make_backend(agent=agent, task_mode=TaskMode.TEMPLATE)
    monkeypatch.setattr(backend.settings.environment, "name", "docker")
    async with serving(backend) as rollouts:
        result = await rollouts.run(chat_completions_url="http://127.0.0.1:9/v1")
    assert result.sample.messages[0]["content"] == "http://host.docker.internal:9/v1"


@pytest.mark.parametrize(
    "options",
    [{"agent_setup_timeout_sec": 0}, {"verified_tasks": "answer"}, {"verified_tasks": 7}],
)
def test_settings_are_checked(make_task, make_backend, options):
    make_task()
    with pytest.raises(BackendConfigurationError, match=next(iter(options))):
        make_backend(**options)
