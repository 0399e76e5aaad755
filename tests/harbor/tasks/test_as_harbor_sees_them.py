"""What we read of a task is what Harbor makes of it."""

from __future__ import annotations

import tomllib
from importlib import metadata

import pytest
from harbor.models.task.config import TaskConfig
from harbor.models.task.task import Task

from rollout.backend.harbor.tasks.files import describe, network_modes
from rollout.backend.harbor.tasks.source import TaskSource
from rollout.types import ExecutionRequest

pytestmark = pytest.mark.harbor

VERSION = tuple(map(int, metadata.version("harbor").split(".")[:2]))
ALLOW = 'network_mode = "allowlist"\nallowed_hosts = ["a.example"]\n'
OFF = 'network_mode = "no-network"\n'
STEPS = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "tasks" / "answer"
    for name in ("environment", "tests", "steps/one/tests", "steps/two"):
        (folder / name).mkdir(parents=True)
    for name in ("instruction.md", "steps/one/instruction.md", "steps/two/instruction.md"):
        (folder / name).write_text("Do it.")
    return folder


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ("", ["tests/test.sh"]),
        ("", []),
        ("", ["tests/test.bat"]),
        ('[environment]\nos = "windows"\n', ["tests/test.bat"]),
        ('[environment]\nos = "windows"\n', ["tests/test.sh"]),
        pytest.param(
            '[verifier]\nenvironment_mode = "separate"\n',
            [],
            marks=pytest.mark.skipif(
                VERSION < (0, 24), reason="Harbor does not look for tests of a separate verifier"
            ),
        ),
        (STEPS, ["tests/test.sh"]),
        (STEPS, ["steps/one/tests/test.sh"]),
        (STEPS, []),
    ],
)
def test_own_tests(task, config, files):
    (task / "task.toml").write_text(config)
    for name in files:
        (task / name).write_text("x")
    assert describe(task, "t").own_tests is Task.is_valid_dir(task)


@pytest.mark.filterwarnings("ignore:The 'allow_internet' field:DeprecationWarning")
@pytest.mark.parametrize(
    "config",
    ["", f"[environment]\n{ALLOW}", f"[environment]\n{OFF}",
     f"[environment]\n{OFF}[agent]\n{ALLOW}",
     "[environment]\nallow_internet = false\n", "[environment]\nallow_internet = true\n",
     '[environment]\nallow_internet = false\nnetwork_mode = "public"\n',
     f"[environment]\nallow_internet = false\n{ALLOW}",
     f'[[steps]]\nname = "one"\n[steps.agent]\n{OFF}'],
)  # fmt: skip
def test_network_modes(config):
    """The keys as they stand, and Harbor's models of them, come to the same."""
    models = TaskConfig.model_validate_toml(config)
    phases = [models.agent, *(step.agent for step in models.steps or [])]
    by_harbor = {
        (phase.explicit_phase_policy() or phases[0].explicit_phase_policy()
         or models.environment.resolve_baseline()).network_mode.value
        for phase in (phases[1:] or phases)
    }  # fmt: skip
    assert network_modes(tomllib.loads(config)) == by_harbor
    assert network_modes(models.model_dump(mode="json")) == by_harbor


def test_harbor_tells_the_prompt(task, tmp_path):
    (task / "task.toml").write_text("")
    (task / "tests" / "test.sh").write_text("x")
    (task / "instruction.md").write_text("Before.\n{{ prompt }}\nAfter.")
    request = ExecutionRequest(id="r1", prompt=[{"role": "user", "content": "# Hi\n\nädd"}])
    found = TaskSource(task).resolve(request, tmp_path)
    assert Task(found.folder).instruction == found.instruction == "Before.\n# Hi\n\nädd\nAfter."
