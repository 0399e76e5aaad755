"""A rollout server that is started for the run: how it comes, dies and goes."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest
import trio
from evaluation.run.cases import TESTS, all_keys, config_of, keys, python, run_all, scripted

from rollout.errors import EvaluationError, EvaluationStoppedError
from rollout.evaluation import evaluate, read_records
from rollout.evaluation.server import server_process

APP = """
    import os, signal, sys, time
    from contextlib import asynccontextmanager
    from support import Script, local_backend, make_app

    print("printed while it starts")
    print("listening on port 5555 for metrics")

    class Workflow(Script):
        async def run(self, ctx):
            script = ctx.prompt[0]
            if "kill" in script:
                print("last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if "model" in script:
                script = ctx.prompt[0] = {**script, "answer": os.environ.get("ROLLOUT_MODEL", "-")}
            if "print" in script:
                print("x" * script["print"], flush=True)
            if "say" in script:
                print(script["say"], file=sys.stderr, flush=True)
            if "pid" in script:
                with open(script["pid"], "w") as file:
                    file.write(str(os.getpid()))
                os.rename(script["pid"], script["pid"] + ".done")
            return await super().run(ctx)

    app = make_app(local_backend(Workflow, max_concurrent=None))
    locked = make_app(api_key=os.environ.get("OWN_KEY", "other"))
    @asynccontextmanager
    async def no_weights(_):
        raise RuntimeError("no weights")
        yield

    broken = make_app(lifespan=no_weights)

    @asynccontextmanager
    async def stays(_):
        yield
        time.sleep(600)

    stubborn = make_app(local_backend(Workflow), lifespan=stays, watchdog_sec=None)

    def chatty():
        @asynccontextmanager
        async def lifespan(_):
            yield
            print("y" * 200_000, flush=True)
        return make_app(local_backend(Workflow), lifespan=lifespan)
"""


@pytest.fixture(autouse=True)
def app(tmp_path, monkeypatch):
    """A file with an application, whose modules are found."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    # As for a user: what an application prints does not come in time by the variable's grace.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    file = tmp_path / "own_app.py"
    file.write_text(textwrap.dedent(APP))
    return file


def answer(run, name: str) -> str:
    """What the agent said in the end."""
    document = json.loads((run.folder / "trajectories" / f"{name}.json").read_text())
    return document["steps"][-1]["message"]


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until_gone(pid: int) -> None:
    with trio.fail_after(60):
        while not gone(pid):
            await trio.sleep(0.02)


async def test_whole_run(tmp_path, app):
    rows = [*scripted(3), *scripted(1, model=True), *scripted(1, print=300_000)]
    config = config_of(
        tmp_path,
        server={"app": f"{app}:app"},
        rows=rows,
        max_in_flight=2,
        chat={"model": "the-model"},
    )
    run, records = await run_all(config)
    assert keys(records) == all_keys(5)
    assert run.complete
    assert run.metrics.results.attempts.passed == 4
    assert answer(run, "3-0-0") == "the-model"
    log = (run.folder / "server.log").read_text()
    assert "printed while it starts" in log
    assert "x" * 300_000 in log
    assert (await run_all(config))[1] == []


async def test_without_a_model_there_is_none(tmp_path, app, monkeypatch):
    monkeypatch.delenv("ROLLOUT_MODEL", raising=False)
    config = config_of(tmp_path, server={"app": f"{app}:app"}, rows=scripted(1, model=True))
    run, _ = await run_all(config)
    assert answer(run, "0-0-0") == "-"


@pytest.fixture
def lenient_umask():
    before = os.umask(0)
    yield
    os.umask(before)


async def test_no_key_gets_into_the_log(tmp_path, app, monkeypatch):
    monkeypatch.setenv("OWN_CHAT_KEY", "sk-of-the-chat")
    chat = {"url": "http://me:pw-of-url@127.0.0.1:9/v1", "api_key_env": "OWN_CHAT_KEY"}
    rows = scripted(1, say="sk-of-the-chat and http://me:pw-of-url@127.0.0.1:9/v1")
    run, _ = await run_all(config_of(tmp_path, server={"app": f"{app}:app"}, rows=rows, chat=chat))
    log = (run.folder / "server.log").read_text()
    assert "[redacted] and http://[redacted]127.0.0.1:9/v1" in log
    assert "of-the-chat" not in log
    assert "pw-of-url" not in log


async def test_the_folder_is_private_and_has_artifacts(tmp_path, app, monkeypatch, lenient_umask):
    monkeypatch.delenv("ROLLOUT_ARTIFACT_ROOT")
    config = config_of(tmp_path, server={"app": f"{app}:app"}, rows=scripted(2))
    run, records = await run_all(config)
    paths = [run.folder, *run.folder.rglob("*")]
    assert {path.name for path in paths} >= {"server.log", "events.jsonl", ".lock", "report.html"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    kept = {path.name for path in (run.folder / "rollouts").iterdir()}
    assert kept == {record.rollout_id for record in records}


async def test_a_root_of_the_environment_goes_before_the_runs(tmp_path, app, monkeypatch):
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path / "elsewhere"))
    config = config_of(tmp_path, server={"app": f"{app}:app"}, rows=scripted(1))
    run, _ = await run_all(config)
    assert not (run.folder / "rollouts").exists()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


