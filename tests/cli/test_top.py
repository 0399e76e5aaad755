"""``rollout top``: what it shows of a server's state, and what its keys do."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trio
from cli.harness import SERVER_KEY, command_line, environment
from rich.console import Console
from support import CHAT_URL

from rollout.cli.top import LiveState, TopView, keys_of
from rollout.client import RolloutClient

HISTORY = ("admitted", "success", "failure", "cancelled", "rewards", "mean_reward")


def line(*rows: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The first line of a server."""
    found = {
        "now": 1000.0,
        "server": {"version": "1.2", "started_at": 900.0, "accepting": True, "state": None},
        "rollouts": {
            "active": 2, "queued": 1, "running": 1, "grading": 0, "admitted": 3, "ended": 3,
        },
        "rates": {"admitted": 0.5, "ended": 0.25},
        "outcomes": {"success": 2, "failure": 1},
        "failures": {"timeout": 1},
        "durations": {
            "bounds_sec": [1, 10],
            "queued": {"counts": [3, 0, 0]},
            "ran": {"counts": [0, 2, 1]},
        },
        "history": {"bin_sec": 1.0, **{name: [0, 1, 2] for name in HISTORY}},
        "slots": {"max_concurrent": 8, "running": 1, "queued": 1},
        "workers": None,
    }  # fmt: skip
    return {**found, **sections, "rows": list(rows), "gone": []}


ROWS = (
    {"id": "old", "status": "running", "admitted_at": 950.0, "agent_started_at": 951.0},
    {"id": "new", "status": "queued", "admitted_at": 990.0, "run": "train-7"},
    {"id": "good", "status": "success", "admitted_at": 900.0, "agent_started_at": 905.0,
     "ended_at": 910.0, "reward": 1.0},
    {"id": "bad", "status": "failure", "admitted_at": 900.0, "ended_at": 980.0,
     "err_category": "timeout", "err_message": "too\nslow \x1b[31m[bold]"},
)  # fmt: skip


@pytest.fixture
def view():
    state = LiveState()
    state.take(line(*ROWS), first=True)
    return TopView(state, "http://rollouts.test")


def press(view: TopView, keys: str) -> list[str]:
    """Press keys; return the ids in the order in which they are shown then."""
    for key in keys_of(keys.encode()):
        view.key(key)
    return [row["id"] for row in view.rows()]


def drawn(view: TopView, height: int = 24, width: int = 110) -> list[str]:
    console = Console(width=width, height=height, color_system=None, file=io.StringIO())
    with console.capture() as capture:
        console.print(view.draw(height))
    return capture.get().splitlines()


def test_lines_add_up():
    state = LiveState()
    state.take(line(*ROWS), first=True)
    grading = {**ROWS[0], "status": "grading"}
    later = {"now": 1001.0, "rates": {}, "rows": [grading], "gone": ["bad"]}
    state.take(later, first=False)
    assert [*state.rows] == ["old", "new", "good"]
    assert state.rows["old"]["status"] == "grading"
    assert (state.sections["rates"], state.sections["failures"]) == ({}, {"timeout": 1})
    assert 1001 <= state.now() < 1060
    state.take(line(ROWS[1]), first=True)  # a server that was started again
    assert [*state.rows] == ["new"]


def test_what_it_shows(view):
    lines = drawn(view)
    assert lines[0].startswith("http://rollouts.test  trio-rollout 1.2  up 01:4")
    assert lines[1] == (
        "active 2: 1 queued, 1 running, 0 grading   slots 1 of 8   in 0.50/s  out 0.25/s"
    )
    assert lines[2] == "ended 3: 2 success, 1 failure   mean reward 1.667   failures: 1 timeout"
    assert lines[3].startswith("waited <1s (half), <1s (95%)   ran <10s (half), >10s (95%)   ended")
    assert lines[4] == "4 rollouts (all)"
    assert lines[5].split() == ["id", "status", "run", "time▼", "waited", "reward", "error"]
    assert [row.split()[0] for row in lines[6:10]] == ["old", "new", "bad", "good"]
    bad, good = lines[8:10]
    assert bad.rstrip().endswith(r"timeout  too slow \x1b[31m[bold]")
    assert good.split() == ["good", "success", "00:10", "00:05", "1"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", ["old", "new", "bad", "good"]),
        ("r", ["new", "old", "good", "bad"]),
        ("ssr", ["old", "new", "good", "bad"]),  # by reward; without one comes last
        ("SSSSr", ["new", "old", "bad", "good"]),
        ("a", ["old", "new"]),
        ("aa", ["bad", "good"]),
        ("/TIME\r", ["bad"]),
        ("/TRAIN", ["new"]),
        ("/time\x7f\x7f\x7f\x7f\x7f", ["old", "new", "bad", "good"]),
        ("/nothing\x1b", ["old", "new", "bad", "good"]),
        ("/q", ["new"]),  # which is queued
    ],
)
def test_keys_sort_and_filter(view, keys, expected):
    assert press(view, keys) == expected
    assert drawn(view)
    assert not view.over


