"""``rollout eval run``, from the config to the exit code."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import click
import httpx
import pytest
from cli.harness import command_line, environment
from evaluation.run.fake import FakeRollouts, failure
from rich.console import Console, Group

import rollout.evaluation.attempts
from rollout.cli.eval.options import _OVERRIDES
from rollout.cli.eval.progress import EvaluationView, _Bar
from rollout.cli.eval.run import _Remembering
from rollout.client import RolloutClient
from rollout.errors import EvaluationError
from rollout.evaluation import AttemptOutcome, AttemptRecord, ChatConfig, RunConfig, ServerConfig
from rollout.evaluation.folder.journal import read_records
from rollout.evaluation.folder.layout import locked
from rollout.evaluation.opening import EvaluationProgress


def rows_of(stdout: str) -> dict[str, str]:
    """The rows of the summary."""
    cells = [line.strip("│ ").split("│") for line in stdout.splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in cells}


# --- what is shown ----------------------------------------------------------------------------


def test_a_line_for_each_attempt_and_the_summary(cli, files):
    config = files.config(files.rows({}, {"answer": "41"}, {"raise": "boom\nbang"}), n=2)
    done = cli("eval", "run", str(config))
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in lines] == [f"[{number}/6" for number in range(1, 7)]
    assert sorted(line.split("] ")[1] for line in lines) == [
        "row 0 attempt 0: success, reward 1",
        "row 0 attempt 1: success, reward 1",
        "row 1 attempt 0: success, reward 0",
        "row 1 attempt 1: success, reward 0",
        "row 2 attempt 0: failure, agent_error: boom bang",
        "row 2 attempt 1: failure, agent_error: boom bang",
    ]
    rows = rows_of(done.stdout)
    assert rows["success"] == "4"
    assert rows["failure"] == rows["agent_error"] == "2"
    assert re.fullmatch(r"0\.500  \(95% interval \S+ to \S+, 4 attempts\)", rows["mean reward"])
    assert re.fullmatch(r"0\.333  \(95% interval \S+ to \S+, 6 attempts\)", rows["pass rate"])
    assert rows["attempts"] == "6 of 6 have ended"
    assert rows["duration"].startswith("median ")
    assert done.stdout.endswith(f"Report: {files.output / 'report.html'}\n")
    assert (files.output / "report.html").is_file()


def test_a_run_that_stops_when_enough_is_known_says_so(cli, files):
    config = files.config(files.rows(*[{"answer": "42"}] * 40))
    done = cli("eval", "run", str(config), "--until", "0.3", "--seed", "3")
    assert (done.exit_code, done.stderr) == (0, "")
    rows = rows_of(done.stdout)
    found = re.fullmatch(
        r"1\.000  \(95% confidence sequence (\S+) to 1\.000, (\d+) attempts\)", rows["pass rate"]
    )
    assert 0.4 <= float(found[1]) < 1
    assert f", {found[2]} of 40 rows, n = 1" in done.stdout
    note = (
        f"The run stopped early: {found[2]} of 40 rows, drawn in random order, give the pass rate"
    )
    assert note in done.stdout
    assert note in cli("eval", "show", str(files.output)).stdout
    shown = json.loads(cli("eval", "show", str(files.output), "--json").stdout)
    assert (shown["complete"], shown["stopped_early"]) == (True, True)
    assert json.loads((files.output / "manifest.json").read_text())["run"]["seed"] == 3
    whole = cli("eval", "run", str(config), "--json")
    assert json.loads(whole.stdout)["stopped_early"] is False
    assert "run.until: must be a number from 0.001 to below 0.5" in cli.fails(
        2, "eval", "run", str(config), "--until", "2"
    )


def test_json_logs_have_a_record_for_each_attempt(cli, files, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        config = files.config(files.rows({}, {"answer": "41"}))
        done = cli("eval", "run", str(config), "--log-format", "json")
    finally:
        root.setLevel(level)
    records = map(json.loads, done.stderr.splitlines())
    found = {each["rollout_id"]: each["message"] for each in records if "rollout_id" in each}
    assert sorted(found.values()) == [
        f"rollout {rollout_id}: {line}"
        for rollout_id, line in zip(
            sorted(found),
            ["row 0 attempt 0: success, reward 1", "row 1 attempt 0: success, reward 0"],
            strict=True,
        )
    ]
    assert not done.stdout.startswith("[")


def test_json_is_one_object_and_nothing_else(cli, files):
    config = files.config(files.rows({}, {"answer": "41"}, {"raise": "boom"}))
    done = cli("eval", "run", str(config), "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    document = json.loads(done.stdout)
    assert document["complete"] is True
    assert document["folder"] == str(files.output)
    assert document["report"] == str(files.output / "report.html")
    assert document["counts"] == {
        "total": 3, "settled": 3, "resumed": 0,
        "success": 2, "failure": 1, "cancelled": 0, "error": 0,
    }  # fmt: skip
    assert document["metrics"] == json.loads((files.output / "metrics.json").read_text())
    assert document["metrics"]["results"]["mean_reward"]["value"] == 0.5


def test_what_comes_from_elsewhere_cannot_touch_the_terminal(cli, files):
    text = "\x1b[31mred [bold]x[/bold] \r\n" + "y" * 5000
    config = files.config(files.rows({"raise": text}))
    done = cli("eval", "run", str(config), "--model", "[red]m[/red]")
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert r"\x1b[31mred [bold]x[/bold] yyy" in done.stdout
    assert "[red]m[/red]" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 1100


def test_a_bar_on_a_terminal(cli, files, terminal):
    config = files.config(files.rows({}, {"raise": "boom"}, {}))
    done = cli("eval", "run", str(config), "--yes", **terminal)
    assert done.exit_code == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stderr)
    assert "3/3" in shown
    assert "2 success  1 failure  reward 1  0 in flight" in shown
    assert "[1/3]" not in done.stdout


@pytest.mark.parametrize("width", [8, 20, 30, 40, 80])
def test_the_bar_has_two_lines_whatever_is_in_them(monkeypatch, width):
    console = Console(width=width, force_terminal=True, file=io.StringIO())
    bar = _Bar(console)
    bar.follow(EvaluationProgress(total=123_456_789))
    monkeypatch.setattr(bar, "pace", lambda: (98_765.4, 1e7))
    assert len(console.render_lines(Group(*bar.get_renderables()))) == 2


def test_the_bar_has_two_lines_on_a_narrow_terminal_too(cli, files, terminal):
    config = files.config(files.rows({}, {"raise": "boom"}))
    done = cli("eval", "run", str(config), "--yes", **terminal | {"COLUMNS": "30"})
    assert done.exit_code == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stderr)
    assert "1 success  1 failure  rewar…" in shown
    # It goes up and erases as many lines as it had drawn.
    assert "\x1b[2K\x1b[1A\x1b[2K\x1b[1A" not in done.stderr


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(cli, files, terminal):
    config = files.config(files.rows({}))
    done = cli("eval", "run", str(config), "--yes", **terminal | {"TERM": "dumb"})
    assert "[1/1] row 0 attempt 0: success, reward 1\n" in done.stdout
    assert done.stderr == ""


def test_a_log_in_colour_is_no_terminal(cli, files):
    config = files.config(files.rows({}))
    done = cli("eval", "run", str(config), FORCE_COLOR="1", TERM="xterm")
    assert "[1/1] row 0 attempt 0: success, reward 1\n" in done.stdout
    assert done.stderr == ""


def test_a_warning_is_a_line_on_stderr(capsys):
    with EvaluationView(silent=True):
        logging.getLogger("rollout.evaluation.run").warning("two\nlines \x1b and [%s]", "bold")
    logging.getLogger("rollout.evaluation").info("not this")
    assert capsys.readouterr().err == "rollout: warning: two lines \\x1b and [bold]\n"


# --- options ----------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """What `evaluate` would have been called with."""
    calls = []

    @asynccontextmanager
    async def evaluate(config, **options):
        calls.append((config, options))
        raise EvaluationError("seen")
        yield

    monkeypatch.setattr("rollout.cli.eval.run.evaluate", evaluate)
    return calls


@pytest.mark.parametrize(
    ("option", "value", "section", "name", "expected"),
    [
        ("--url", "http://127.0.0.1:7", "server", "url", "http://127.0.0.1:7"),
        ("--app", "mod:app", "server", "app", "mod:app"),
        ("--api-key-env", "A_KEY", "server", "api_key_env", "A_KEY"),
        ("--chat-url", "http://m/v1", "chat", "url", "http://m/v1"),
        ("--model", "m", "chat", "model", "m"),
        ("--llm-api-key-env", "B_KEY", "chat", "api_key_env", "B_KEY"),
        ("--limit", "3", "dataset", "limit", 3),
        ("--rows", "0-2,7-", "dataset", "rows", "0-2,7-"),
        ("--n", "5", "run", "n", 5),
        ("--max-in-flight", "9", "run", "max_in_flight", 9),
        ("--agent-timeout-sec", "1.5", "run", "agent_timeout_sec", 1.5),
        ("--grader-timeout-sec", "2", "run", "grader_timeout_sec", 2.0),
        ("--admission-timeout-sec", "3", "run", "admission_timeout_sec", 3.0),
        ("--pass-threshold", "-0.5", "run", "pass_threshold", -0.5),
        ("--retry-setup-failures", "4", "run", "retry_setup_failures", 4),
        ("--breaker-failures", "0", "run", "breaker_failures", 0),
    ],
)
def test_an_option_replaces_a_value_of_the_config(
    cli, files, seen, option, value, section, name, expected
):
    assert "seen" in cli.fails(2, "eval", "run", str(files.config(files.rows({}))), option, value)
    ((config, options),) = seen
    assert getattr(getattr(config, section), name) == expected
    expected_options = {"fresh": False, "retry_failed": False, "check_model": True}
    assert options.items() >= expected_options.items()


def test_paths_of_options_are_relative_to_the_current_folder(
    cli, files, seen, tmp_path, monkeypatch
):
    config = files.config(files.rows({}))
    monkeypatch.chdir(tmp_path)
    cli.fails(2, "eval", "run", str(config), "--dataset", "d.csv", "--output", "o", "--fresh",
              "--retry-failed", "--no-check")  # fmt: skip
    ((loaded, options),) = seen
    assert (str(loaded.dataset.path), str(loaded.run.output)) == ("d.csv", "o")
    expected_options = {"fresh": True, "retry_failed": True, "check_model": False}
    assert options.items() >= expected_options.items()


def test_each_value_of_the_config_has_its_option():
    covered = {(each.section, each.name) for each in _OVERRIDES}
    for section, kind in (("server", ServerConfig), ("chat", ChatConfig), ("run", RunConfig)):
        assert {(section, name) for name in attrs.fields_dict(kind)} <= covered
    assert {("dataset", name) for name in ("path", "limit", "rows")} <= covered


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n", "0"], "--n"),
        (["--limit", "x"], "--limit"),
        (["--rows", "5-3"], "dataset.rows: "),
        (["--url", "no url"], "server.url: "),
        (["--app", "x"], "server.app: must be MODULE:APP"),
        (["--agent-timeout-sec", "0"], "run.agent_timeout_sec: must be above 0"),
        (["--api-key-env", "sk-live-1"], "server.api_key_env: takes the name"),
        (["--llm-api-key-env", "ROLLOUT_TEST_UNSET"], "ROLLOUT_TEST_UNSET is not set"),
        (["--dataset", "missing.jsonl"], "missing.jsonl"),
        (["--pass-threshold", "nan"], "run.pass_threshold"),
        (["--url", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_wrong_use(cli, files, options, words):
    line = cli.fails(2, "eval", "run", str(files.config(files.rows({}))), *options)
    assert words in line
    assert "sk-live-1" not in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "eval.toml: No such file"),
        ("[server", "eval.toml is not valid TOML"),
        ("[run]\nnn = 1", "run.nn: is unknown"),
        ("", "server: is required; chat: is required; dataset: is required; run: is required"),
        ("server = 1", "server: must be a table"),
    ],
)
def test_configs_that_cannot_be_used(cli, tmp_path, text, words):
    path = tmp_path / "eval.toml"
    if text is not None:
        path.write_text(text)
    assert words in cli.fails(2, "eval", "run", str(path))


# --- going on ---------------------------------------------------------------------------------


def test_a_generated_name_is_shown_and_goes_on(cli, files, on_call):
    config = files.config(files.rows({}, {}, {}), max_in_flight=1)
    text = config.read_text()
    config.write_text(text.replace(f"output = {json.dumps(str(files.output))}\n", ""))

    errors = [EvaluationError("it broke")]

    def break_off(record):
        if errors:
            raise errors.pop()

    on_call(EvaluationView, "show", break_off)
    done = cli("eval", "run", str(config))
    assert done.exit_code == 1
    shown, failed = done.stderr.splitlines()
    found = re.fullmatch(r"run ([a-z]+-[a-z]+-[0-9]+) in (.*)", shown)
    assert found is not None
    assert found[2] == str(files.folder / "runs" / found[1])
    assert failed.endswith(f"go on with: rollout eval run {config} --name {found[1]}")
    again = cli(*shlex.split(failed.split("go on with: rollout ")[1]))
    assert again.exit_code == 0
    assert [path.name for path in (files.folder / "runs").iterdir()] == [found[1]]


def test_a_complete_run_stays_as_it_is(cli, files):
    config = str(files.config(files.rows({}, {"raise": "boom"})))
    assert cli("eval", "run", config).exit_code == 0
    before = (files.output / "events.jsonl").read_bytes()
    again = cli("eval", "run", config)
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout.startswith("2 of 2 attempts had ended before\n")
    assert (files.output / "events.jsonl").read_bytes() == before


def test_a_resume_says_how_many_had_ended_on_a_terminal_too(cli, files, terminal):
    config = str(files.config(files.rows({}, {})))
    assert cli("eval", "run", config, "--rows", "0", "--yes").exit_code == 0
    again = cli("eval", "run", config, "--yes", **terminal)
    assert "1 of 2 attempts had ended before" in again.stderr


def test_retry_failed_and_fresh(cli, files):
    config = str(files.config(files.rows({}, {"raise": "boom"})))
    cli("eval", "run", config)
    again = cli("eval", "run", config, "--retry-failed")
    assert again.exit_code == 0
    assert "row 1 attempt 0: failure" in again.stdout
    assert "row 0" not in again.stdout
    fresh = cli("eval", "run", config, "--fresh", "--json")
    assert json.loads(fresh.stdout)["counts"]["resumed"] == 0
    assert len(list((files.output / "archive").iterdir())) == 1


def test_changed_inputs_are_refused_and_named(cli, files):
    config = str(files.config(files.rows({})))
    cli("eval", "run", config, "--n", "3")
    line = cli.fails(2, "eval", "run", config, "--n", "1", "--model", "other")
    assert "run.n was 3 and is 1" in line
    assert 'chat.model was not given and is "other"' in line
    assert "--fresh" in line


def test_a_folder_in_use(cli, files):
    config = str(files.config(files.rows({})))
    with locked(files.output):
        assert "another evaluation is running" in cli.fails(2, "eval", "run", config)


def test_a_damaged_journal(cli, files):
    config = str(files.config(files.rows({}, {})))
    cli("eval", "run", config)
    journal = files.output / "events.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"row":', b'"rov":', 1))
    assert "events.jsonl, line 2: does not fit its checksum" in cli.fails(2, "eval", "run", config)


@pytest.fixture
def hang_up():
    """Take a hang-up as programs do that nobody told otherwise."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_what_is_done_and_says_how_to_go_on(cli, files, server, on_call, number):
    waiting = {"sleep": 600}
    config = str(files.config(files.rows({}, {}, waiting, waiting), max_in_flight=4))
    shown = []

    def interrupt(record):
        shown.append(record)
        if len(shown) == 2:
            signal.raise_signal(number)

    on_call(EvaluationView, "show", interrupt)
    done = cli("eval", "run", config, "--fresh", "--rows", "0-3")
    assert done.exit_code == 128 + number
    (line,) = done.stderr.splitlines()
    note, command = line.split("; go on with: ")
    assert note == (
        f"rollout: interrupted by {number.name}; 2 of 4 attempts have ended and are kept"
    )
    assert shlex.split(command) == ["rollout", "eval", "run", config, "--rows", "0-3"]
    assert cli("wait-idle", server, "--poll-interval-sec", "0.01").exit_code == 0
    assert {record.row for record in read_records(files.output) if record.counts} == {0, 1}


