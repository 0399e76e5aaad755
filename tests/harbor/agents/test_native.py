"""Harbor's own agents in real trials."""

from __future__ import annotations

import json

import pytest
import trio

from rollout.backend.harbor.agents import agent_spec
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import RolloutErrorCategory, RolloutStatus

pytestmark = pytest.mark.harbor


def reply(*keystrokes, complete=False):
    commands = [{"keystrokes": f"{keys}\n", "duration": 0.3} for keys in keystrokes]
    return json.dumps(
        {"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete}
    )


WRITE = (reply("echo 42 > /app/answer.txt"), reply(complete=True), reply(complete=True))


async def test_the_oracle_earns_the_reward(make_task, run_trial):
    spec = agent_spec("oracle", None, None)
    await trio.to_thread.run_sync(spec.prepare)
    ran = await run_trial(spec, make_task(), model=None, label="42", metadata={"a": [1]})
    assert ran.outcome.result.status is RolloutStatus.SUCCESS
    assert ran.outcome.result.sample.reward == 1.0
    assert "AGENT_START" in ran.events
    assert ran.facts.agent[0] == "oracle"
    assert 'label=42\nmetadata={"a":[1]}' in ran.log("verifier/test-stdout.txt")
    assert ran.files_with("hunter2") == []


async def test_terminus_2_calls_the_rollouts_endpoint_with_its_key(
    make_task, run_trial, chat, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-server-itself")
    endpoint = chat(*WRITE)
    spec = agent_spec("terminus-2", None, None)
    await trio.to_thread.run_sync(spec.prepare)
    ran = await run_trial(spec, make_task(), url=endpoint.url)
    assert ran.outcome.result.err_message is None
    assert ran.outcome.result.sample.reward == 1.0
    assert ran.facts.agent[0] == "terminus-2"
    assert ran.facts.usage["prompt_tokens"] == 21
    assert endpoint.keys == ["Bearer sk-hunter2/with+marks-4711"] * 3
    assert {each["body"]["model"] for each in endpoint.asked} == {"policy"}
    assert ran.files_with("hunter2") == []


async def test_keys_of_rollouts_at_the_same_time_do_not_mix(make_task, run_trial, chat):
    task = make_task()
    endpoints = {key: chat(*WRITE) for key in ("sk-of-one-rollout", "sk-of-another", None)}
    spec = agent_spec("terminus-2", None, None)
    await trio.to_thread.run_sync(spec.prepare)
    rewards = []

    async def one(key, endpoint):
        ran = await run_trial(spec, task, url=endpoint.url, key=key, bridge=bridge)
        rewards.append(ran.outcome.result.sample.reward)

    async with open_asyncio_bridge(grace_sec=5) as bridge, trio.open_nursery() as nursery:
        for key, endpoint in endpoints.items():
            nursery.start_soon(one, key, endpoint)
    assert rewards == [1.0] * 3
    for key, endpoint in endpoints.items():
        assert endpoint.keys == [f"Bearer {key or 'no-key-needed'}"] * 3


async def test_an_agent_out_of_time_is_a_timeout(make_task, run_trial):
    spec = agent_spec("oracle", None, None)
    await trio.to_thread.run_sync(spec.prepare)
    task = make_task(solution="sleep 100 & sleep 100; echo 42 > /app/answer.txt")
    ran = await run_trial(spec, task, agent_sec=0.3)
    assert ran.outcome.result.status is RolloutStatus.FAILURE
    assert ran.outcome.result.err_category is RolloutErrorCategory.TIMEOUT
    assert "0.3" in ran.outcome.result.err_message


async def test_no_time_left_is_a_timeout_as_well(make_task, run_trial):
    spec = agent_spec("oracle", None, None)
    await trio.to_thread.run_sync(spec.prepare)
    ran = await run_trial(spec, make_task(), agent_sec=0.0)
    assert ran.outcome.result.err_category is RolloutErrorCategory.TIMEOUT


# What stands on PATH inside: each takes what the real program would take.
FAKES = {
    "mini-swe-agent": r"""#!/usr/bin/python3
import json, os, subprocess, urllib.request
url, key = os.environ["OPENAI_API_BASE"], os.environ["OPENAI_API_KEY"]
""",
    "opencode": r"""#!/usr/bin/python3
import json, os, pathlib, subprocess, sys, urllib.request
config = json.loads((pathlib.Path.home() / ".config/opencode/opencode.json").read_text())
provider = config["provider"]["rollout"]
assert any("rollout/policy" in argument for argument in sys.argv), sys.argv
assert provider["npm"] == "@ai-sdk/openai-compatible"
assert "policy" in provider["models"]
assert provider["options"]["apiKey"] == "{env:OPENAI_API_KEY}"
url, key = provider["options"]["baseURL"], os.environ["OPENAI_API_KEY"]
""",
}
CALL = """
request = urllib.request.Request(
    url + "/chat/completions",
    json.dumps({"model": "policy", "messages": []}).encode(),
    {"authorization": "Bearer " + key, "content-type": "application/json"},
)
command = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
subprocess.run(command, shell=True, check=True)
"""


@pytest.mark.parametrize("name", FAKES)
async def test_agents_inside_find_endpoint_and_key(make_task, run_trial, chat, monkeypatch, name):
    for variable in ("OPENAI_API_KEY", "MSWEA_API_KEY"):
        monkeypatch.setenv(variable, "sk-of-the-server-itself")
    task = make_task()
    program = task.folder / "environment" / name
    program.write_text(FAKES[name] + CALL)
    program.chmod(0o755)
    endpoint = chat("echo 42 > /app/answer.txt")
    spec = agent_spec(name, None, {"skip_install": True})
    await trio.to_thread.run_sync(spec.prepare)
    ran = await run_trial(
        spec, task, url=endpoint.url,
        environment={"env": {"PATH": "/app:/usr/local/bin:/usr/bin:/bin"}},
    )  # fmt: skip
    assert ran.outcome.result.sample.reward == 1.0, ran.facts
    assert endpoint.keys == ["Bearer sk-hunter2/with+marks-4711"]
    assert ran.files_with("hunter2") == []


@pytest.mark.parametrize(("wanted", "there"), [(None, True), ("1.2.3", True), ("1.2.4", False)])
async def test_opencode_of_the_image_is_not_installed_again(
    make_task, run_trial, chat, wanted, there
):
    task = make_task()
    program = task.folder / "environment" / "opencode"
    says = 'import sys\nif "--version" in sys.argv: print("1.2.3"); sys.exit()\n'
    first, _, rest = FAKES["opencode"].partition("\n")
    program.write_text(f"{first}\n{says}{rest}{CALL}")
    program.chmod(0o755)
    # What an installation would begin with, as in a sandbox without a network.
    for name in ("apt-get", "curl"):
        (task.folder / "environment" / name).write_text("#!/bin/sh\nexit 7\n")
        (task.folder / "environment" / name).chmod(0o755)
    spec = agent_spec("opencode", None, {} if wanted is None else {"version": wanted})
    await trio.to_thread.run_sync(spec.prepare)
    ran = await run_trial(
        spec, task, url=chat("echo 42 > /app/answer.txt").url,
        environment={"env": {"PATH": "/app:/usr/local/bin:/usr/bin:/bin"}},
    )  # fmt: skip
    if there:
        assert ran.outcome.result.sample.reward == 1.0, ran.facts
        assert ran.facts.agent == ("opencode", "1.2.3")
    else:
        assert "AGENT_START" not in ran.events
