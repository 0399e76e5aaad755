"""The part that runs inside a sandbox, run here as it would run there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rollout.backend.harbor.inside import bootstrap
from rollout.backend.harbor.inside.bundle import Bundle
from rollout.backend.harbor.inside.documents import make_payload, read_result
from rollout.types import ExecutionRequest, RolloutErrorCategory

KEY = "sk-hunter2-hunter2"
FLOWS = """
import os, subprocess, sys, trio
from rollout import AgentWorkflow, get_rollout_context
from rollout.integrations.chat import chat

def mark():
    rollout = get_rollout_context()
    return [{
        "url": rollout.chat_completions_url, "key": rollout.api_key, "id": rollout.rollout_id,
        "leader": os.getpgrp() == os.getpid(),
        "inherited": subprocess.run(["env"], capture_output=True, text=True).stdout,
    }]

class Async(AgentWorkflow):
    async def run(self, ctx):
        await trio.sleep(0)
        return mark()

class Plain(AgentWorkflow):
    def run(self, ctx):
        trio.from_thread.run(trio.sleep, 0)
        return mark()

class Returns(AgentWorkflow):
    def run(self, ctx):
        return 7

class Leaves(AgentWorkflow):
    async def run(self, ctx):
        await trio.open_nursery().__aenter__()

class Large(AgentWorkflow):
    def run(self, ctx):
        return [{"content": "x" * (65 * 1024 * 1024)}]

class Surprise(AgentWorkflow):
    def run(self, ctx):
        raise ImportError(get_rollout_context().api_key)

class Missing(AgentWorkflow):
    def run(self, ctx):
        import no_such_module

class Dead(AgentWorkflow):
    async def run(self, ctx):
        get_rollout_context().chat_completions_url = "http://127.0.0.1:9/v1"
        await chat(ctx.prompt, model="policy")

class Late(AgentWorkflow):
    def run(self, ctx):
        raise TimeoutError("late")

class Exits(AgentWorkflow):
    async def run(self, ctx):
        sys.exit(3)

class Artifacts(AgentWorkflow):
    def run(self, ctx):
        (ctx.artifacts_dir / "a.txt").write_text("kept")