@pytest.mark.usefixtures("hang_up")
def test_a_second_hang_up_is_no_impatience(cli, files, server, on_call):
    config = str(files.config(files.rows({}, {"sleep": 600})))
    on_call(EvaluationView, "show", lambda record: signal.raise_signal(signal.SIGHUP))
    on_call(EvaluationView, "stopping", lambda: signal.raise_signal(signal.SIGHUP))
    done = cli("eval", "run", config)
    assert done.exit_code == 128 + signal.SIGHUP
    assert "interrupted by SIGHUP; 1 of 2 attempts have ended and are kept" in done.stderr
    assert cli("wait-idle", server, "--poll-interval-sec", "0.01").exit_code == 0


@pytest.mark.usefixtures("hang_up")
def test_a_run_that_is_to_outlive_its_terminal_does(cli, files, on_call):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    config = str(files.config(files.rows({}, {})))
    on_call(EvaluationView, "show", lambda record: signal.raise_signal(signal.SIGHUP))
    done = cli("eval", "run", config)
    assert done.exit_code == 0
    assert "2 of 2 have ended" in done.stdout
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_on_a_terminal_it_says_that_it_is_stopping(cli, files, on_call, terminal):
    config = str(files.config(files.rows({}, {"sleep": 600})))
    on_call(EvaluationView, "show", lambda record: signal.raise_signal(signal.SIGINT))
    done = cli("eval", "run", config, "--yes", **terminal)
    assert done.exit_code == 130
    assert "stopping; once more ends it at once" in done.stderr
    assert "1 of 2 attempts have ended and are kept" in done.stderr


