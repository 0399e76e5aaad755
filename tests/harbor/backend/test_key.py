"""The rollout's key is nowhere on disk once its trial is over, whatever the agent did with it."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest
from server_process import server_process
from trial_support import KEY, TESTS, Chat, files_with, terminus

from rollout.types import RolloutStatus

pytestmark = pytest.mark.harbor

LEAKY = """\
import base64, os, subprocess, sys
from pathlib import Path
from urllib.parse import quote

from rollout import AgentWorkflow, get_rollout_context


class Leaky(AgentWorkflow):
    async def run(self, ctx):
        key = get_rollout_context().api_key
        print("out", key, flush=True)
        print("err", key, file=sys.stderr, flush=True)
        for folder in (Path("/logs/agent"), ctx.artifacts_dir, Path("/tmp"), Path("/app")):
            (folder / "plain.txt").write_text(f"the key is {key}")
            (folder / "code.txt").write_bytes(base64.b64encode(key.encode()))
            (folder / quote(key, safe="")).write_text("in a name")
            (folder / "log.bin").write_bytes(b"\\xff\\x00" + key.encode() + b"\\x00")
        Path("/app/answer.txt").write_text("42")
        if ctx.metadata["fail"]:
            raise RuntimeError(f"no luck with {key}")
        return [*ctx.prompt, {"role": "assistant", "content": f"I was told {key}"}]
"""
SERVER = """\
from rollout.backend.harbor import HarborBackend
from rollout.server import create_rollout_server

backend = HarborBackend(
    agent={agent!r},
    model="policy",
    tasks_dir={tasks!r},
    environment="namespace",
    artifact_root={kept!r},
    trials_dir={trials!r},
)
app = create_rollout_server(backend=backend)
"""
FORMS = (KEY, quote(KEY, safe=""), base64.b64encode(KEY.encode()).decode())


@pytest.fixture
def server_file(make_task, tmp_path):
    def make(agent):
        folder = make_task(tests=f"{TESTS}cp -r /app /tmp /logs/verifier/\n")
        (tmp_path / "home").mkdir()
        (tmp_path / "leaky_agent.py").write_text(LEAKY)
        file = tmp_path / "harbor_server.py"
        file.write_text(
            SERVER.format(
                agent=agent,
                tasks=str(folder),
                kept=str(tmp_path / "kept"),
                trials=str(tmp_path / "trials"),
            )
        )
        return file

    return make


def assert_nowhere(tmp_path, log):
    for form in FORMS:
        assert files_with(tmp_path, form) == []
        assert form not in log


async def test_a_workflow_that_writes_it_everywhere(server_file, tmp_path):
    async with server_process(server_file("leaky_agent:Leaky"), tmp_path) as (server, rollouts):
        good = await rollouts.run("good", label="42", metadata={"fail": False})
        bad = await rollouts.run("bad", label="42", metadata={"fail": True})
    assert good.sample.reward == 1.0, good.err_message
    assert bad.status is RolloutStatus.FAILURE
    assert "no luck with" in bad.err_message
    assert KEY not in bad.err_message
    (kept,) = (tmp_path / "trials").iterdir()
    assert kept.name.startswith("bad-")
    assert (tmp_path / "kept/good/artifacts/logs/artifacts/plain.txt").is_file()
    assert_nowhere(tmp_path, server.log)


async def test_terminus_2(server_file, tmp_path):
    write = (
        terminus("echo 42 > /app/answer.txt"),
        terminus(complete=True),
        terminus(complete=True),
    )
    with Chat(*write) as quick, Chat(terminus("sleep 1")) as endless:
        async with server_process(server_file("terminus-2"), tmp_path) as (server, rollouts):
            good = await rollouts.run("good", label="42", chat_completions_url=quick.url)
            bad = await rollouts.run(
                "bad", label="43", chat_completions_url=endless.url, agent_timeout_sec=3
            )
    assert good.sample.reward == 1.0, good.err_message
    assert bad.status is RolloutStatus.FAILURE
    assert {key for key, _ in quick.asked} == {f"Bearer {KEY}"}
    assert_nowhere(tmp_path, server.log)
