"""``rollout serve --until-stdin-closes``: a server that goes with the process that started it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest
import trio
from cli.harness import command_line, environment
from support import prompt

from rollout.client import RolloutClient

QUICK = (
    "--drain-sec",
    "0",
    "--delivery-sec",
    "0",
    "--cleanup-sec",
    "0.1",
    "--forced-sec",
    "0.1",
    "--backend-sec",
    "0",
)


HASTY = """
import sys, rollout.cli.serve as serve
serve._CLOSING_SEC = 0.1
from rollout.cli import main
main(sys.argv[1:])
"""


def start(folder, app, *, stdin=subprocess.PIPE):
    options = ("serve", app, "--bind", "127.0.0.1:0", "--until-stdin-closes", *QUICK)
    return subprocess.Popen(
        [sys.executable, "-c", HASTY, *options],
        cwd=folder,
        env=environment(),
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_of_user_code_inherit_what_a_plain_program_gives_them(apps):
    async def use(url):
        async with RolloutClient(url=url) as client:
            return await client.run_rollout(prompt(), "http://x", "forks", grade=False)

    with start(apps, "cli_apps:forking") as server:
        result = trio.run(use, server.stdout.readline().split()[-1])
        server.terminate()
        assert server.wait(timeout=60) == 0
    assert result.err_message is None
    (found,) = result.sample.messages
    assert found == {
        "ended": True,
        "interrupt": True,
        "wakes": -1,
        "internet": False,
        "masked": 0,
        "stdin": "",
        "internet at the start": False,
    }


def test_shuts_down_when_stdin_closes_and_not_before(apps):
    with start(apps, "cli_apps:app") as server:
        url = server.stdout.readline().split()[-1]
        server.stdin.write("what is written there means nothing\n" * 1000)
        server.stdin.flush()
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        assert server.poll() is None
        server.stdin.close()
        assert server.wait(timeout=60) == 0


def test_shuts_down_at_once_without_a_stdin(apps):
    with start(apps, "cli_apps:app", stdin=subprocess.DEVNULL) as server:
        assert server.wait(timeout=60) in {0, -15, 143}  # the signal may come before it listens


def test_ends_even_while_the_event_loop_is_blocked(apps):
    with start(apps, "cli_apps:blocking") as server:
        url = server.stdout.readline().split()[-1]
        body = {
            "rollout_id": "r",
            "initial_messages": prompt(),
            "chat_completions_url": "http://chat/v1",
            "label": "42",
        }
        # The workflow may block the loop before the admission is answered.
        with closing(HTTPConnection(httpx.URL(url).netloc.decode())) as caller:
            caller.request("POST", "/rollout", json.dumps(body))
            assert server.stdout.readline() == "blocking\n"
            server.stdin.close()
            assert server.wait(timeout=60) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_ends_when_its_starter_is_killed(apps):
    """The starter has no time to say anything; the pipe closes with it."""
    code = (
        "import subprocess, sys, time\n"
        "server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "time.sleep(600)\n"
    )
    command = command_line(
        "serve", "cli_apps:app", "--bind", "127.0.0.1:0", "--until-stdin-closes", *QUICK
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *command],
        cwd=apps,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        url = starter.stdout.readline().split()[-1]
        starter.kill()
        starter.wait()
        # The server holds the pipe's other end, which closes with it.
        assert starter.stdout.read() == ""
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=30)