def test_before_a_run_has_begun_fresh_is_still_to_be_done(cli, files, on_call):
    config = str(files.config(files.rows({})))
    on_call(EvaluationView, "__enter__", lambda: signal.raise_signal(signal.SIGINT))
    line = cli.fails(130, "eval", "run", config, "--fresh")
    assert line == (
        "rollout: interrupted by SIGINT; no attempt had started; "
        f"go on with: rollout eval run {config} --fresh"
    )
    assert not (files.output / "manifest.json").exists()


def test_the_command_that_goes_on_goes_on(cli, files, on_call):
    files.rows({}, {"sleep": 0.01}, name="other rows.jsonl")
    config = str(files.config(files.rows({})))
    sent = []

    def interrupt(record):
        if not sent:
            sent.append(record)
            signal.raise_signal(signal.SIGINT)

    on_call(EvaluationView, "show", interrupt)
    data = str(files.folder / "other rows.jsonl")
    line = cli("eval", "run", config, "--dataset", data, "--max-in-flight", "1").stderr
    again = cli(*shlex.split(line.split("go on with: ")[1])[1:])
    assert again.exit_code == 0
    assert "2 of 2 have ended" in again.stdout


def test_a_second_signal_ends_at_once(files, apps):
    config = files.config(files.rows({}), app=f"{apps}:blocking")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            command_line("eval", "run", str(config)),
            env=environment(EVAL_TEST_PORT=str(listener.getsockname()[1])),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        listener.settimeout(60)
        connection, _ = listener.accept()  # the workflow runs, and blocks its server
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        connection.close()
    assert process.returncode in {130, 143}
    assert re.fullmatch(
        r"rollout: interrupted again by SIG(INT|TERM); what has ended is kept; "
        rf"go on with: rollout eval run {config}\n",
        errors,
    )


