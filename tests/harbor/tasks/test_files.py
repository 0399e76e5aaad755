"""What the files of a task say. With Harbor, its own models read them, to the same end."""

from __future__ import annotations

import pytest

from rollout.backend.harbor.errors import UnfitTaskError
from rollout.backend.harbor.tasks.files import describe

ALLOW = 'network_mode = "allowlist"\nallowed_hosts = ["a.example"]\n'
OFF = 'network_mode = "no-network"\n'
OPEN = 'network_mode = "public"\n'


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "task"
    for name in ("environment", "tests", "steps/one/tests", "steps/two"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("Do it.")
    return folder


def steps(one="", two=""):
    return "".join(
        f'[[steps]]\nname = "{name}"\n[steps.agent]\n{agent}\n'
        for name, agent in (("one", one), ("two", two))
    )


@pytest.mark.filterwarnings("ignore:The 'allow_internet' field:DeprecationWarning")
@pytest.mark.parametrize(
    ("config", "allowlisted", "offline"),
    [
        ("", False, False),
        (f"[environment]\n{OPEN}", False, False),
        (f"[environment]\n{ALLOW}", True, False),
        (f"[environment]\n{OFF}", False, True),
        (f"[environment]\n{OFF}[agent]\n{ALLOW}", True, False),
        (f"[environment]\n{ALLOW}[agent]\n{OFF}", False, True),
        (f"[environment]\n{ALLOW}[agent]\n{OPEN}", False, False),
        (f"[environment]\n{OPEN}[verifier]\n{OFF}", False, False),
        ("[environment]\nallow_internet = false\n", False, True),
        ("[environment]\nallow_internet = true\n", False, False),
        (f"[environment]\nallow_internet = false\n{OPEN}", False, False),
        (f"[environment]\n{ALLOW}{steps()}", True, False),
        (f"[environment]\n{ALLOW}{steps(two=OFF)}", True, True),
        (f"[agent]\n{OFF}{steps(one=ALLOW, two=OPEN)}", True, False),
        (steps(one=OFF), False, True),
    ],
)
def test_network(task, config, allowlisted, offline):
    (task / "task.toml").write_text(config)
    facts = describe(task, "t")
    assert (facts.allowlisted, facts.offline) == (allowlisted, offline)


@pytest.mark.parametrize(
    ("config", "files", "own"),
    [
        ("", ["tests/test.sh"], True),
        ("", [], False),
        ("", ["tests/test.bat"], False),
        ("", ["tests/check.sh"], False),
        ('[environment]\nos = "windows"\n', ["tests/test.bat"], True),
        ("[verifier.environment]\n", ["tests/Dockerfile"], True),
        ('[verifier.environment]\ndocker_image = "x:1"\n', [], True),
        ('[verifier]\nenvironment_mode = "separate"\n', ["tests/docker-compose.yaml"], True),
        ('[verifier]\nenvironment_mode = "separate"\n', [], False),
        ("", ["tests/Dockerfile"], False),
        (steps(), ["tests/test.sh"], True),
        (steps(), ["steps/one/tests/test.sh"], False),
        (steps(), ["steps/one/tests/test.sh", "tests/test.sh"], True),
    ],
)
def test_own_tests(task, config, files, own):
    (task / "task.toml").write_text(config)
    for name in files:
        (task / name).write_text("x")
    assert describe(task, "t").own_tests is own


def test_steps_and_instruction(task):
    (task / "task.toml").write_text(steps())
    assert (describe(task, "t").steps, describe(task, "t").instruction) == (("one", "two"), "")
    (task / "task.toml").write_text("")
    assert (describe(task, "t").steps, describe(task, "t").instruction) == ((), "Do it.")


def test_a_folder_without_task_file(task):
    with pytest.raises(UnfitTaskError, match=r"has no task\.toml"):
        describe(task, "t")


@pytest.mark.parametrize("config", [b"= 1", b"a = ", b"\xff\xfe"])
def test_a_broken_task_file(task, config):
    (task / "task.toml").write_bytes(config)
    with pytest.raises(UnfitTaskError, match=r"TOML|UTF-8"):
        describe(task, "t")


def test_steps_that_are_none(task):
    (task / "task.toml").write_text('steps = ["one"]\n')
    with pytest.raises(UnfitTaskError, match="steps"):
        describe(task, "t")
