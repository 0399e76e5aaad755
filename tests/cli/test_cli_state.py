"""``rollout state``, and ``rollout serve --state``."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner
from server.faults import admit, finished, in_process_http
from support import make_app, prompt

from rollout.cli.group import main
from rollout.server.state import KeptRollout, SQLiteStore

BODY = b'{"rollout_id": "done", "status": "success"}'


def invoke(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output.splitlines()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    async def fill() -> None:
        store = SQLiteStore(tmp_path / "state")
        await store.open()
        rows = [
            KeptRollout(1, "done", b"", b"", "2026-01-02T03:04:05Z", "success", 900.0, BODY),
            KeptRollout(2, "\x1b[31mred", b""),
        ]
        await store.commit(rows, 0.0)
        await store.sweep(400.0)
        await store.close()

    trio.run(fill)
    return tmp_path / "state"


def test_it_lists_what_is_kept(state):
    code, lines = invoke("state", "show", str(state))
    assert code == 0
    assert [line.split() for line in lines] == [
        ["rollout_id", "status", "agent_started_at", "kept_for_sec"],
        ["done", "success", "2026-01-02T03:04:05Z", "500"],
        ["\\x1b[31mred", "in", "flight"],
    ]
    code, lines = invoke("state", "show", "--json", str(state))
    assert [json.loads(line) for line in lines] == [
        {
            "rollout_id": "done",
            "status": "success",
            "agent_started_at": "2026-01-02T03:04:05Z",
            "kept_for_sec": 500,
        },
        {
            "rollout_id": "\x1b[31mred",
            "status": "in flight",
            "agent_started_at": None,
            "kept_for_sec": None,
        },
    ]


def test_it_exports_results(state):
    assert invoke("state", "export", str(state)) == (0, [BODY.decode()])


async def test_it_reads_the_state_of_a_running_server(tmp_path):
    state = tmp_path / "state"
    async with in_process_http(make_app(state=state)) as http:
        done, lease = await admit(http)
        result = await finished(http, done, lease)
        running, lease = await admit(http, initial_messages=prompt(sleep=60))
        code, lines = await trio.to_thread.run_sync(invoke, "state", "show", "--json", str(state))
        shown = {each["rollout_id"]: each["status"] for each in map(json.loads, lines)}
        assert (code, shown) == (0, {done: "success", running: "in flight"})
        code, lines = await trio.to_thread.run_sync(invoke, "state", "export", str(state))
        assert (code, [json.loads(line) for line in lines]) == (0, [result])
        await http.post("/rollout/cancel", json={"all": True})
        await finished(http, running, lease)  # the shutdown waits for who has not read its result


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: unable to open database file"),
        (b"no database" * 1000, "cannot be read: file is not a database"),
        ("foreign", "is a database of another program"),
    ],
)
def test_what_is_not_a_state_is_said(tmp_path, content: Any, expected: str):
    path = tmp_path / "state"
    if content == "foreign":
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE mine (x)")
        connection.close()
    elif content is not None:
        path.write_bytes(content)
    for command in ("show", "export"):
        code, lines = invoke("state", command, str(path))
        assert code != 0
        assert expected in lines[-1]


def test_durability_alone_is_refused():
    code, lines = invoke("serve", "nothing:app", "--durability", "power")
    assert (code, lines[-1]) == (2, "rollout: --durability goes with --state")
