"""Results that ended in the run's own server after the process of the run had died."""

from __future__ import annotations

import json
import signal
import subprocess
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import trio
from attrs import evolve
from evaluation.run.cases import (
    RUN_ID,
    TESTS,
    all_keys,
    config_of,
    keys,
    python,
    record,
    run_all,
    scripted,
)

from rollout.errors import EvaluationError
from rollout.evaluation import load_config, read_records
from rollout.evaluation.folder.journal import record_line
from rollout.evaluation.folder.layout import make_state
from rollout.evaluation.leftover import ended_ids, results_of, wait_released
from rollout.evaluation.opening import open_run
from rollout.evaluation.process import ServerRecord
from rollout.server.results import encode
from rollout.server.state import KeptRollout, SQLiteStore, ended_by_restart
from rollout.types import MODEL_KEY, RolloutErrorCategory, RolloutResultResponse, RolloutStatus

APP = """
    import os
    import trio
    from rollout.context import get_rollout_context
    from support import Script, local_backend, make_app

    class Workflow(Script):
        async def run(self, ctx):
            with open("ran", "a") as file:
                file.write(get_rollout_context().rollout_id + "\\n")
            if "stay" in ctx.prompt[0] and not os.path.exists("resumed"):
                with open("pid", "w") as file:
                    file.write(str(os.getpid()))
                os.rename("pid", "stays")
                await trio.sleep_forever()
            return await super().run(ctx)

    app = make_app(local_backend(Workflow, max_concurrent=None))
"""

# Kills itself, and maybe the server first, once two attempts have ended that it has not recorded,
# while the agent of a third one runs.
KILLED = """
import os, signal, sys, threading, time
import trio
import rollout.evaluation.run as run
from rollout.evaluation import evaluate, load_config

both = threading.Barrier(2)

def keep_attempt(*_):
    if not both.wait():
        while not os.path.exists("stays"):
            time.sleep(0.01)
        if sys.argv[1] == "server":
            os.kill(int(open("stays").read()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

run.keep_attempt = keep_attempt

async def main():
    async with evaluate(load_config("eval.toml")) as running:
        async for _ in running:
            pass

trio.run(main)
"""

CONFIG = """
[server]
app = "own_app.py:app"
[chat]
url = "http://127.0.0.1:9/v1"
[dataset]
path = "rows.jsonl"
[run]
output = "out"
max_in_flight = 3
"""


