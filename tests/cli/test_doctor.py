"""``rollout doctor``: what it finds, and what it says of what will not work."""

from __future__ import annotations

import json
import socket

from rollout.cli import doctor


def found(cli, **env):
    result = cli("doctor", "--json", **env)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return result.exit_code, {row["check"]: row for row in rows}


def test_what_it_looks_at(cli, tmp_path):
    code, rows = found(cli, ROLLOUT_ARTIFACT_ROOT=str(tmp_path / "rollouts"))
    assert code == 0
    assert {"python", "packages", "extras", "port", "open files", "sandboxes", "clock"} <= set(rows)
    files = rows["files of rollouts"]
    assert files["text"].startswith(f"{tmp_path / 'rollouts'}, ")
    assert not (tmp_path / "rollouts").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_table_for_people(cli, monkeypatch):
    monkeypatch.setattr(doctor, "_try_sandbox", _nothing)
    result = cli("doctor", ROLLOUT_ARTIFACT_ROOT="")
    assert result.exit_code == 0
    assert "none are kept (ROLLOUT_ARTIFACT_ROOT is empty)" in result.stdout


def test_a_port_that_is_taken(cli, monkeypatch):
    monkeypatch.setattr(doctor, "_try_sandbox", _nothing)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(doctor, "_PORT", server.getsockname()[1])
        code, rows = found(cli)
    assert code == 0
    assert rows["port"]["verdict"] == "note"
    assert "serve with another --bind" in rows["port"]["text"]


def test_a_folder_that_cannot_be_written_is_a_problem(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_try_sandbox", _nothing)
    (tmp_path / "file").write_text("")
    code, rows = found(cli, ROLLOUT_ARTIFACT_ROOT=str(tmp_path / "file" / "below"))
    assert code == 1
    assert "cannot be written: Not a directory" in rows["files of rollouts"]["text"]


async def _nothing():
    pass
