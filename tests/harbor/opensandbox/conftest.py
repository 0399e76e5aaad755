"""A stand-in for an OpenSandbox server, and trials in it by Harbor's own environment."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("opensandbox") is None:
    collect_ignore_glob = ["test_*.py"]


def _load_lifecycle():
    place = Path(__file__).with_name("lifecycle.py")
    spec = importlib.util.spec_from_file_location("opensandbox_lifecycle", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name in list(os.environ):
        if "OPENSANDBOX" in name or "OPEN_SANDBOX" in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("OPENSANDBOX_DISABLE_METRICS", "1")
    with _load_lifecycle().running(tmp_path / "sandboxes") as running:
        yield running


SOLVE = "#!/bin/bash\nprintf 'the answer is %s' 42 > answer.txt\n"
TEST = """#!/bin/bash
cd "$(dirname "$0")/.."
if [ "$(cat app/answer.txt)" = "the answer is 42" ]; then reward=1; else reward=0; fi
echo "$reward" > logs/verifier/reward.txt
"""


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "tasks" / "answer"
    for name, text in (("solution/solve.sh", SOLVE), ("tests/test.sh", TEST)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "environment").mkdir()
    (folder / "instruction.md").write_text("Write the answer.")
    (folder / "task.toml").write_text(
        '[environment]\ndocker_image = "example/image:1"\nworkdir = "/app"\n'
    )
    return folder


@pytest.fixture
def no_waits(monkeypatch):
    """Let Harbor's own retries come at once."""
    from harbor.environments.opensandbox import OpenSandboxEnvironment

    async def at_once(_):
        pass

    monkeypatch.setattr(OpenSandboxEnvironment._create_sandbox.retry, "sleep", at_once)


@pytest.fixture
def run_trial(task, tmp_path):
    """Run a trial of the oracle; return Harbor's result and the watch of its environment."""
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    from rollout.backend.harbor.limits import EnvironmentWatch

    async def run(spec, environ):
        trial = await Trial.create(
            TrialConfig.model_validate(
                {
                    "task": {"path": task},
                    "trial_name": "r1-0a1b",
                    "trials_dir": tmp_path / "trials",
                    "agent": {"name": "oracle"},
                    "environment": spec.fields(environ),
                }
            )
        )
        watch = EnvironmentWatch("r1-0a1b", 60.0)
        watch.watch(trial.agent_environment)
        return await trial.run(), watch

    return lambda spec, environ: asyncio.run(run(spec, environ))