"""


@pytest.fixture
def home(tmp_path):
    """A home as `SandboxAgent` makes it, without what is installed here."""
    for name in ("in", "out", "site"):
        (tmp_path / name).mkdir(parents=True)
    bundle = Bundle({"flows_in_a_sandbox.py": FLOWS.encode()}, ())
    (tmp_path / "in" / "site.zip").write_bytes(bundle.archive())
    (tmp_path / "in" / "needs.json").write_text("[]")
    bootstrap.unpack(tmp_path)
    return tmp_path


def run(home, workflow, *, artifacts="artifacts", key=KEY):
    (home / "in" / "payload.json").write_bytes(
        make_payload(
            ExecutionRequest(id="r-1", prompt=[{"role": "user", "content": "p"}]),
            workflow=workflow,
            config=None,
            instruction=None,
            artifacts_dir=str(home / artifacts),
        )
    )
    done = subprocess.run(
        [sys.executable, bootstrap.__file__, "run", str(home)],
        env={"PATH": "/usr/bin:/bin", "ROLLOUT_CHAT_COMPLETIONS_URL": "http://m/v1",
             "ROLLOUT_CHAT_API_KEY": key},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read_result(home / "out" / "result.json"), done


@pytest.mark.parametrize("workflow", ["Async", "Plain"])
def test_a_workflow_finds_its_rollout(home, workflow):
    result, done = run(home, f"flows_in_a_sandbox:{workflow}")
    [mark] = result.sample.messages
    assert mark["url"] == "http://m/v1"
    assert mark["key"] == KEY
    assert mark["id"] == "r-1"
    assert mark["leader"]  # so that its group can be killed as a whole
    assert KEY not in mark["inherited"]
    assert done.stderr == ""
    assert not list((home / "out").glob("*.part"))


def test_an_endpoint_without_a_key(home):
    result, _ = run(home, "flows_in_a_sandbox:Async", key="")
    assert result.sample.messages[0]["key"] is None


@pytest.mark.parametrize(
    ("workflow", "category", "message"),
    [
        ("flows_in_a_sandbox:Returns", "validation_error", "must return an AgentWorkflowOutput"),
        ("flows_in_a_sandbox:Leaves", "agent_error", "nursery"),
        ("flows_in_a_sandbox:Large", "validation_error", "larger than 64 MiB"),
        ("flows_in_a_sandbox:Surprise", "agent_error", "[redacted]"),
        ("flows_in_a_sandbox:Missing", "agent_error", "'no_such_module' (in the sandbox; have"),
        ("flows_in_a_sandbox:Dead", "agent_error", "connect"),
        ("flows_in_a_sandbox:Late", "timeout", "late"),
        ("flows_in_a_sandbox:Exits", "agent_error", "SystemExit: 3"),
        ("flows_in_a_sandbox:Gone", "validation_error", "no attribute 'Gone'"),
        ("no_such_flows:X", "validation_error", "there is no module 'no_such_flows'"),
    ],
)
def test_what_goes_wrong_is_a_result(home, workflow, category, message):
    result, done = run(home, workflow)
    assert result.sample is None
    assert result.failure.category == RolloutErrorCategory(category)
    assert message in result.failure.message
    assert result.failure.source == ("model_endpoint" if workflow.endswith("Dead") else None)
    assert KEY not in done.stderr + (home / "out" / "result.json").read_text()


def test_artifacts_have_a_folder(home):
    result, _ = run(home, "flows_in_a_sandbox:Artifacts")
    assert result.sample is None
    assert result.failure is None
    assert (home / "artifacts" / "a.txt").read_text() == "kept"


def test_a_folder_for_artifacts_that_cannot_be_is_none(home):
    (home / "file").write_text("")
    result, done = run(home, "flows_in_a_sandbox:Artifacts", artifacts="file/below")
    assert "NoneType" in result.failure.message
    assert "no folder for artifacts" in done.stderr


def test_a_python_says_what_it_lacks(home, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert bootstrap.check(home) == 0
    needs = [
        {"requirement": "json-1", "imports": ["json"]},
        {"requirement": "gone==2", "imports": ["flows_in_a_sandbox", "no_such_module.inner"]},
    ]
    (home / "in" / "needs.json").write_text(json.dumps(needs))
    assert bootstrap.check(home) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["missing"] == []
    assert second == {**first, "missing": ["gone==2"]}
    assert second["python"] == sys.executable
    monkeypatch.setattr(bootstrap, "OLDEST", (99,))
    assert bootstrap.check(home) == 2


# --- a script as the module of its workflow -----------------------------------------------------

SCRIPT = """
import sys
from rollout import AgentWorkflow, AgentWorkflowConfig
from rollout.backend.harbor.agents import agent_spec

class Config(AgentWorkflowConfig):
    depth: int = 3

class Flow(AgentWorkflow):
    def run(self, ctx): ...

if __name__ == "__main__":
    spec = agent_spec(Flow, Config(name="c"), None)
    print(spec.name, spec._main, spec._modules, spec._config)
"""


def test_a_workflow_of_a_script_goes_by_the_scripts_name(tmp_path):
    script = tmp_path / "serve_flow.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split(" ", 1)[0] == "serve_flow:Flow"
    assert f"('serve_flow', PosixPath('{script}')) []" in done.stdout
    assert "'class': 'serve_flow:Config'" in done.stdout


def test_a_workflow_of_a_module_that_is_run_goes_by_its_name(tmp_path):
    (tmp_path / "serve_flow.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "serve_flow"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("serve_flow:Flow None ['serve_flow']")


def test_a_workflow_without_a_file_is_refused():
    program = SCRIPT.replace("print(", "raise SystemExit(")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "BackendConfigurationError" in done.stderr
    assert "put it into a module" in done.stderr