async def test_its_key(tmp_path, app, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "the-key")
    config = config_of(
        tmp_path, server={"app": f"{app}:locked", "api_key_env": "OWN_KEY"}, rows=scripted(2)
    )
    run, _ = await run_all(config)
    assert run.metrics.results.attempts.passed == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing", "nothing"), ("broken", "no weights"), ("app", None)],
)
async def test_one_that_does_not_start(tmp_path, app, name, words):
    if words is None:
        app.write_text("this is no Python")
        words = "invalid syntax"
    config = config_of(tmp_path, server={"app": f"{app}:{name}"}, rows=scripted(2))
    with pytest.raises(EvaluationError, match="the rollout server did not start: ") as caught:
        await run_all(config)
    assert words in str(caught.value)
    assert "server.log" in str(caught.value)
    assert list(read_records(config.run.output)) == []


@pytest.mark.parametrize(
    ("says", "words"), [("", "it wrote nothing"), ("a line\\n" * 1000 + "no licence", "no licence")]
)
async def test_the_reason_is_none_of_an_earlier_server(tmp_path, app, says, words):
    """One that writes nothing to stderr, and its last words at once; the log goes on for ever."""
    log = tmp_path / "server.log"
    log.write_text("the last line of an earlier one\n")
    app.write_text(f"import os\nprint('{says}')\nos._exit(3)")
    with pytest.raises(EvaluationError, match=rf"not start: {words} \(exit code 3"):
        async with server_process(f"{app}:app", log=log, state=tmp_path / "state", environment={}):
            pytest.fail("it started")


async def test_one_that_dies_in_the_middle(tmp_path, app, caplog):
    """Whatever its death does to attempts, they are no failures and run again."""
    rows = [*scripted(3), *scripted(1, kill=True), *scripted(20, sleep=600)]
    config = config_of(tmp_path, server={"app": f"{app}:app"}, rows=rows, max_in_flight=4)
    with pytest.raises(EvaluationStoppedError) as caught:
        await run_all(config)
    assert "the rollout server of the run ended: it was killed by SIGKILL" in str(caught.value)
    assert "last words" not in str(caught.value)  # which are no reason
    assert "last words" in (config.run.output / "server.log").read_text()
    recorded = list(read_records(config.run.output))
    assert set(keys(recorded)) <= set(all_keys(3))
    assert all(record.outcome == "success" for record in recorded)
    assert not [entry for entry in caplog.records if entry.name.startswith("rollout.evaluation")]