@pytest.mark.parametrize(
    ("keys", "cancelled", "asked"),
    [
        ("cy", ["old"], "cancel old? y/n"),
        ("cn", [], "cancel old? y/n"),
        ("c\x1b", [], "cancel old? y/n"),
        ("cq", [], "cancel old? y/n"),
        ("jcy", ["new"], "cancel new? y/n"),
        ("\x1b[B\x1bOAcy", ["old"], "cancel old? y/n"),
        ("Cy", ["old", "new"], "cancel 2 rollouts? y/n"),
        ("/train\rCy", ["new"], "cancel new? y/n"),
        ("\x1b[Fcy", [], None),
    ],
)
def test_cancel_asks_first(view, keys, cancelled, asked):
    *before, last = keys_of(keys.encode())
    for key in before:
        view.key(key)
    assert view.to_cancel == []
    assert (asked in drawn(view)) if asked else not view.asked
    view.key(last)
    assert (view.to_cancel, view.asked, view.over) == (cancelled, [], False)


@pytest.mark.parametrize("keys", ["q", "\x03", "/x\x03", "c\x03"])
def test_it_ends(view, keys):
    press(view, keys)
    assert view.over


def test_it_fits_whatever_the_terminal_has_and_the_selected_row_is_in_sight(view):
    rows = [{"id": f"r{n}", "status": "running", "admitted_at": float(n)} for n in range(500)]
    view.state.take(line(*rows), first=True)
    for height in (10, 24, 50):
        for keys in ("\x1b[H", "\x1b[6~\x1b[6~jj", "\x1b[F"):
            press(view, keys)
            lines = drawn(view, height, width=60)
            assert len(lines) == height
            assert any(each.startswith(f"{view._selected} ") for each in lines)
            assert max(map(len, lines)) <= 60


def test_workers(view):
    workers = [{"name": "1", "status": "up"}, {"name": "2", "status": "lost"}]
    view.state.take(line({**ROWS[0], "worker": "1"}, workers=workers), first=True)
    assert "workers 1 up, not up: 2" in drawn(view)


# --- servers --------------------------------------------------------------------------------------


@contextmanager
def answering(*answers: tuple[int, bytes]) -> Iterator[str]:
    """The URL of a server with these answers, one for each request."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_without_a_terminal_it_prints_the_state(cli, server):
    done = cli("top", server)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{server}  trio-rollout ")
    assert "\nactive 0: 0 queued, 0 running, 0 grading   slots 0 of 1" in done.stdout
    state = json.loads(cli("top", server, "--json").stdout)
    assert state["rollouts"]["active"] == 0
    assert all("ended_at" in row for row in state["rows"])  # of tests before this one


def test_the_key(cli, locked_server):
    assert "--api-key-env" in cli.fails(2, "top", locked_server)
    done = cli("top", locked_server, "--api-key-env", "KEY", KEY=SERVER_KEY)
    assert done.exit_code == 0


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"", "does not stream its live state (GET /rollouts/live is 404)"),
        (405, b"", "does not stream its live state"),
        (503, b"", "answered 503, not 200; it is shutting down"),
        (200, b"", "ended the stream before its first line"),
        (200, b"<html>\n", "answered with a line that is not a live state"),
        (200, b'{"rows": [1], "gone": []}\n', "answered with a line that is not a live state"),
        (200, b"[]\n", "answered with a line that is not a live state"),
    ],
)
def test_servers_without_it(cli, status, body, words):
    with answering((status, body)) as url:
        assert words in cli.fails(2, "top", url)


def test_nobody_there(cli):
    assert "is a rollout server running there?" in cli.fails(2, "top", "http://127.0.0.1:9")


# --- a terminal -----------------------------------------------------------------------------------


class Terminal:
    """``rollout top`` on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.seen = ""
        self._fd, terminal = pty.openpty()
        env = environment(TERM="xterm", COLUMNS="100", LINES="24")
        self._process = subprocess.Popen(
            command_line("top", url), env=env, stdin=terminal, stdout=terminal, stderr=terminal
        )
        os.close(terminal)

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self._fd, keys.encode())

    def until(self, pattern: str) -> None:
        """Read until it has drawn what matches."""
        while not re.search(pattern, self.seen):
            assert select.select([self._fd], [], [], 60)[0], self.seen
            self.seen += os.read(self._fd, 65536).decode(errors="replace")

    def end(self) -> int:
        with suppress(OSError):  # the terminal goes with its process
            while os.read(self._fd, 65536):
                pass
        os.close(self._fd)
        return self._process.wait(60)


async def test_on_a_terminal(server):
    async with RolloutClient(url=server) as client:
        prompt = [{"role": "user", "content": "?", "sleep": 600}]
        handle = await client.run_rollout_async(prompt, CHAT_URL, "shown", grade=False)

        def use() -> int:
            top = Terminal(server)
            top.until("shown.*running")
            top.press("c")
            top.until("cancel shown")
            top.press("y")
            top.until("shown.*cancelled")
            top.press("q")
            return top.end()

        assert await trio.to_thread.run_sync(use) == 0
        assert (await handle).status == "cancelled"


def test_a_server_that_comes_back():
    first, second = (
        json.dumps(line({**ROWS[0], "id": name})).encode() + b"\n" for name in ("before", "after")
    )
    with answering((200, first), (200, first), *[(200, second)] * 50) as url:
        top = Terminal(url)
        top.until("before")
        top.until("trying again")
        top.until("after")
        top.press("\x03")
        assert top.end() == 0
