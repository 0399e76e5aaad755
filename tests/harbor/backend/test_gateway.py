"""Trials behind a model gateway: the key is in no sandbox, and what the agent said is recorded."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from server_process import server_process
from trial_support import KEY, TESTS, Chat, files_with, terminus

pytestmark = pytest.mark.harbor

PROGRAM = """\
import json, os, pathlib, urllib.request

# What an agent of any kind can read: its own environment, that of all processes that it sees,
# and the files that it was started with.
seen = json.dumps(dict(os.environ))
for path in [*pathlib.Path("/proc").glob("*/environ"), *pathlib.Path("/proc").glob("*/cmdline")]:
    try:
        seen += path.read_bytes().decode("latin-1")
    except OSError:
        pass
seen = seen.replace("\\0", "\\n").replace(os.environ["OPENAI_API_KEY"], "the token")
pathlib.Path("/logs/artifacts/seen.txt").write_text(seen)
body = {"model": "gpt", "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
pathlib.Path("/app/answer.txt").write_text(reply)
"""
AGENT = """\
import os, subprocess, sys

from rollout import AgentWorkflow, get_rollout_context

PROGRAM = {program!r}


class Runs(AgentWorkflow):
    \"\"\"Runs a program that knows nothing of this library, and returns nothing.\"\"\"

    async def run(self, ctx):
        context = get_rollout_context()
        env = {{
            **os.environ,
            "OPENAI_BASE_URL": context.chat_completions_url,
            "OPENAI_API_KEY": context.api_key,
        }}
        subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True)
"""
SERVER = """\
from rollout.backend.harbor import HarborBackend
from rollout.gateway import ModelGateway
from rollout.server import create_rollout_server

backend = HarborBackend(
    agent={agent!r},
    model="policy",
    tasks_dir={tasks!r},
    environment="namespace",
    artifact_root={kept!r},
    trials_dir={trials!r},
)
app = create_rollout_server(backend=backend, gateway=ModelGateway(models={{"*": "policy"}}))
"""
FORMS = (KEY, quote(KEY, safe=""), base64.b64encode(KEY.encode()).decode())


@pytest.fixture
def server_file(make_task, tmp_path):
    def make(agent):
        folder = make_task(tests=TESTS)
        (tmp_path / "home").mkdir()
        (tmp_path / "program_agent.py").write_text(AGENT.format(program=PROGRAM))
        file = tmp_path / "harbor_server.py"
        folders = {"kept": str(tmp_path / "kept"), "trials": str(tmp_path / "trials")}
        file.write_text(SERVER.format(agent=agent, tasks=str(folder), **folders))
        return file

    return make


async def test_a_program_in_a_sandbox_is_recorded_and_sees_no_key(server_file, tmp_path):
    with Chat("42") as chat:
        async with server_process(server_file("program_agent:Runs"), tmp_path) as (server, them):
            result = await them.run("r", label="42", chat_completions_url=chat.url)
    assert result.sample is not None, result.err_message
    assert (result.sample.reward, result.sample.label) == (1.0, "42"), result.err_message
    assert [each["content"] for each in result.sample.messages] == ["What is 6 * 7?", "42"]
    assert result.sample.metrics["prompt_tokens"] == 7
    assert [(key, body["model"]) for key, body in chat.asked] == [(f"Bearer {KEY}", "policy")]
    (kept,) = (tmp_path / "kept/r").rglob("seen.txt")
    seen = kept.read_text()
    assert "OPENAI_BASE_URL" in seen
    assert chat.url not in seen
    document = json.loads((tmp_path / "kept/r/trajectory.json").read_text())
    assert document["steps"][-1]["message"] == "42"
    for form in FORMS:
        assert files_with(tmp_path, form) == []
        assert form not in server.log


async def test_an_agent_of_harbor_calls_the_gateway(server_file, tmp_path):
    script = (
        terminus("echo 42 > /app/answer.txt"),
        terminus(complete=True),
        terminus(complete=True),
    )
    with Chat(*script) as chat:
        async with server_process(server_file("terminus-2"), tmp_path) as (server, them):
            result = await them.run("r", label="42", chat_completions_url=chat.url)
    assert result.sample.reward == 1.0, result.err_message
    assert {key for key, _ in chat.asked} == {f"Bearer {KEY}"}
    assert result.sample.metrics["calls"] == len(chat.asked)
    assert result.sample.messages[-1]["role"] == "assistant"
    for form in FORMS:
        assert files_with(tmp_path, form) == []
        assert form not in server.log