async def test_one_with_workers_outlives_one_of_them(tmp_path, app):
    rows = [*scripted(1, kill=True), *scripted(3), *scripted(1, model=True)]
    server = {"app": f"{app}:app", "workers": 2}
    chat = {"model": "the-model"}
    config = config_of(tmp_path, server=server, rows=rows, chat=chat, max_in_flight=1)
    run, records = await run_all(config)
    assert run.complete
    assert keys(records) == all_keys(5)
    (killed,) = (record for record in records if record.row == 0)
    assert killed.err_source == "worker_lost"
    assert killed.infrastructure
    assert answer(run, "4-0-0") == "the-model"
    log = (run.folder / "server.log").read_text()
    assert re.search("^worker [12]: last words$", log, re.MULTILINE)


async def test_it_is_gone_when_the_block_is_left(tmp_path, app):
    pid_file = tmp_path / "pid"
    rows = [*scripted(1, pid=str(pid_file)), *scripted(5, sleep=600)]
    config = config_of(tmp_path, server={"app": f"{app}:app"}, rows=rows, max_in_flight=3)
    with trio.CancelScope() as scope:
        async with evaluate(config) as run:
            await anext(aiter(run))
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert gone(int((tmp_path / "pid.done").read_text()))


async def test_one_that_does_not_end_is_killed(tmp_path, app, monkeypatch):
    monkeypatch.setattr("rollout.evaluation.server._STOP_SEC", 0.2)
    pid_file = tmp_path / "pid"
    config = config_of(
        tmp_path, server={"app": f"{app}:stubborn"}, rows=scripted(1, pid=str(pid_file))
    )
    with trio.fail_after(60):
        run, _ = await run_all(config)
    assert run.complete
    assert gone(int((tmp_path / "pid.done").read_text()))


async def test_what_it_prints_at_the_end_does_not_hold_it(tmp_path, app):
    config = config_of(tmp_path, server={"app": f"{app}:chatty"}, rows=scripted(1))
    run, _ = await run_all(config)
    assert "y" * 200_000 in (run.folder / "server.log").read_text()


EVALUATE = """
import sys
from pathlib import Path
import trio
from evaluation.run.cases import config_of
from rollout.evaluation import evaluate

async def main():
    folder = Path(sys.argv[1])
    config = config_of(folder, server={"app": f"{folder}/own_app.py:app"}, max_in_flight=3)
    async with evaluate(config) as run:
        async for record in run:
            print(record.row, flush=True)

trio.run(main)
"""


async def test_it_goes_with_a_process_that_is_killed(tmp_path, app):
    config = config_of(
        tmp_path,
        server={"app": f"{app}:app"},
        rows=[*scripted(1, pid=str(tmp_path / "pid")), *scripted(5, sleep=600)],
    )
    with python(EVALUATE, str(tmp_path), stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    await until_gone(int((tmp_path / "pid.done").read_text()))
    assert keys(read_records(config.run.output)) == [(0, 0)]


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="there is no list of descriptors here")
async def test_a_start_that_is_cancelled_leaves_no_descriptor_open(tmp_path, app):
    before = set(Path("/dev/fd").iterdir())
    with trio.CancelScope() as scope:
        scope.cancel()
        async with server_process(
            f"{app}:app", log=tmp_path / "log", state=tmp_path / "state", environment={}
        ):
            pytest.fail("it was not started")
    assert set(Path("/dev/fd").iterdir()) == before


async def test_log_that_cannot_be_written(tmp_path, app):
    (tmp_path / "log").mkdir()
    with pytest.raises(EvaluationError, match="directory"):
        async with server_process(
            f"{app}:app", log=tmp_path / "log", state=tmp_path / "state", environment={}
        ):
            pytest.fail("it has no log")


async def test_interpreter_that_is_gone(tmp_path, app, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(EvaluationError, match=r"cannot be started: .*No such file"):
        async with server_process(
            f"{app}:app", log=tmp_path / "log", state=tmp_path / "state", environment={}
        ):
            pytest.fail("it was not started")


async def test_errors_of_the_block_come_out_as_they_are(tmp_path, app):
    cause, error = KeyError("cause"), LookupError("mine")
    with pytest.raises(LookupError) as caught:
        async with server_process(
            f"{app}:app", log=tmp_path / "log", state=tmp_path / "state", environment={}
        ) as url:
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{url}/health")).status_code == 200
            raise error from cause
    assert caught.value is error
    assert error.__cause__ is cause
