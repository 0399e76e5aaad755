"""Workers as processes of this machine: when they are started again, and how they end."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import define, field

from rollout._tasks import background_tasks
from rollout.errors import BackendConfigurationError, RolloutServerError
from rollout.pool import LocalWorkers, PoolBackend, WorkerAddress
from rollout.pool.local import (
    FAILED_STARTS,
    FAILED_STARTS_LATER,
    LONGEST_DELAY_SEC,
    STEADY_SEC,
    OutputLines,
    OutputRecords,
    Starts,
    hopeless,
)

# --- when ---------------------------------------------------------------------------------------


def test_the_delay_doubles_with_each_end_in_a_row_up_to_a_bound():
    starts = Starts()
    delays = [starts.ended("exit code 1", float(now)) for now in range(8)]
    assert delays == [0.5, 1, 2, 4, 8, LONGEST_DELAY_SEC, LONGEST_DELAY_SEC, LONGEST_DELAY_SEC]
    assert (starts.restarts, starts.streak, starts.failed) == (8, 8, 8)


def test_a_process_that_was_steady_begins_a_new_row():
    starts = Starts()
    for now in range(4):
        starts.ended("exit code 1", float(now))
    starts.listening(10.0)
    assert starts.ended("exit code 1", 10.0 + STEADY_SEC) == 0.5
    assert starts.streak == 1


def test_one_that_listens_and_dies_at_once_is_in_a_row_but_no_failed_start():
    starts = Starts()
    starts.ended("exit code 1", 0.0)
    starts.listening(1.0)
    assert starts.ended("killed by SIGSEGV", 1.0 + STEADY_SEC / 2) == 1.0
    assert (starts.failed, starts.last_end) == (0, "killed by SIGSEGV")


@pytest.mark.parametrize(
    ("failed", "was_up", "expected"),
    [
        ((FAILED_STARTS, FAILED_STARTS), False, True),
        ((FAILED_STARTS, FAILED_STARTS - 1), False, False),
        ((FAILED_STARTS_LATER, 0), True, False),
        ((FAILED_STARTS, FAILED_STARTS), True, False),
        ((FAILED_STARTS_LATER, FAILED_STARTS_LATER), True, True),
    ],
)
def test_there_is_no_hope_once_each_worker_has_failed_too_often(failed, was_up, expected):
    assert hopeless([Starts(failed=each) for each in failed], was_up=was_up) is expected


def test_lines_have_the_prefix_wherever_they_are_cut():
    lines = OutputLines("worker 3: ")
    assert lines.feed(b"one\ntw") == b"worker 3: one\n"
    assert lines.feed(b"o\n\n") == b"worker 3: two\nworker 3: \n"
    assert lines.last == "two"
    assert lines.feed(b"rollout: no \x1b licence") == b""
    assert lines.rest() == b"worker 3: rollout: no \x1b licence\n"
    assert lines.last == "no \\x1b licence"
    assert lines.feed(bytes(70_000)) == b"worker 3: " + bytes(70_000) + b"\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"time": "t", "level": "INFO", "logger": "a", "message": "m"}', "m"),
        (b"rollout: no \x1b licence", "rollout: no \\x1b licence"),
        (b'{"answer": 42}', '{"answer": 42}'),
        (b'{"time": NaN, "level": 1, "logger": 2, "message": 3}', None),
        (b"[" * 60_000, None),
    ],
)
def test_each_line_becomes_a_record_with_its_worker(line, message):
    lines = OutputRecords("3")
    (written,) = lines.feed(b"\n" + line + b"\n").splitlines()
    record = json.loads(written, parse_constant=pytest.fail)
    assert record["worker"] == "3"
    assert record["message"] == (line.decode() if message is None else message)
    assert {"time", "level", "logger"} < set(record)
    assert lines.last == record["message"].removeprefix("rollout: ")[:500]


# --- processes ------------------------------------------------------------------------------------

LISTENS = "read key; echo $key >key; echo up >/dev/fd/$FD; exec cat >/dev/null"


@define
class Pool:
    """What the source does with its pool."""

    said: list[tuple[str, ...]] = field(factory=list)
    trouble: str | None = None
    process_id: str = "1"
    changed: trio.Event = field(factory=trio.Event)
    draining: bool = False
    address: WorkerAddress | None = None

    def join(self, address):
        self.address = address
        self.draining = False
        self._note("join", address.name)
        return self

    def drain(self):
        self.draining = True

    def lose(self, worker, reason):
        self._note("lose", reason)

    def _note(self, *what):
        self.said.append(what)
        self.changed.set()

    async def has_said(self, count):
        while len(self.said) < count:
            self.changed = trio.Event()
            await self.changed.wait()


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """What the workers' processes run, in turn; the last one again and again."""
    to_run = []

    async def start_server(app, options):
        read, write = os.pipe()
        script = to_run.pop(0) if len(to_run) > 1 else to_run[0]
        process = await trio.lowlevel.open_process(
            ["sh", "-c", f"FD={write}; {script}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(write,),
            cwd=tmp_path,
        )
        os.close(write)
        (tmp_path / "options").write_text("\n".join(options))
        return process, trio.lowlevel.FdStream(read)

    monkeypatch.setattr("rollout.pool.local.start_server", start_server)
    monkeypatch.setattr("rollout.pool.local.FIRST_DELAY_SEC", 0.01)
    return to_run


@asynccontextmanager
async def running(count=1, **options):
    pool, source = Pool(), LocalWorkers("app.py:app", count, **options)
    with trio.fail_after(60):
        async with background_tasks() as nursery:
            nursery.start_soon(source.run, pool)
            yield pool, source


async def test_one_that_dies_is_lost_with_its_reason_and_started_again(scripts, tmp_path, capfd):
    scripts += ["read key; echo up >/dev/fd/$FD; echo 'no luck'; exit 7", f"echo again; {LISTENS}"]
    async with running() as (pool, source):
        await pool.has_said(3)
        assert pool.said == [("join", "1"), ("lose", "exit code 7"), ("join", "1")]
        socket = Path(pool.address.url.removeprefix("unix:"))
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        health = source.health()
        assert health["restarts"] == 1
        (process,) = health["processes"]
        assert process["status"] == "listening"
        assert process["last_end"] == "exit code 7"
        os.kill(process["pid"], signal.SIGSEGV)
        await pool.has_said(5)
        assert pool.said[3] == ("lose", "killed by SIGSEGV")
        await source.shutdown()
        assert pool.draining
        assert pool.said[5] == ("lose", "exit code 0")
    assert not socket.parent.exists()
    key = (tmp_path / "key").read_text().strip()
    assert pool.address.api_key == key
    assert key not in (tmp_path / "options").read_text()
    assert key not in repr(pool.address)
    assert capfd.readouterr().err.startswith("worker 1: no luck\nworker 1: again\n")


async def test_a_crash_loop_is_named_once(scripts, caplog):
    scripts += ["read key; echo up >/dev/fd/$FD; exit 7"] * 6 + [LISTENS]
    async with running() as (pool, _):
        await pool.has_said(13)
    errors = [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"]
    assert errors == ["worker 1 is in a crash loop: 5 ends in a row"]


async def test_children_of_one_that_died_go_with_it(scripts, tmp_path):
    scripts += ["sleep 600 & echo $! >child; echo up >/dev/fd/$FD; kill -9 $$", LISTENS]
    async with running() as (pool, _):
        await pool.has_said(3)
        child = int((tmp_path / "child").read_text())
        while Path(f"/proc/{child}").exists() and "Z" not in state_of(child):
            await trio.sleep(0.01)


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


async def test_one_that_does_not_answer_is_killed(scripts, monkeypatch):
    monkeypatch.setattr("rollout.pool.local._LOOK_SEC", 0.01)
    scripts += [LISTENS]
    async with running(silence_sec=0.05) as (pool, _):
        await pool.has_said(1)
        pool.trouble = "no answer"
        await pool.has_said(2)
        pool.trouble = None
    assert pool.said[1] == ("lose", "it did not answer for 0 s and was killed")


async def test_a_shutdown_that_has_no_time_left_kills(scripts):
    scripts += ["echo up >/dev/fd/$FD; sleep 600"]
    async with running() as (pool, source):
        await pool.has_said(1)
        pid = source.health()["processes"][0]["pid"]
        with trio.move_on_after(0):
            await source.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_no_worker_comes_up(scripts):
    scripts += ["echo 'rollout: no licence'; exit 2"]
    with pytest.raises(RolloutServerError, match="no worker comes up") as caught:
        async with PoolBackend(LocalWorkers("app.py:app", 2)).running():
            await trio.sleep_forever()
    assert str(caught.value).endswith("exit code 2, and its last line was: no licence")


async def test_an_interpreter_that_is_gone_is_a_failed_start(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setattr("rollout.pool.local.FIRST_DELAY_SEC", 0.01)
    with pytest.raises(RolloutServerError, match="cannot be started: No such file"):
        async with PoolBackend(LocalWorkers("app.py:app", 1)).running():
            await trio.sleep_forever()


@pytest.mark.parametrize(
    ("count", "options"), [(0, {}), (1.5, {}), (True, {}), (1, {"silence_sec": math.inf})]
)
def test_settings_that_cannot_be(count, options):
    with pytest.raises(BackendConfigurationError, match="must be"):
        LocalWorkers("app.py:app", count, **options)