# --- runs that do not become complete ---------------------------------------------------------


def test_attempts_that_others_cancel_are_exit_code_1(cli, files, server, on_call):
    rows = files.rows({}, {"sleep": 600}, {"sleep": 600})
    config = str(files.config(rows, max_in_flight=3))

    def cancel(record):
        if record.outcome is AttemptOutcome.SUCCESS:
            httpx.post(f"{server}/rollout/cancel", json={"all": True}, trust_env=False)

    on_call(EvaluationView, "show", cancel)
    done = cli("eval", "run", config)
    assert done.exit_code == 1
    assert done.stderr == (
        f"rollout: 2 of 3 attempts were cancelled; run them with: rollout eval run {config}\n"
    )
    assert "The run is not complete: 1 of 3 attempts have ended (2 were cancelled)" in done.stdout


@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_whose_server_ends_is_exit_code_1(cli, files, apps, as_json):
    config = files.config(files.rows({}, {}, {}, {}), app=f"{apps}:dies", max_in_flight=1)
    path = environment()["PYTHONPATH"]
    done = cli("eval", "run", str(config), *["--json"] * as_json, PYTHONPATH=path)
    assert done.exit_code == 1
    assert "(exit code 7; " in done.stderr.splitlines()[-1]
    if as_json:
        assert json.loads(done.stdout)["complete"] is False
        assert json.loads(done.stdout)["counts"]["success"] == 2
    else:
        assert "2 of 4 have ended" in done.stdout


