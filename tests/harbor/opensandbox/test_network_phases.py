"""What Harbor makes of the hosts that are added: whom they reach, and whom they do not.

The environment only records what it is told; a sandbox that changes its network is not at hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest
from harbor.environments.opensandbox import OpenSandboxEnvironment
from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.plan import TrialPlan
from rollout.backend.harbor.tasks.source import TaskSource
from rollout.backend.harbor.trial.network import agent_extra_hosts
from rollout.context import RolloutContext
from rollout.types import ExecutionRequest

pytestmark = [pytest.mark.harbor, pytest.mark.filterwarnings("ignore::DeprecationWarning:harbor")]

CHAT_URL = "http://models.example:8000/v1"
ALLOW = 'network_mode = "allowlist"\nallowed_hosts = ["a.example"]\n'
OFF = 'network_mode = "no-network"\n'


class Recording(OpenSandboxEnvironment):
    """Takes every policy, and keeps what it is told."""

    told: list

    @property
    def capabilities(self):
        known = super().capabilities
        names = (
            [field.name for field in dataclasses.fields(known)]
            if dataclasses.is_dataclass(known)
            else list(type(known).model_fields)
        )
        switches = {name: True for name in names if "network" in name}
        if dataclasses.is_dataclass(known):
            return dataclasses.replace(known, **switches)
        return known.model_copy(update=switches)

    async def start(self, force_build):
        self.told.append(("start", self._network_policy))
        await super().start(force_build)

    async def _apply_network_policy(self, network_policy):
        self.told.append(("change", network_policy))


@pytest.fixture
def policies(server, task, tmp_path, monkeypatch):
    """Run a trial; return the policies of its environment, as (when, mode, hosts)."""

    def run(config):
        monkeypatch.setattr(Recording, "told", [], raising=False)
        module = ModuleType("recording_environment")
        module.Recording = Recording
        monkeypatch.setitem(sys.modules, module.__name__, module)
        text = (task / "task.toml").read_text()
        (task / "task.toml").write_text(text + config)
        request = ExecutionRequest(
            id="r1",
            prompt=[{"role": "user", "content": "x"}],
            metadata={"harbor_task_id": task.name},
        )
        found = TaskSource(task.parent, "dataset").resolve(request, Path("/nowhere"))
        plan = TrialPlan(
            request=request,
            context=RolloutContext(chat_completions_url=CHAT_URL),
            workspace=tmp_path,
            name="r1-0a1b",
            task=found,
        )
        spec = EnvironmentSpec(
            {
                "import_path": "recording_environment:Recording",
                "kwargs": {
                    "api_key": server.api_key,
                    "domain": server.domain,
                    "protocol": "http",
                },
            }
        )

        async def trial():
            made = await Trial.create(
                TrialConfig.model_validate(
                    {
                        "task": found.source,
                        "trial_name": plan.name,
                        "trials_dir": plan.trials_dir,
                        "agent": {
                            "name": "oracle",
                            "extra_allowed_hosts": agent_extra_hosts(plan),
                        },
                        "environment": spec.fields({}),
                    }
                )
            )
            return await made.run()

        result = asyncio.run(trial())
        assert result.exception_info is None
        assert result.verifier_result.rewards == {"reward": 1.0}
        return [
            (when, policy.network_mode.value, policy.allowed_hosts)
            for when, policy in Recording.told
        ]

    return run


def test_only_the_agents_phase_is_let_out_to_the_endpoint(policies):
    assert policies(ALLOW) == [
        ("start", "allowlist", ["a.example"]),
        ("change", "allowlist", ["a.example", "models.example"]),
        ("change", "allowlist", ["a.example"]),
    ]


def test_an_allowlist_of_the_agent_alone(policies):
    assert policies(f"[agent]\n{ALLOW}[verifier]\n{OFF}") == [
        ("start", "public", []),
        ("change", "allowlist", ["a.example", "models.example"]),
        ("change", "public", []),
        ("change", "no-network", []),
        ("change", "public", []),
    ]


def test_no_network_stays_no_network(policies):
    assert policies(OFF) == [("start", "no-network", [])]


def test_an_agent_without_a_network_in_an_allowlisted_environment(policies):
    assert policies(f"{ALLOW}[agent]\n{OFF}") == [
        ("start", "allowlist", ["a.example"]),
        ("change", "no-network", []),
        ("change", "allowlist", ["a.example"]),
    ]


def test_a_public_network_is_left_alone(policies):
    assert policies("") == [("start", "public", [])]
