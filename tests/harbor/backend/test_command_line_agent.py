"""An unmodified mini-swe-agent in a sandbox behind a model gateway: recorded, and without the key.

Its package has to be installed beside Harbor; the sandbox is shown this Python's folders.
"""

from __future__ import annotations

import base64
import json
import shlex
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from integrations.scripted import call, scripted_endpoint
from server_process import server_process
from trial_support import KEY, files_with

PROGRAM = Path(sys.prefix) / "bin" / "mini-swe-agent"

pytestmark = [
    pytest.mark.harbor,
    pytest.mark.skipif(not PROGRAM.exists(), reason="mini-swe-agent is not installed"),
]

SERVER = Path(__file__).parents[3] / "examples/harbor/command_line_agent.py"

# Looks for texts in whatever a trial can read, but for the read-only files of the machine. It gets
# them reversed, so that it does not find itself.
LOOK = """\
import json, os, pathlib, sys

wanted = {name: text[::-1].encode() for name, text in json.loads(sys.argv[1]).items()}
wanted["token"] = os.environ["OPENAI_API_KEY"].encode()
found = {name: [] for name in wanted}


def look(place, data):
    for name, text in wanted.items():
        if text in data:
            found[name].append(place)


for root, folders, files in os.walk("/"):
    folders[:] = [
        each
        for each in folders
        if os.path.join(root, each) not in ("/usr", "/opt", "/proc", *sys.argv[2:])
    ]
    for name in [*folders, *files]:
        path = pathlib.Path(root, name)
        look(str(path), os.fsencode(path))
        if path.is_symlink():
            look(str(path), os.fsencode(path.readlink()))
        elif path.is_file():
            try:
                look(str(path), path.read_bytes())
            except OSError:
                pass
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("environ", "cmdline"):
        try:
            look(f"/proc/{name}", (process / name).read_bytes())
        except OSError:
            pass
pathlib.Path("/logs/artifacts/found.json").write_text(json.dumps(found))
"""
FORMS = (KEY, quote(KEY, safe=""), base64.b64encode(KEY.encode()).decode())


async def test_it_is_recorded_and_its_sandbox_has_no_key(tmp_path):
    def command(request):
        words = ["python3", "-c", LOOK, json.dumps(wanted(endpoint)), sys.prefix, sys.base_prefix]
        write = "printf 42 > answer.txt && cat answer.txt"
        last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return call("bash", command=(shlex.join(words), write, last)[min(request.number, 2)])

    kept = tmp_path / "kept"
    (tmp_path / "home").mkdir()
    async with (
        scripted_endpoint(command) as endpoint,
        server_process(SERVER, tmp_path, ROLLOUT_ARTIFACT_ROOT=str(kept)) as (server, them),
    ):
        result = await them.run("r", label="42", chat_completions_url=endpoint.url)
    assert result.sample is not None, (result.err_message, server.log)
    assert result.sample.reward == 1.0, (result.err_message, server.log)

    # The sample and the trajectory are what the endpoint was sent and has answered.
    assert [(each.key, each.body["model"]) for each in endpoint.requests] == [(KEY, "policy")] * 3
    *history, last = map(essence, result.sample.messages)
    assert history == [essence(each) for each in endpoint.requests[-1].body["messages"]]
    turns = ["assistant", "tool"]
    assert [role for role, *_ in (*history, last)] == ["system", "user", *turns, *turns, turns[0]]
    assert "What is 6 * 7?" in history[1][1]
    assert "COMPLETE_TASK" in last[2][0]["arguments"]
    metrics = result.sample.metrics
    assert (metrics["calls"], metrics.get("failed_calls", 0)) == (3, 0)
    document = json.loads((kept / "r/trajectory.json").read_text())
    steps = [each for each in document["steps"] if each["source"] == "agent"]
    assert [each["tool_calls"][0]["function_name"] for each in steps] == ["bash"] * 3
    assert '"output": "42"' in steps[1]["observation"]["results"][0]["content"]

    # Neither what the trial could read nor what it has written has the key or its endpoint.
    (file,) = (kept / "r").rglob("found.json")
    found = json.loads(file.read_text())
    assert "/proc/environ" in found.pop("token")
    assert found == {name: [] for name in wanted(endpoint)}
    for form in FORMS:
        assert files_with(tmp_path, form) == []
        assert form not in server.log


def wanted(endpoint):
    texts = {str(number): form for number, form in enumerate(FORMS)} | {"endpoint": endpoint.url}
    return {name: text[::-1] for name, text in texts.items()}


def essence(message):
    """What a message says, in whatever form: model libraries leave out what is empty."""
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return message["role"], message.get("content"), calls
