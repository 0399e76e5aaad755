"""The folder of a run: its lock, its archive, and folders that cannot be used."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from evaluation.run.cases import config_of, python, raising, run_all, scripted

from rollout._files.atomic import is_leftover, write_atomic, writing_atomic
from rollout.errors import EvaluationDamagedError, EvaluationError, EvaluationLockedError
from rollout.evaluation import evaluate
from rollout.evaluation.folder.journal import decode_line, encode_line
from rollout.evaluation.folder.layout import archive, finish_archiving, locked, tidy

HOLD = """
import sys
from pathlib import Path
from rollout.evaluation.folder.layout import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_lock_between_processes(tmp_path):
    with python(HOLD, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(EvaluationLockedError, match="another evaluation is running in"):
            with locked(tmp_path):
                pytest.fail("two at a time")
        holder.stdin.close()
        assert holder.wait() == 0
    with locked(tmp_path):
        pass


def test_lock_ends_with_its_process_even_by_sigkill(tmp_path):
    with python(HOLD, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "locked\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked(tmp_path):
        pass


async def test_two_runs_in_one_process(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    async with evaluate(config) as run:
        with pytest.raises(EvaluationLockedError):
            await run_all(config)
        assert len([record async for record in run]) == 2
    run, _ = await run_all(config)
    assert run.complete


async def test_a_run_that_failed_leaves_no_lock(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    with pytest.raises(LookupError):
        async with evaluate(config):
            raise LookupError
    with locked(config.run.output):
        pass


def test_output_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("mine")
    for folder in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(EvaluationError, match="cannot hold a run: "):
            with locked(folder):
                pytest.fail("it is no folder")
    assert (tmp_path / "out").read_text() == "mine"


def test_lock_that_cannot_be_made(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(EvaluationError, match="cannot hold a run: "):
        with locked(tmp_path):
            pytest.fail("it has no lock")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may write anywhere")
def test_folder_that_is_not_writable(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(EvaluationError, match="cannot hold a run: "):
        with locked(tmp_path):
            pytest.fail("it is not writable")
    tmp_path.chmod(stat.S_IRWXU)


async def test_trajectories_that_are_a_file(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    config.run.output.mkdir()
    (config.run.output / "trajectories").write_text("mine")
    with pytest.raises(EvaluationError, match="trajectories: "):
        await run_all(config)
    assert (config.run.output / "trajectories").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["trajectories", "rollouts", "events.jsonl", "server.log", ".lock"]
)
async def test_planted_links_are_not_followed(tmp_path, server, name):
    config = config_of(tmp_path, server={"app": "nowhere:app"}, rows=scripted(1))
    folder = config.run.output
    target = tmp_path / "target"
    if "." not in name:
        target.mkdir()
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(EvaluationError, match=f"{re.escape(name)}: |cannot hold a run"):
        await run_all(config)
    assert not target.exists() or list(target.iterdir()) == []


async def test_journal_without_manifest(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    await run_all(config)
    (config.run.output / "manifest.json").unlink()
    with pytest.raises(EvaluationDamagedError, match=r"a journal .* but no manifest\.json"):
        await run_all(config)
    run, records = await run_all(config, fresh=True)
    assert len(records) == 2
    assert len(list((run.folder / "archive").glob("*/events.jsonl"))) == 1


# --- archive ----------------------------------------------------------------------------------


def filled(folder: Path, mark: str) -> dict[str, str]:
    """A folder as a run leaves it; returns what is in it."""
    names = ["manifest.json", "events.jsonl", "index.jsonl", "metrics.json", "report.html"]
    (folder / "trajectories").mkdir(parents=True)
    for name in [*names, "server.log", "trajectories/0-0-0.json"]:
        (folder / name).write_text(f"{name} {mark}")
    (folder / ".lock").write_text("")
    (folder / "notes.txt").write_text("mine")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_archive_keeps_everything(tmp_path):
    before = filled(tmp_path, "first")
    target = archive(tmp_path, "now")
    assert target == tmp_path / "archive" / "now"
    moved = {name: text for name, text in before.items() if name not in {".lock", "notes.txt"}}
    assert contents(target) == moved
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "notes.txt", "archive"}


def test_nothing_to_archive(tmp_path):
    assert archive(tmp_path, "now") is None
    assert list(tmp_path.iterdir()) == []


def test_twice_in_a_second(tmp_path):
    for number in range(3):
        for name in ("manifest.json", "events.jsonl"):
            (tmp_path / name).write_text(f"{number}")
        archive(tmp_path, "now")
    archived = {path.name: contents(path) for path in (tmp_path / "archive").iterdir()}
    assert archived == {
        name: {"manifest.json": str(number), "events.jsonl": str(number)}
        for number, name in enumerate(["now", "now-2", "now-3"])
    }


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", ["rename", "unlink", "mkdir"])
@pytest.mark.parametrize("moment", range(8))
@pytest.mark.parametrize("then", ["archive", "go on"])
def test_archiving_that_is_cut_short_is_finished(tmp_path, monkeypatch, call, moment, then):
    """Nothing is lost, nothing mixed: all of the first run ends up in one folder."""
    before = filled(tmp_path, "first")
    real = getattr(Path, call)
    calls = 0

    def killed(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > moment:
            raise Killed
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, killed)
        with contextlib.suppress(Killed):
            archive(tmp_path, "now")
    started = [path for path in (tmp_path / "archive").glob("*") if any(path.iterdir())]
    if then == "archive":
        archive(tmp_path, "later")
    else:
        finish_archiving(tmp_path)
    moved = {name: text for name, text in before.items() if name not in {".lock", "notes.txt"}}
    if started or then == "archive":
        found = [each for each in (tmp_path / "archive").iterdir() if any(each.iterdir())]
        assert [contents(each) for each in found] == [moved]
    else:
        assert {**contents(tmp_path)} == before


def test_archive_that_cannot_be_written(tmp_path, monkeypatch):
    before = filled(tmp_path, "first")
    (tmp_path / "archive").write_text("mine")
    with pytest.raises(EvaluationError, match="cannot be archived"):
        archive(tmp_path, "now")
    assert contents(tmp_path) == {**before, "archive": "mine"}


async def test_fresh(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(3))
    first, _ = await run_all(config)
    kept = contents(first.folder)
    second, records = await run_all(config, fresh=True)
    assert len(records) == 3
    assert second.manifest["run_id"] != first.manifest["run_id"]
    (archived,) = (second.folder / "archive").iterdir()
    assert contents(archived) == {name: text for name, text in kept.items() if name != ".lock"}
    assert (await run_all(config))[1] == []


async def test_archiving_that_was_cut_short_is_finished_by_any_call(tmp_path, server):
    """No run goes on with half of another."""
    config = config_of(tmp_path, server="http://fake", rows=scripted(3))
    first, _ = await run_all(config)
    kept = contents(first.folder)
    archived = first.folder / "archive" / "then"
    archived.mkdir(parents=True)
    (archived / ".unfinished").touch()
    (first.folder / "events.jsonl").rename(archived / "events.jsonl")
    second, records = await run_all(config)
    assert second.manifest["run_id"] != first.manifest["run_id"]
    assert len(records) == 3
    assert contents(archived) == {name: text for name, text in kept.items() if name != ".lock"}


async def test_fresh_after_damage(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(3))
    first, _ = await run_all(config)
    path = first.folder / "events.jsonl"
    damaged = path.read_bytes().replace(b'"success"', b'"failure"', 1)
    path.write_bytes(damaged)
    with pytest.raises(EvaluationDamagedError, match=r"events\.jsonl, line 2: "):
        await run_all(config)
    run, _ = await run_all(config, fresh=True)
    assert run.complete
    (archived,) = (run.folder / "archive").iterdir()
    assert (archived / "events.jsonl").read_bytes() == damaged


async def test_a_journal_without_a_manifest_belongs_to_nobody(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(1))
    run, _ = await run_all(config)
    (run.folder / "manifest.json").unlink()
    before = contents(run.folder)
    with pytest.raises(EvaluationDamagedError, match=r"no manifest\.json; restore it"):
        await run_all(config)
    assert contents(run.folder) == before
    run, _ = await run_all(config, fresh=True)
    assert run.complete


async def test_a_record_beyond_n_is_refused_before_anything_runs(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    run, _ = await run_all(config)
    journal = run.folder / "events.jsonl"
    first, second, _ = journal.read_bytes().splitlines(keepends=True)
    beyond = encode_line({**decode_line(second), "attempt": 1})
    journal.write_bytes(first + beyond)
    with pytest.raises(EvaluationDamagedError, match=r"events\.jsonl: row \d has an attempt 1"):
        await run_all(config)
    assert journal.read_bytes() == first + beyond
    assert server.tries.total() == 2


@pytest.mark.parametrize("name", ["index.jsonl", "metrics.json", "report.html"])
async def test_files_of_others_are_not_replaced(tmp_path, server, name):
    config = config_of(tmp_path, server="http://fake", rows=scripted(1), output=str(tmp_path))
    (tmp_path / name).write_text("mine")
    with pytest.raises(EvaluationError, match=f"a file {re.escape(name)}, which a run would"):
        await run_all(config)
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "manifest.json").exists()
    run, _ = await run_all(config, fresh=True)
    assert run.complete
    (kept,) = (tmp_path / "archive").glob(f"*/{name}")
    assert kept.read_text() == "mine"


# --- files ------------------------------------------------------------------------------------


def test_left_overs_of_writing_are_removed(tmp_path):
    tidy(tmp_path)
    for folder in (tmp_path, tmp_path / "trajectories"):
        with pytest.raises(Killed), writing_atomic(folder / ("ü" * 200)) as file:
            file.write(b"half")
            (left,) = [path for path in folder.iterdir() if is_leftover(path.name)]
            os.link(left, folder / ".again.0123.tmp")
            raise Killed
        (folder / ".hidden").write_text("mine")
    tidy(tmp_path)
    assert contents(tmp_path) == {".hidden": "mine", "trajectories/.hidden": "mine"}


def test_writing_replaces_or_leaves(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raising(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            write_atomic(path, b"new")
    assert contents(tmp_path) == {"file": "old"}
    write_atomic(path, b"new", sync_name=False)
    assert contents(tmp_path) == {"file": "new"}
