"""``rollout run`` against a server process."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import httpx
import pytest
import trio
from cli.harness import SERVER_KEY, command_line, environment
from support import fresh_id

from rollout.cli.run import PhaseView
from rollout.client.answers import Busy
from rollout.types import RolloutStatus

CHAT = ("--chat-url", "http://127.0.0.1:9/v1")


def active(server: str) -> int:
    return httpx.get(f"{server}/health", trust_env=False).json()["lifecycle"]["active_rollouts"]


def test_graded_success(cli, server):
    result = cli("run", server, *CHAT, "--system", "Be brief.", "-m", "6 * 7?", "--label", "42")
    assert result.exit_code == 0
    assert result.stderr == ""
    phases, facts, *conversation = result.stdout.split("\n\n")
    seen = [line.split()[-1] for line in phases.splitlines()]
    assert seen[0] == "queued"
    assert seen[-1] == "success"
    assert "reward         1.0" in facts
    assert conversation[0] == "system\n  Be brief."
    assert conversation[-1] == "assistant\n  42\n"


def test_json_is_one_object_and_nothing_else(cli, server):
    rollout_id = fresh_id("cli")
    result = cli(
        "run", server, *CHAT, "-m", "a", "--user", "b", "--label", "41", "--id", rollout_id,
        "--metadata", '{"level": 3}', "--agent-timeout-sec", "30", "--grader-timeout-sec", "30",
        "--admission-timeout-sec", "30", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert answer["rollout_id"] == rollout_id
    assert answer["sample"]["reward"] == 0.0
    assert [message["content"] for message in answer["sample"]["messages"]] == ["a", "b", "42"]


def test_without_grading(cli, server):
    result = cli("run", server, *CHAT, "-m", "a", "--no-grade", "--json")
    assert json.loads(result.stdout)["sample"]["reward"] is None


def script(**fields) -> str:
    return json.dumps([{"role": "user", "content": "?", **fields}])


def test_messages_from_stdin_and_from_a_file(cli, server, tmp_path):
    text = script(answer="a \u2713 line\nand another")
    (tmp_path / "messages.json").write_text(text)
    args = ("run", server, *CHAT, "--no-grade", "--messages-file")
    for result in (cli(*args, "-", stdin=text), cli(*args, str(tmp_path / "messages.json"))):
        assert result.exit_code == 0
        assert result.stdout.endswith("assistant\n  a \u2713 line\n  and another\n")


def test_what_a_model_says_cannot_touch_the_terminal(cli, server):
    said = {"role": "assistant", "content": "\x1b[31mred\ud800", "tool_calls": [{"id": "\x1b"}]}
    result = cli("run", server, *CHAT, "--no-grade", "--messages-file", "-",
                 stdin=script(**{"return": [said]}))  # fmt: skip
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert r"\x1b[31mred\ud800" in result.stdout
    assert "tool_calls" in result.stdout


@pytest.mark.parametrize("as_json", [True, False])
def test_failure_is_exit_code_1(cli, server, as_json):
    args = ["run", server, *CHAT, "--no-grade", "--messages-file", "-"]
    result = cli(*args, *["--json"] * as_json, stdin=script(**{"raise": "first\nsecond"}))
    assert result.exit_code == 1
    assert result.stderr == (
        "rollout: the rollout failed (agent_error): first second; the server's log says more\n"
    )
    if as_json:
        assert json.loads(result.stdout)["err_message"] == "first\nsecond"
    else:
        assert "category       agent_error" in result.stdout


def test_a_failure_of_the_grader_is_named(cli, server):
    wrong = json.dumps({"grader": {"raise": "no good"}})
    result = cli("run", server, *CHAT, "-m", "a", "--metadata", wrong)
    assert result.exit_code == 1
    assert re.search("^phase +grading$", result.stdout, re.MULTILINE)


def test_timeout_is_exit_code_1(cli, server):
    line = cli.fails(1, "run", server, *CHAT, "-m", "a", "--no-grade", "--agent-timeout-sec", "0")
    assert "(timeout)" in line


def test_missing_label_is_exit_code_1(cli, server):
    line = cli.fails(1, "run", server, *CHAT, "-m", "a")
    assert "neither a label nor metadata" in line
    assert line.endswith("; give --label or --metadata, or --no-grade to run the agent alone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_rollout_on_the_server(cli, server, on_call, number):
    def interrupt(status):
        if status is RolloutStatus.RUNNING:
            signal.raise_signal(number)

    on_call(PhaseView, "show", interrupt)
    line = cli.fails(
        128 + number, "run", server, *CHAT, "--no-grade", "--messages-file", "-",
        stdin=script(sleep=600),
    )  # fmt: skip
    assert line.startswith(f"rollout: interrupted by {number.name}; the server was asked to cancel")
    assert line.endswith("(cancelled_running)")
    assert cli("wait-idle", server, "--poll-interval-sec", "0.01").exit_code == 0


def test_a_rollout_that_is_cancelled_elsewhere_is_exit_code_1(cli, server, on_call):
    rollout_id = fresh_id("cli")

    def cancel(status):
        if status is RolloutStatus.RUNNING:
            done = httpx.post(
                f"{server}/rollout/cancel", json={"ids": [rollout_id]}, trust_env=False
            )
            assert done.json() == {"dispositions": {rollout_id: "cancelled_running"}}

    on_call(PhaseView, "show", cancel)
    line = cli.fails(
        1, "run", server, *CHAT, "--no-grade", "--messages-file", "-", "--id", rollout_id,
        stdin=script(sleep=600),
    )  # fmt: skip
    assert "the rollout was cancelled" in line


def test_unreachable_server(cli):
    line = cli.fails(2, "run", "http://127.0.0.1:9", *CHAT, "-m", "a")
    assert line.startswith("rollout: no answer from http://127.0.0.1:9 (ConnectError")


def test_a_server_without_room_is_spoken_of_on_stderr(cli, server, monkeypatch):
    async def full(self, request, body, on_sent):
        await trio.lowlevel.checkpoint()
        return Busy("0.05")

    monkeypatch.setattr("rollout.client.wire.Wire.admit", full)
    monkeypatch.setattr("rollout.client.admission._BUSY_SEC", 0.1)
    result = cli(
        "run", server, *CHAT, "-m", "a", "--id", "here", "--admission-timeout-sec", "0.3", "--json"
    )
    first = result.stderr.splitlines()[0]
    assert first.startswith("rollout: warning: rollout here has waited 0 s for admission")
    assert result.stdout == ""


def test_id_that_is_taken(cli, server):
    rollout_id = fresh_id("cli")
    args = ("run", server, *CHAT, "-m", "a", "--no-grade", "--id", rollout_id)
    assert cli(*args).exit_code == 0
    line = cli.fails(2, *args)
    assert "409" in line
    assert "take another --id" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "there is no message"),
        (["--system", "s"], "there is no message"),
        (["-m", "a", "--messages-file", "-"], "drop --message"),
        (["--messages-file", "missing.json"], "missing.json: No such file"),
        (["--messages-file", "."], "Is a directory"),
        (["--messages-file", "-"], "--messages-file: -: it is empty"),
        (["-m", "a", "--metadata", "{"], "--metadata: it is not JSON: "),
        (["-m", "a", "--metadata", "[]"], "--metadata must be a JSON object"),
        (["-m", "a", "--id", "a/b"], "rollout_id"),
        (["-m", "a", "--id", ""], "rollout_id"),
        (["-m", "a", "--agent-timeout-sec", "inf"], "must be a finite number of seconds"),
        (["-m", "a", "--agent-timeout-sec", "x"], "is not a number of seconds"),
    ],
)
def test_wrong_use(cli, server, options, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert words in cli.fails(2, "run", server, *CHAT, *options)


@pytest.mark.parametrize("text", ["7", '{"role": "user"}', "[1]", "\xff", "[NaN]", "[" * 5000])
def test_message_files_that_cannot_be_used(cli, server, text):
    data = text.encode("latin-1")
    line = cli.fails(2, "run", server, *CHAT, "--messages-file", "-", stdin=data)
    assert "--messages-file" in line


def test_chat_url_is_required(cli, server):
    assert "--chat-url" in cli.fails(2, "run", server, "-m", "a")


# --- keys -----------------------------------------------------------------------------------


def test_llm_key_reaches_the_server_by_name_only(cli, server):
    result = cli(
        "run", server, *CHAT, "-m", "a", "--no-grade", "--json", "--llm-api-key-env", "CHAT_KEY",
        CHAT_KEY="sk-secret-of-the-model",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "sk-secret" not in result.output


def test_server_key(cli, locked_server):
    args = ("run", locked_server, *CHAT, "-m", "a", "--no-grade")
    named = (*args, "--api-key-env", "SERVER_KEY")
    assert cli(*named, SERVER_KEY=SERVER_KEY).exit_code == 0
    line = cli.fails(2, *args)
    assert "401" in line
    assert "--api-key-env" in line
    wrong = cli.fails(2, *named, SERVER_KEY="a-wrong-key")
    assert "401" in wrong
    assert "a-wrong-key" not in wrong


@pytest.mark.parametrize("option", ["--api-key-env", "--llm-api-key-env"])
@pytest.mark.parametrize(
    ("value", "words"), [(None, "THE_KEY is not set"), ("", "THE_KEY is empty"), (" ", "is empty")]
)
def test_variable_without_a_key(cli, server, option, value, words):
    env = {} if value is None else {"THE_KEY": value}
    assert words in cli.fails(2, "run", server, *CHAT, "-m", "a", option, "THE_KEY", **env)


def test_server_key_that_no_header_takes(cli, server):
    line = cli.fails(
        2, "run", server, *CHAT, "-m", "a", "--api-key-env", "THE_KEY", THE_KEY="secret-key\n"
    )
    assert "THE_KEY has white space around it" in line
    assert "secret-key" not in line


@pytest.mark.parametrize("option", ["--api-key-env", "--llm-api-key-env"])
def test_a_key_given_as_a_name_is_not_repeated(cli, server, option):
    line = cli.fails(2, "run", server, *CHAT, "-m", "a", option, "sk-this-is-a-key")
    assert "takes the name of an environment variable" in line
    assert "sk-this" not in line


def test_stderr_of_a_process_stays_free_of_request_lines(server):
    done = subprocess.run(
        command_line("run", server, *CHAT, "-m", "a", "--no-grade", "--json"),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["status"] == "success"