@pytest.mark.parametrize("killed", ["server", "run"])
async def test_what_ended_in_the_server_of_a_killed_run_is_not_run_again(
    tmp_path, monkeypatch, killed
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    Path("own_app.py").write_text(textwrap.dedent(APP))
    Path("eval.toml").write_text(CONFIG)
    rows = [*scripted(2), *scripted(1, stay=True)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with python(KILLED, killed) as process:
        assert await trio.to_thread.run_sync(process.wait) == -signal.SIGKILL
    assert list(read_records(Path("out"))) == []
    before = Path("ran").read_text().split()
    assert len(before) == 3

    Path("resumed").touch()
    run, records = await run_all(load_config("eval.toml"))
    assert keys(records) == all_keys(3)
    assert run.metrics.results.attempts.passed == 3
    ran = Counter(each.split("-")[2] for each in Path("ran").read_text().split())
    assert ran == {"0": 1, "1": 1, "2": 2}
    assert {record.rollout_id for record in records if record.row < 2} < set(before)
    assert all(record.agent_started_at is not None for record in records)
    document = json.loads((run.folder / "trajectories" / "0-0-0.json").read_text())
    assert document["steps"][-1]["message"] == "42"
    assert not (run.folder / "state").exists()


def rollout_id(row: int, attempt: int = 0, token: str = "00ff") -> str:
    return f"{RUN_ID}-{row}-{attempt}-{token}"


def kept(number: int, result: RolloutResultResponse) -> KeptRollout:
    row = KeptRollout(number, result.rollout_id, b"digest")
    return row._replace(status=str(result.status), until=900.0, body=encode(result))


def failure(row: int, category: RolloutErrorCategory) -> RolloutResultResponse:
    status = RolloutStatus.FAILURE
    return RolloutResultResponse(
        rollout_id=rollout_id(row), status=status, err_message="no", err_category=category
    )


async def state_with(path: Path, *rows: KeptRollout) -> Path:
    store = SQLiteStore(path)
    await store.open()
    await store.commit(rows, 0.0)
    await store.close()
    return path


async def test_what_was_cut_short_is_not_a_result(tmp_path):
    cancelled = RolloutResultResponse(rollout_id=rollout_id(1), status=RolloutStatus.CANCELLED)
    another = RolloutResultResponse(rollout_id="another-2-0-00", status=RolloutStatus.SUCCESS)
    agent = failure(0, RolloutErrorCategory.AGENT_ERROR)
    refused_key = evolve(failure(6, RolloutErrorCategory.AGENT_ERROR), err_source=MODEL_KEY)
    state = await state_with(
        tmp_path / "state",
        kept(1, agent),
        kept(2, cancelled),
        kept(3, another),
        kept(4, failure(3, RolloutErrorCategory.LEASE_EXPIRED)),
        ended_by_restart(KeptRollout(5, rollout_id(4), b"digest"), 900.0),
        KeptRollout(6, rollout_id(5), b"digest"),
        kept(7, refused_key),
    )
    ids = ended_ids(state)
    assert rollout_id(0) in ids
    assert not ids & {rollout_id(1), rollout_id(5)}
    assert list(results_of(state, RUN_ID, ids)) == [((0, 0), agent)]
    assert list(results_of(state, RUN_ID, ids - {rollout_id(0)})) == []
    await wait_released(state)


@pytest.fixture
async def left(tmp_path):
    """The config of a run with one attempt that has ended in its server and is not on record."""
    app = tmp_path / "own_app.py"
    app.touch()
    config = config_of(tmp_path, server={"app": f"{app}:app"}, rows=scripted(1))
    config.run.output.mkdir()
    opened = await open_run(config, fresh=False, retry_failed=False)
    assert opened.leftover == {}
    result = failure(0, RolloutErrorCategory.AGENT_ERROR)
    result.rollout_id = f"{opened.manifest['run_id']}-0-0-00ff"
    await state_with(make_state(config.run.output), kept(1, result))
    return config, result


async def test_a_result_is_left_until_it_is_on_record(left):
    config, result = left
    opened = await open_run(config, fresh=False, retry_failed=False)
    assert opened.leftover == {(0, 0): result}
    line = record_line(record(outcome="failure", rollout_id=result.rollout_id))
    with (config.run.output / "events.jsonl").open("ab") as journal:
        journal.write(line)
    opened = await open_run(config, fresh=False, retry_failed=True)
    assert opened.leftover == {}


async def test_results_of_other_inputs_are_dropped(left):
    config, _ = left
    other = evolve(config, chat=evolve(config.chat, model="other"))
    opened = await open_run(other, fresh=False, retry_failed=False)
    assert opened.leftover == {}
    assert not (config.run.output / "state").exists()


async def test_a_fresh_run_moves_the_state_to_the_archive(left):
    config, _ = left
    opened = await open_run(config, fresh=True, retry_failed=False)
    assert opened.leftover == {}
    (state,) = (config.run.output / "archive").glob("*/state/rollouts")
    assert len(ended_ids(state)) == 1


async def test_a_state_that_is_damaged_is_left_alone(left):
    config, _ = left
    state = config.run.output / "state" / "rollouts"
    state.write_bytes(b"no database" * 1000)
    with pytest.raises(EvaluationError, match=r"cannot be read.*remove the folder .*/out/state to"):
        await open_run(config, fresh=False, retry_failed=False)
    assert state.read_bytes() == b"no database" * 1000


async def test_a_link_in_place_of_the_lock_is_refused(left):
    config, _ = left
    lock = config.run.output / "state" / "rollouts-lock"
    lock.unlink()
    lock.symlink_to("elsewhere")
    with pytest.raises(EvaluationError, match=r"^the lock of .*/out/state/rollouts: "):
        await open_run(config, fresh=False, retry_failed=False)


# --- a server that does not end ---------------------------------------------------------------

BLOCKING = """
    import os
    import time
    from support import Script, local_backend, make_app

    class Workflow(Script):
        async def run(self, ctx):
            if not os.path.exists("resumed"):
                with open("pid", "w") as file:
                    file.write(str(os.getpid()))
                os.rename("pid", "stays")
                time.sleep(600)
            return await super().run(ctx)

    app = make_app(local_backend(Workflow, max_concurrent=None), watchdog_sec=None)
"""

KILLED_AT_ONCE = """
import os, signal, threading, time
import trio
from rollout.evaluation import evaluate, load_config

def kill():
    while not os.path.exists("stays"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    threading.Thread(target=kill).start()
    async with evaluate(load_config("eval.toml")) as running:
        async for _ in running:
            pass

trio.run(main)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="there is no /proc here")
async def test_a_server_that_code_of_users_blocks_is_ended(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr("rollout.evaluation.leftover._ENDS_SEC", 1.0)
    Path("own_app.py").write_text(textwrap.dedent(BLOCKING))
    Path("eval.toml").write_text(CONFIG)
    Path("rows.jsonl").write_text(json.dumps(scripted(1)[0]) + "\n")
    with python(KILLED_AT_ONCE) as process:
        assert await trio.to_thread.run_sync(process.wait) == -signal.SIGKILL
    pid = int(Path("stays").read_text())
    assert ServerRecord.read(Path("out/state/server.json")) == ServerRecord.of_process(pid)

    Path("resumed").touch()
    run, records = await run_all(load_config("eval.toml"))
    assert keys(records) == [(0, 0)]
    assert run.complete
    assert ServerRecord.of_process(pid) is None
    assert "the server of the process before did not end, so it is killed" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="there is no /proc here")
async def test_a_process_with_the_same_pid_is_let_alone(tmp_path):
    with python("input()", stdin=subprocess.PIPE) as innocent:
        own = ServerRecord.of_process(innocent.pid)
        assert own is not None
        assert own.runs
        evolve(own, started=own.started + "0").write(tmp_path / "server.json")
        await wait_released(tmp_path / "rollouts")
        assert innocent.poll() is None
        innocent.communicate("\n")
    assert not own.runs
    own.kill()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": true, "started": "x"}', '{"pid": 1}'])
async def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "server.json").write_text(text)
    with pytest.raises(EvaluationError, match=r"server\.json is damaged; remove it"):
        await wait_released(tmp_path / "rollouts")
