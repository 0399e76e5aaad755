"""``rollout health``, ``wait-idle`` and ``cancel``, and the group itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import trio
from cli.harness import SERVER_KEY, command_line, environment
from support import fresh_id

from rollout.cli import main
from rollout.cli.failures import (
    EXIT_FAILED,
    EXIT_FORCED,
    EXIT_USAGE,
    CommandError,
    explain,
)
from rollout.client import RolloutClient
from rollout.errors import RolloutProtocolError


def test_health(cli, server):
    result = cli("health", server)
    assert result.exit_code == 0
    fields = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert fields["status"] == "ok"
    assert fields["concurrency.max_concurrent"] == "1"
    assert fields["lifecycle.accepting_rollouts"] == "yes"


def test_health_json(cli, server):
    payload = json.loads(cli("health", server, "--json").stdout)
    assert payload["lifecycle"]["accepting_rollouts"] is True
    assert payload["process_id"]


def test_wait_idle(cli, server):
    process_id = json.loads(cli("health", server, "--json").stdout)["process_id"]
    result = cli("wait-idle", server, "--process-id", process_id, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["lifecycle"]["active_rollouts"] == 0


def test_wait_idle_for_another_process(cli, server):
    assert "restarted" in cli.fails(2, "wait-idle", server, "--process-id", "another")


@pytest.mark.parametrize("option", ["--timeout-sec", "--poll-interval-sec"])
def test_wait_idle_with_times_that_cannot_be(cli, server, option):
    assert "must be a finite number above 0" in cli.fails(2, "wait-idle", server, option, "0")


def test_wait_idle_says_at_once_that_nothing_listens(cli):
    line = cli.fails(2, "wait-idle", "http://127.0.0.1:9", "--timeout-sec", "1e9")
    assert "no answer from http://127.0.0.1:9" in line


def while_two_run(server, check):
    """Call *check* in a thread while two rollouts are on the server; return their statuses."""
    ids = [fresh_id("cancel"), fresh_id("cancel")]

    async def use():
        async with RolloutClient(url=server) as client:
            handles = [
                await client.run_rollout_async(
                    [{"role": "user", "content": "?", "sleep": 600}], "http://x", id_, grade=False
                )
                for id_ in ids
            ]
            await handles[0].wait_for_running()
            await trio.to_thread.run_sync(check, ids)
            return [(await handle).status for handle in handles]

    return trio.run(use)


@pytest.mark.parametrize("selector", ["--id", "--prefix", "--all"])
def test_cancel(cli, server, selector):
    def check(ids):
        chosen = {"--id": ["--id", ids[0], "--id", ids[1]], "--prefix": ["--prefix", "cancel-"]}
        done = cli("cancel", server, *chosen.get(selector, ["--all"]), "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        dispositions = json.loads(done.stdout)["dispositions"]
        assert dispositions[ids[0]] == "cancelled_running"
        assert dispositions[ids[1]] == "cancelled_queued"

    assert while_two_run(server, check) == ["cancelled", "cancelled"]


def test_cancel_says_what_became_of_each_id(cli, server):
    result = cli("cancel", server, "--id", "no-such-id")
    assert (result.exit_code, result.stdout) == (0, "not_found          no-such-id\n")


def test_cancel_without_a_match(cli, server):
    result = cli("cancel", server, "--prefix", "no-such-prefix")
    assert (result.exit_code, result.stdout) == (0, "no rollout matches\n")


@pytest.mark.parametrize(
    "selectors",
    [[], ["--id", "a", "--all"], ["--id", "a", "--prefix", "a"], ["--prefix", "a", "--all"]],
)
def test_cancel_takes_exactly_one_selector(cli, server, selectors):
    assert "exactly one of" in cli.fails(2, "cancel", server, *selectors)


def test_wait_idle_runs_out_of_time(cli, server):
    lines = []
    options = ("--timeout-sec", "0.1", "--poll-interval-sec", "0.01")

    def check(ids):
        lines.append(cli.fails(1, "wait-idle", server, *options))
        cli("cancel", server, "--all")

    while_two_run(server, check)
    assert "did not become idle within 0.1 s; at last: " in lines[0]
    assert "--timeout-sec" in lines[0]


def test_an_empty_prefix_is_not_everything(cli, server):
    assert "--all" in cli.fails(2, "cancel", server, "--prefix", "")


@pytest.mark.parametrize(
    "command", [["health"], ["wait-idle"], ["cancel", "--all"]], ids=lambda args: args[0]
)
class TestEveryCommand:
    def test_key(self, cli, locked_server, command):
        name, *options = command
        args = (name, locked_server, *options)
        assert cli(*args, "--api-key-env", "KEY", KEY=SERVER_KEY).exit_code == 0
        assert "--api-key-env" in cli.fails(2, *args)
        assert "KEY is not set" in cli.fails(2, *args, "--api-key-env", "KEY")
        assert "KEY is empty" in cli.fails(2, *args, "--api-key-env", "KEY", KEY="")

    @pytest.mark.parametrize(
        "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://h?q=1", ""]
    )
    def test_no_url(self, cli, command, url):
        name, *options = command
        assert "url " in cli.fails(2, name, url, *options)

    def test_not_a_rollout_server(self, cli, command):
        class Other(BaseHTTPRequestHandler):
            def answer(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_error(404)

            do_GET = do_POST = answer  # noqa: N815 - the names that http.server asks for

            def log_message(self, *args):
                return

        with HTTPServer(("127.0.0.1", 0), Other) as other:
            thread = threading.Thread(target=other.serve_forever, args=(0.01,))
            thread.start()
            try:
                name, *options = command
                url = f"http://127.0.0.1:{other.server_port}"
                assert "base URL of a rollout server" in cli.fails(2, name, url, *options)
            finally:
                other.shutdown()
                thread.join()


@pytest.mark.parametrize("command", [["health"], ["cancel", "--all"]], ids=lambda args: args[0])
def test_unreachable(cli, command):
    name, *options = command
    line = cli.fails(2, name, "http://user:pass@127.0.0.1:9/base", *options)
    assert "no answer from http://127.0.0.1:9 " in line
    assert "pass" not in line


# --- the group ------------------------------------------------------------------------------


def test_version(cli):
    assert cli("--version").stdout == f"rollout, version {version('trio-rollout')}\n"


@pytest.mark.parametrize("module", ["rollout", "rollout.cli"])
def test_it_runs_as_a_module(module):
    done = subprocess.run([sys.executable, "-m", module, "health"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "rollout: Missing argument 'URL' (see rollout health --help)\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
@pytest.mark.parametrize("module", ["rollout.backend.local", "rollout.cli.remote"])
def test_ctrl_c_while_it_imports_is_no_traceback(module):
    code = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["rollout", "health", "http://127.0.0.1:9"]
from rollout_main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_help_lists_every_command_and_loads_none(cli):
    code = (
        "import sys\nfrom rollout.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "loaded = {'quart', 'hypercorn', 'httpx', 'rich'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in main.list_commands(click.Context(main)):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_every_command_has_help(cli, name):
    result = cli(name, "--help")
    assert result.exit_code == 0
    assert cli(name, "-h").stdout == result.stdout
    assert result.stdout.startswith(f"Usage: rollout {name} ")


@pytest.mark.parametrize("group", [(), ("eval",), ("trajectory",)])
def test_a_group_alone_prints_its_help(cli, group):
    alone = cli(*group)
    assert (alone.exit_code, alone.stderr) == (0, "")
    assert alone.stdout == cli(*group, "--help").stdout
    assert "Commands:" in alone.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["unknown"], "there is no command 'unknown', only init, doctor, serve, run"),
        (["srve"], "there is no command 'srve'; did you mean 'serve'?"),
        (["sim"], "there is no command 'sim'; did you mean 'simulate'?"),
        (["wait_idle"], "did you mean 'wait-idle'?"),
        (["s"], "there is no command 's', only init"),
        (["--unknown"], "No such option"),
        (["health"], "Missing argument 'URL' (see rollout health --help)"),
        (["health", "http://x", "more"], "unexpected extra argument"),
    ],
)
def test_wrong_use_is_one_line(cli, args, words):
    assert words in cli.fails(2, *args)


def test_help_names_every_exit_code(cli):
    text = " ".join(cli("--help").stdout.split())
    codes = {EXIT_FAILED, EXIT_USAGE, EXIT_FORCED}
    assert all(re.search(rf"\b{code} \w", text) for code in {0, 128, *codes})


def complete(*words):
    """What the shell is offered for the last of *words*, by kind."""
    env = environment(
        _ROLLOUT_COMPLETE="bash_complete",
        COMP_WORDS=" ".join(words),
        COMP_CWORD=f"{len(words) - 1}",
    )
    done = subprocess.run(
        [sys.executable, "-c", "from rollout.cli import main; main(prog_name='rollout')"],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("rollout", "tr"), ["plain,trajectory"]),
        (("rollout", "serve", "--dr"), ["plain,--drain-sec"]),
        (("rollout", "serve", "app:app", "--certfile", "c"), ["file,c"]),
        (("rollout", "run", "http://x", "--messages-file", "m"), ["file,m"]),
        (("rollout", "trajectory", "show", "r"), ["file,r"]),
        (("rollout", "trajectory", "validate", "a", "r"), ["file,r"]),
    ],
)
def test_a_shell_completes_names_and_files(words, offered):
    assert complete(*words) == offered


def test_errors_come_out_of_groups():
    error = RolloutProtocolError("POST /rollout answered 503", status_code=503)
    group = BaseExceptionGroup("a nursery", [ExceptionGroup("another", [error])])
    failure = explain(group)
    assert failure is not None
    assert failure.exit_code == 2
    assert failure.line.startswith("POST /rollout answered 503; ")


def test_a_group_of_expected_errors_is_told_by_its_first():
    group = ExceptionGroup("two", [CommandError("first"), CommandError("second")])
    failure = explain(group)
    assert failure is not None
    assert failure.line == "first"


def test_a_fault_of_the_program_is_not_hidden():
    assert explain(ZeroDivisionError()) is None
    assert explain(ExceptionGroup("two", [CommandError("first"), ZeroDivisionError()])) is None


def test_ctrl_c_is_130():
    failure = explain(BaseExceptionGroup("a nursery", [KeyboardInterrupt()]))
    assert failure is not None
    assert (failure.line, failure.exit_code) == ("interrupted", 130)


def test_what_happens_to_a_fault(monkeypatch, server):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("rollout.client.RolloutClient.health", broken)
    with pytest.raises(ZeroDivisionError):
        main(["health", server])


# --- output that does not arrive --------------------------------------------------------------

SLOW = json.dumps([{"role": "user", "content": "?", "sleep": 0.05, "answer": "\u2713"}])


def run_slow(server, **options):
    args = ("run", server, "--chat-url", "http://x", "--no-grade", "--messages-file", "-")
    return subprocess.run(command_line(*args), input=SLOW.encode(), check=False, **options)


@pytest.mark.parametrize("name", ["health", "run"])
def test_a_reader_that_has_left_is_no_reason_for_a_traceback(server, name):
    read, write = os.pipe()
    os.close(read)
    try:
        if name == "run":
            done = run_slow(server, stdout=write, stderr=subprocess.PIPE)
        else:
            done = subprocess.run(
                command_line(name, server), stdout=write, stderr=subprocess.PIPE, check=False
            )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(server):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command_line("health", server), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"rollout: cannot write the output: No space left on device")
    assert done.stderr.count(b"\n") == 1


def test_an_encoding_without_the_character_shows_its_number(server):
    done = run_slow(server, env=environment(PYTHONIOENCODING="ascii"), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"assistant\n  \\u2713\n")
