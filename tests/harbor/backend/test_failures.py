"""Trials that go wrong: what their rollouts are told, and that the rest goes on."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import threading

import pytest
import trio
from trial_support import KEY, TESTS, Chat, files_with

from rollout import RolloutContext
from rollout.errors import BackendConfigurationError
from rollout.types import RolloutErrorCategory, RolloutStatus

TIMEOUT = RolloutErrorCategory.TIMEOUT
AGENT_ERROR = RolloutErrorCategory.AGENT_ERROR
VALIDATION_ERROR = RolloutErrorCategory.VALIDATION_ERROR

pytestmark = [pytest.mark.harbor, pytest.mark.usefixtures("no_key_is_left")]


def failed(result, category):
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is category, result.err_message
    return result.err_message


def diagnostics(tmp_path, rollout_id="r"):
    return json.loads((tmp_path / "kept" / rollout_id / "diagnostics.json").read_text())


async def test_an_environment_that_does_not_start(make_task, make_backend, serving, tmp_path):
    make_task()
    async with serving(make_backend(kind="trial_variants:FailingStart")) as rollouts:
        result = await rollouts.run(label="42")
    message = failed(result, AGENT_ERROR)
    assert message == "NamespaceStartError: there is no room for another sandbox"
    assert result.agent_started_at is None
    assert diagnostics(tmp_path)["agent_started_at"] is None
    assert diagnostics(tmp_path)["phase"] == "running"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"import_path": "no_such_module:Environment"}, "there is no module 'no_such_module'"),
        ({"import_path": "trial_variants:NoSuch"}, "has no attribute 'NoSuch'"),
        ({"import_path": "json:loads"}, "json:loads is not a class"),
        ({"import_path": "broken_environment:Any"}, "division by zero"),
        ({"type": "namespace", "memory_enforcement_policy": "guarantee"}, "memory"),
    ],
)
async def test_an_environment_that_is_not_there_is_told_at_the_start(
    make_task, make_backend, environment, said, tmp_path, monkeypatch
):
    make_task()
    (tmp_path / "broken_environment.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = make_backend(environment=environment)
    with pytest.raises(BackendConfigurationError) as caught:
        async with backend.running():
            raise AssertionError("it runs")
    assert "environment" in str(caught.value)
    assert said in str(caught.value)


async def test_an_environment_that_starts_too_slowly(make_task, make_backend, serving, monkeypatch):
    import trial_variants

    monkeypatch.setattr(trial_variants, "reached", lambda: None)
    make_task(environment="build_timeout_sec = 0.3\n")
    async with serving(make_backend(kind="trial_variants:HangingStart")) as rollouts:
        result = await rollouts.run(label="42")
    assert "0.3" in failed(result, TIMEOUT)
    assert result.agent_started_at is None


async def test_an_agent_out_of_time(make_task, make_backend, serving):
    make_task(solution="sleep 3600 & sleep 3600")
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42", agent_timeout_sec=0.6)
    failed(result, TIMEOUT)
    # A slow machine spends it all before the agent starts.
    assert "Agent" in result.err_message or "agent exceeded" in result.err_message
    assert result.sample is None or result.sample.reward is None


async def test_an_agent_out_of_the_tasks_time(make_task, make_backend, serving):
    make_task(solution="sleep 3600", agent_sec=0.4)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert "0.4" in failed(result, TIMEOUT)
    assert result.agent_started_at is not None


async def test_time_in_the_queue_counts(make_task, make_backend, serving, pipe, tmp_path):
    make_task(solution=f"{pipe.say}; sleep 3600")
    backend = make_backend(max_concurrent=1, mounts=[pipe.mount])
    async with serving(backend) as rollouts:
        first = await rollouts.start("first")
        await pipe.heard()
        result = await rollouts.run("second", agent_timeout_sec=0.3)
        backend.cancel_rollouts(["first"])
        await first
    message = failed(result, TIMEOUT)
    assert message.startswith("agent exceeded its deadline of 0.3 s (")
    assert message.endswith("in the queue)")
    assert result.agent_started_at is None
    assert diagnostics(tmp_path, "second")["phase"] == "queued"


@pytest.mark.parametrize("seconds", [0, -1])
async def test_no_time_at_all(make_task, make_backend, serving, seconds, tmp_path):
    make_task()
    async with serving(make_backend()) as rollouts:
        agent = await rollouts.run("agent", label="42", agent_timeout_sec=seconds)
        grader = await rollouts.run("grader", label="42", grader_timeout_sec=seconds)
    assert failed(agent, TIMEOUT) == f"agent exceeded its deadline of {seconds} s"
    assert agent.agent_started_at is None
    failed(grader, TIMEOUT)
    assert grader.agent_started_at is not None
    assert len(list((tmp_path / "trials").iterdir())) == 1


async def test_a_task_that_takes_too_long_to_come(
    make_task, make_backend, serving, monkeypatch, tmp_path
):
    from rollout.backend.harbor.trial import execution

    async def fetch(task, workspace):
        await asyncio.Event().wait()

    make_task()
    monkeypatch.setattr(execution, "fetch_task", fetch)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42", agent_timeout_sec=0.3)
    assert failed(result, TIMEOUT) == "agent exceeded its deadline of 0.3 s"
    assert list((tmp_path / "trials").iterdir()) == []


async def test_a_verifier_out_of_time(make_task, make_backend, serving):
    make_task(tests=f"{TESTS}sleep 3600\n")
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42", grader_timeout_sec=0.6)
    assert "0.6" in failed(result, TIMEOUT)
    assert result.agent_started_at is not None
    assert result.sample.reward is None


NONZERO = """#!/usr/bin/python3
import pathlib, sys
pathlib.Path("/app/answer.txt").write_text("42")
sys.exit("this is where it stops")
"""


async def test_an_agent_that_fails_after_it_has_solved_the_task(
    make_task, make_backend, serving, tmp_path
):
    folder = make_task()
    program = folder / "environment" / "mini-swe-agent"
    program.write_text(NONZERO)
    program.chmod(0o755)
    environment = {
        "type": "namespace",
        "env": {"PATH": "/app:/usr/local/bin:/usr/bin:/bin"},
    }
    backend = make_backend(
        agent="mini-swe-agent",
        model="policy",
        agent_options={"skip_install": True},
        environment=environment,
    )
    with Chat("unused") as chat:
        async with serving(backend) as rollouts:
            result = await rollouts.run(label="42", chat_completions_url=chat.url)
    assert "NonZeroAgentExitCodeError" in failed(result, AGENT_ERROR)
    assert result.agent_started_at is not None
    note = diagnostics(tmp_path)["harbor"]
    assert note["errors"][0] == {"type": "NonZeroAgentExitCodeError", "in_verifier": False}
    assert note["rewards"] == {"reward": 1.0}
    assert "kept_in" in note


async def test_any_other_error_of_an_agent_that_has_solved_the_task(
    make_task, make_backend, serving, tmp_path, version, monkeypatch
):
    from harbor.agents.oracle import OracleAgent

    run = OracleAgent.run

    async def fail(self, **arguments):
        await run(self, **arguments)
        raise LookupError("and then this")

    make_task()
    monkeypatch.setattr(OracleAgent, "run", fail)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert failed(result, AGENT_ERROR) == "LookupError: and then this"
    assert result.sample.reward is None
    # Harbor grades after any error from 0.26 on.
    expected = {"reward": 1.0} if version >= (0, 26) else {}
    assert diagnostics(tmp_path)["harbor"]["rewards"] == expected


async def test_an_agent_that_raises(make_task, make_backend, serving, tmp_path):
    make_task()
    (tmp_path / "tasks/answer/solution/solve.sh").unlink()
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert "solve.sh" in failed(result, AGENT_ERROR)


async def test_a_hook_that_fails_costs_nothing(
    make_task, make_backend, serving, monkeypatch, caplog
):
    make_task()

    def refuse(self):
        raise RuntimeError("no clock")

    monkeypatch.setattr(RolloutContext, "mark_agent_started", refuse)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward == 1.0
    assert result.agent_started_at is None
    assert "no clock" in caplog.text


async def test_an_event_that_is_lost_costs_nothing(
    make_task, make_backend, serving, monkeypatch, caplog
):
    from rollout.integrations.asyncio_bridge import AsyncioBridge

    def refuse(self, fn, *args):
        raise RuntimeError("no way to trio")

    make_task()
    monkeypatch.setattr(AsyncioBridge, "call_trio_soon", refuse)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward == 1.0
    assert "the event AGENT_START of a trial was lost" in caplog.text


@pytest.mark.parametrize("name", ["settle", "facts_of"])
async def test_what_a_trial_left_that_cannot_be_read(
    make_task, make_backend, serving, monkeypatch, tmp_path, name
):
    from rollout.backend.harbor.trial import execution

    def fail(*_, **__):
        raise OSError("a disk that is full")

    make_task()
    monkeypatch.setattr(execution, name, fail)
    async with serving(make_backend(keep_failed_trials=False)) as rollouts:
        result = await rollouts.run(label="42")
    assert list((tmp_path / "trials").iterdir()) == []
    if name == "settle":
        assert result.sample.reward == 1.0
        assert result.sample.messages == [{"role": "user", "content": "What is 6 * 7?"}]
    else:
        assert "a disk that is full" in failed(result, AGENT_ERROR)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_a_trial_that_wants_to_end_the_process(
    make_task, make_backend, serving, monkeypatch, error
):
    from harbor.trial.trial import Trial

    create = Trial.create

    async def leave(config, **options):
        if config.trial_name.startswith("bad"):
            raise error
        return await create(config, **options)

    make_task()
    monkeypatch.setattr(Trial, "create", leave)
    async with serving(make_backend()) as rollouts:
        bad = await rollouts.run("bad", label="42")
        good = await rollouts.run("good", label="42")
    failed(bad, AGENT_ERROR)
    assert good.sample.reward == 1.0


async def test_the_key_is_in_no_message(
    make_task, make_backend, serving, caplog, capfd, monkeypatch
):
    from harbor.trial.trial import Trial

    async def refuse(config, **_):
        raise ValueError(f"no environment of the name {KEY}")

    make_task(solution="true", tests=TESTS)
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(Trial, "create", refuse)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert KEY not in failed(result, VALIDATION_ERROR)
    assert KEY not in caplog.text
    assert KEY not in "".join(capfd.readouterr())


async def test_more_than_the_queue_holds(make_task, make_backend, serving, pipe):
    make_task(solution=f"{pipe.say}; sleep 3600")
    backend = make_backend(max_concurrent=1, max_queue_depth=1, mounts=[pipe.mount])
    async with serving(backend) as rollouts:
        handles = [await rollouts.start(f"r-{number}") for number in range(2)]
        await pipe.heard()
        assert not backend.has_capacity()
        response = await rollouts.post("third")
        assert response.status_code == 429
        assert response.headers["retry-after"]
        backend.cancel_rollouts(["r-1"])
        await handles[1]
        third = await rollouts.start("third")
        backend.cancel_rollouts(all=True)
        assert (await third).status is RolloutStatus.CANCELLED


@pytest.mark.parametrize("how", ["hangs", "fails"])
@pytest.mark.parametrize(
    ("function", "step"),
    [("scrub_folder", "searching it for the key"), ("archive_trial", "archiving it")],
)
async def test_a_step_after_a_trial_costs_itself_and_not_the_sample(
    make_task, make_backend, serving, monkeypatch, tmp_path, function, step, how
):
    from rollout.backend.harbor.result import settle
    from rollout.backend.harbor.trial import execution

    released, original = threading.Event(), getattr(settle, function)

    def hang(*args, **options):
        released.wait()
        return original(*args, **options)

    def fail(*args, **options):
        raise RuntimeError("no luck")

    make_task(instruction="Answer this: {{ prompt }}")
    monkeypatch.setattr(settle, function, hang if how == "hangs" else fail)
    if how == "hangs":
        monkeypatch.setattr(execution, "_SETTLE_SEC", 0.2)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
        released.set()
        while rollouts.backend.runtime.threads.borrowed_tokens:
            await trio.lowlevel.checkpoint()
    assert result.sample.reward == 1.0
    assert result.sample.messages[0]["content"] == "Answer this: What is 6 * 7?"
    said = "took longer than 0.2 s and goes on" if how == "hangs" else "failed (RuntimeError)"
    assert diagnostics(tmp_path)["harbor"]["unsettled"] == f"{step} {said}"


@pytest.mark.parametrize("where", ["of ours", "of Harbor's"])
async def test_a_full_disk_is_no_fault_of_the_agent(
    make_task, make_backend, serving, monkeypatch, where
):
    from rollout.backend.harbor.namespace import NamespaceEnvironment
    from rollout.backend.harbor.trial import execution

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/trials/r-1")

    make_task()
    if where == "of ours":
        monkeypatch.setattr(execution, "make_workspace", full)
    else:
        monkeypatch.setattr(NamespaceEnvironment, "start", full)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    message = failed(result, RolloutErrorCategory.INTERNAL_ERROR)
    assert "No space left on device: '/trials/r-1'" in message


async def test_secrets_among_the_settings_stay_out_of_files(
    make_task, make_backend, serving, tmp_path
):
    make_task()
    backend = make_backend(
        agent_options={"extra": {"service_token": "of-the-operator-1"}},
        environment={"type": "namespace", "env": {"OTHER_API_KEY": "of-the-operator-2"}},
    )
    async with serving(backend) as rollouts:
        result = await rollouts.run(label="42")
    assert result.sample.reward == 1.0
    assert (tmp_path / "kept/r/harbor/config.json").is_file()
    assert files_with(tmp_path, "of-the-operator") == []


async def test_a_loop_that_is_gone_is_no_fault_of_the_agent(
    make_task, make_backend, serving, monkeypatch
):
    from harbor.trial.trial import Trial

    async def stop(config, **options):
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()

    make_task()
    monkeypatch.setattr(Trial, "create", stop)
    async with serving(make_backend()) as rollouts:
        assert (await rollouts.client.health())["status"] == "ok"
        first = await rollouts.run("first", label="42")
        second = await rollouts.run("second", label="42")
        health = await rollouts.client.health()
    failed(first, RolloutErrorCategory.INTERNAL_ERROR)
    failed(second, RolloutErrorCategory.INTERNAL_ERROR)
    assert health["status"] == "failed"
    assert health["problem"]


@pytest.mark.parametrize(
    "rollout_id", ["-rf", "a" * 300, "\N{SNOWMAN} ~$(id)", "%2e%2e", ".hidden"]
)
async def test_any_id(make_task, make_backend, serving, tmp_path, rollout_id):
    make_task()
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(rollout_id, label="42")
    assert result.err_message is None
    assert result.sample.reward == 1.0
    (kept,) = (tmp_path / "kept").iterdir()
    assert json.loads((kept / "diagnostics.json").read_text())["rollout_id"] == rollout_id