def test_a_run_that_cannot_keep_what_it_does_says_how_to_go_on(cli, files, monkeypatch):
    write, written = rollout.evaluation.attempts.write_atomic, []

    def full(path, data, **options):
        written.append(path)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data, **options)

    monkeypatch.setattr("rollout.evaluation.attempts.write_atomic", full)
    config = str(files.config(files.rows({}, {}, {}, {}), max_in_flight=1))
    done = cli("eval", "run", config, "--fresh")
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    note, command = line.split("; once fixed, go on with: ")
    assert "No space left on device; the run stops" in note
    assert note.endswith("; 2 of 4 attempts have ended and are kept")
    monkeypatch.undo()
    again = cli(*shlex.split(command)[1:])
    assert again.exit_code == 0
    assert "2 of 4 attempts had ended before" in again.stdout


def test_a_journal_that_is_cut_short_meanwhile(cli, files, on_call):
    """What the error says of the attempts that are kept is true."""
    config = str(files.config(files.rows(*[{}] * 8), max_in_flight=1))
    shown = []

    def cut(record):
        shown.append(record)
        if len(shown) == 3:
            journal = files.output / "events.jsonl"
            journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))

    on_call(EvaluationView, "show", cut)
    line = cli("eval", "run", config).stderr
    assert "events.jsonl: was changed from outside" in line
    kept = re.search(r"; (\d) of 8 attempts have ended and are kept; ", line)[1]
    assert kept in "12"  # with an append that was under way
    again = cli(*shlex.split(line.split("go on with: rollout ")[1]))
    assert again.exit_code == 0
    assert f"{kept} of 8 attempts had ended before" in again.stdout


@pytest.mark.parametrize(("target", "options"), [("closed pipe", []), ("/dev/full", ["--json"])])
def test_output_that_goes_away_leaves_a_run_that_can_go_on(cli, files, target, options):
    if target == "closed pipe":
        read, write = os.pipe()
        os.close(read)
    elif Path(target).exists():
        write = os.open(target, os.O_WRONLY)
    else:
        pytest.skip("needs a device that is always full")
    config = str(files.config(files.rows({}, {}, {}), max_in_flight=1))
    done = subprocess.run(
        command_line("eval", "run", config, *options),
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("rollout: cannot write the output: ")
    assert " of 3 attempts have ended and are kept; go on with: rollout eval run" in line
    again = cli(*shlex.split(line.split("go on with: rollout ")[1]))
    assert again.exit_code == 0
    kept = {record.row: record for record in read_records(files.output) if record.counts}
    assert len(kept) == 3


def test_a_dataset_that_changes_meanwhile_is_not_gone_on_with(cli, files, on_call):
    rows = files.rows(*[{}] * 200)
    config = str(files.config(rows, max_in_flight=1))

    def change(record):
        with rows.open("a") as file:
            file.write("\n")

    on_call(EvaluationView, "show", change)
    done = cli("eval", "run", config)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "changed" in line
    assert "go on with" not in line


def ending(monkeypatch, **result):
    """Have every rollout of a run fail."""

    async def end(_):
        return {**failure(), **result}

    class Client(RolloutClient):
        def __init__(self, **options):
            fake = FakeRollouts(end=end)
            super().__init__(http_client=httpx.AsyncClient(transport=fake), **options)

    monkeypatch.setattr("rollout.evaluation.run.RolloutClient", Client)


def test_a_refused_key_ends_the_command_and_nothing_is_on_record(cli, files, monkeypatch):
    ending(monkeypatch, err_source="model_key", err_message="401: no such key")
    config = str(files.config(files.rows(*[{}] * 9)))
    dead = ["--chat-url", "http://127.0.0.1:9/v1", "--no-check"]
    done = cli("eval", "run", config, *dead)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "the model's endpoint refuses the key" in line
    assert line.endswith(
        f"401: no such key; go on with: rollout eval run {config} {' '.join(dead)}"
    )
    assert list(read_records(files.output)) == []


@pytest.mark.parametrize("more", [[], ["--retry-failed"]])
def test_a_run_that_the_breaker_stopped_says_how_to_go_on(cli, files, monkeypatch, more):
    ending(monkeypatch, err_category="http_error", err_message="x" * 2000)
    config = str(files.config(files.rows(*[{}] * 9), breaker_failures=2))
    done = cli("eval", "run", config, *more)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "2 attempts in a row failed for a reason outside" in line
    assert line.endswith(
        f"resume with retry_failed (--retry-failed): rollout eval run {config} --retry-failed"
    )


# --- what is logged ---------------------------------------------------------------------------


def test_verbose_shows_what_the_server_and_the_evaluation_log(cli, files, apps, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("OWN_CHAT_KEY", "key-of-the-model-3")
    rows = files.rows({"raise": "key-of-the-model-3 \x1b[31mis wrong"})
    config = str(files.config(rows, app=f"{apps}:app"))
    level = logging.getLogger("rollout").level
    options = ("--llm-api-key-env", "OWN_CHAT_KEY", "--fresh")
    done = cli("eval", "run", config, "--verbose", *options)
    assert done.exit_code == 0
    lines = done.stderr.splitlines()
    assert any(line.startswith("server: listening on http://127.0.0.1:") for line in lines)
    assert any(
        re.fullmatch(r"rollout: info: the rollout server is at \S+; 8 rollouts at a time", line)
        for line in lines
    )
    shown = [line for line in lines if "is wrong" in line]
    assert shown
    assert all("[redacted]" in line for line in shown)
    assert "key-of-the-model-3" not in done.stderr
    assert "\x1b" not in done.stderr
    assert logging.getLogger("rollout").level == level
    assert cli("eval", "run", config, *options).stderr == ""


# --- the question before a run ----------------------------------------------------------------


def asked(config: Path, answer: bytes | None, *options: str) -> tuple[int, str]:
    """Run on a terminal of its own; the exit code, and what was on stderr.

    ``None`` for the answer is Ctrl-C.
    """
    ours, theirs = pty.openpty()
    command = command_line("eval", "run", str(config), *options)
    env = environment(TERM="xterm")
    with subprocess.Popen(
        command, env=env, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # as Linux ends a terminal that nobody holds any more
                data = b""
            if not data:
                break
            shown += data
            if b"[Y/n] " in shown and answer is None:
                process.send_signal(signal.SIGINT)
                answer = b""
            elif b"[Y/n] " in shown and answer:
                os.write(ours, answer)
                answer = b""
    os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.parametrize("answer", [b"n\n", b"\x04"])
def test_a_run_that_is_not_wanted_is_not_started(files, answer):
    config = files.config(files.rows({}, {}), n=3)
    code, shown = asked(config, answer)
    assert code == 2
    assert "6 rollout(s); no attempt on record tells how many tokens. Start? [Y/n]" in shown
    assert "rollout: nothing was started" in shown
    assert read_all(files) == []


@pytest.mark.parametrize(("answer", "options"), [(b"\n", ()), (b"", ("--yes",))])
def test_a_run_that_is_wanted(files, answer, options):
    config = files.config(files.rows({}))
    code, shown = asked(config, answer, *options)
    assert code == 0
    assert "1 rollout(s)" in shown
    assert ("Start?" in shown) == (not options)
    assert len(read_all(files)) == 1


def test_ctrl_c_at_the_question(files):
    code, shown = asked(files.config(files.rows({})), None)
    assert code == 130, shown
    assert read_all(files) == []


def read_all(files) -> list[AttemptRecord]:
    return [*read_records(files.output)] if (files.output / "events.jsonl").exists() else []


# --- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["secrets.env", "-"])
def test_a_secrets_file_has_the_keys(cli, files, name):
    text = "OWN_CHAT_KEY='key-of-the-model-2'\n"
    if name != "-":
        name = str(files.folder / name)
        Path(name).write_text(text)
    config = str(files.config(files.rows({"raise": "key-of-the-model-2 is wrong"})))
    options = ("--llm-api-key-env", "OWN_CHAT_KEY", "--secrets-file", name)
    done = cli("eval", "run", config, *options, stdin=text)
    assert done.exit_code == 0, done.output
    assert "agent_error: [redacted] is wrong" in done.stdout
    for path in files.output.rglob("*"):
        assert path.is_dir() or b"key-of-the-model-2" not in path.read_bytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "missing.env: No such file or directory"),
        (b"sk-live-1", "missing.env, line 1: must be NAME=value"),
        (b"A=\xff", "missing.env is not UTF-8"),
    ],
)
def test_a_secrets_file_that_cannot_be_read(cli, files, tmp_path, data, words):
    path = tmp_path / "missing.env"
    if data is not None:
        path.write_bytes(data)
    config = str(files.config(files.rows({})))
    line = cli.fails(2, "eval", "run", config, "--secrets-file", str(path))
    assert words in line
    assert "sk-live-1" not in line


def test_keys_stay_out_of_sight(cli, files, on_call):
    config = str(files.config(files.rows({"raise": "key-of-the-model-1 is wrong"}, {"sleep": 600})))

    def interrupt(record):
        signal.raise_signal(signal.SIGINT)

    on_call(EvaluationView, "show", interrupt)
    done = cli(
        "eval", "run", config, "--llm-api-key-env", "MODEL_KEY", "--no-check",
        "--chat-url", "http://user:password-2@127.0.0.1:9/v1?key=password-3",
        MODEL_KEY="key-of-the-model-1",
    )  # fmt: skip
    assert done.exit_code == 130
    assert "key-of-the-model-1" not in done.output
    assert "password-" not in done.output
    assert "--chat-url 'http://***@127.0.0.1:9/v1?***'" in done.stderr


def test_a_model_that_is_not_there_begins_no_run(cli, files):
    config = str(files.config(files.rows({}), app="missing:app"))
    url = "http://user:password-2@127.0.0.1:9/v1?key=password-3"
    line = cli.fails(2, "eval", "run", config, "--chat-url", url)
    assert (
        "a test call of the model at http://127.0.0.1:9/v1 failed: all attempts to connect" in line
    )
    assert "--no-check" in line
    assert "password-" not in line
    assert list(read_records(files.output)) == []


def test_arguments_are_remembered_as_they_came():
    command = _Remembering("x", params=[click.Option(["--n"])])
    assert command.make_context("x", ["--n", "a b"]).obj == ["--n", "a b"]
