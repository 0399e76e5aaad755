"""Cancelled rollouts: where they were, what is said of it, and that nothing is left."""

from __future__ import annotations

import json

import pytest
import trio
from trial_support import KEY, TESTS

from rollout import ExecutionRequest, RolloutContext
from rollout.types import RolloutStatus

VARIANTS = "trial_variants:"

pytestmark = [pytest.mark.harbor, pytest.mark.usefixtures("no_key_is_left")]


async def cancelled(rollouts, handle, disposition):
    found = await rollouts.client.cancel_rollout(handle.rollout_id)
    assert found.dispositions == {handle.rollout_id: disposition}
    result = await handle
    assert result.status is RolloutStatus.CANCELLED
    assert result.err_category is None
    return result


def diagnostics(tmp_path, rollout_id="r"):
    return json.loads((tmp_path / "kept" / rollout_id / "diagnostics.json").read_text())


async def test_in_the_queue(make_task, make_backend, serving, pipe, tmp_path):
    make_task(solution=f"{pipe.say}; sleep 3600")
    async with serving(make_backend(max_concurrent=1, mounts=[pipe.mount])) as rollouts:
        first = await rollouts.start("first")
        await pipe.heard()
        second = await rollouts.start("second")
        health = await rollouts.client.health()
        assert health["concurrency"] == {"max_concurrent": 1, "queued": 1, "running": 1}
        result = await cancelled(rollouts, second, "cancelled_queued")
        assert result.err_message == "cancelled while it waited for a slot"
        assert result.agent_started_at is None
        await cancelled(rollouts, first, "cancelled_running")
    assert diagnostics(tmp_path, "second")["status"] == "cancelled"
    assert diagnostics(tmp_path, "second")["phase"] == "queued"


async def test_while_the_environment_starts(make_task, make_backend, serving, reached, tmp_path):
    make_task()
    backend = make_backend(kind=VARIANTS + "HangingStart")
    async with serving(backend) as rollouts:
        event = reached(backend)
        handle = await rollouts.start()
        await event.wait()
        result = await cancelled(rollouts, handle, "cancelled_running")
    assert result.err_message == "cancelled while its environment was set up"
    assert result.agent_started_at is None
    assert list((tmp_path / "trials").iterdir()) == []


async def test_while_the_agent_runs(make_task, make_backend, serving, pipe, tmp_path):
    make_task(solution=f"{pipe.say}; sleep 3600 & sleep 3600")
    async with serving(make_backend(mounts=[pipe.mount])) as rollouts:
        handle = await rollouts.start()
        await pipe.heard()
        result = await cancelled(rollouts, handle, "cancelled_running")
    assert result.err_message == "cancelled while its agent ran"
    assert result.agent_started_at is not None
    assert list((tmp_path / "trials").iterdir()) == []
    assert diagnostics(tmp_path)["harbor"]["errors"] == [
        {"type": "CancelledError", "in_verifier": False}
    ]


async def test_while_the_verifier_runs(make_task, make_backend, serving, pipe, tmp_path):
    make_task(tests=f"{TESTS}{pipe.say}; sleep 3600\n")
    async with serving(make_backend(mounts=[pipe.mount])) as rollouts:
        handle = await rollouts.start(label="42")
        await pipe.heard()
        await handle.wait_for_grading()
        result = await cancelled(rollouts, handle, "cancelled_running")
    assert result.err_message == "cancelled while its verifier ran"
    assert result.agent_started_at is not None
    assert result.sample.messages[0]["content"].startswith("What is 6 * 7?")
    assert result.sample.reward is None
    assert list((tmp_path / "trials").iterdir()) == []


async def test_in_the_agent_of_a_second_step(make_task, make_backend, serving, pipe):
    folder = make_task("stepped", tests=None)
    with (folder / "task.toml").open("a") as file:
        file.write('[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for name, solution in (("one", "true"), ("two", f"{pipe.say}; sleep 3600")):
        step = folder / "steps" / name
        for part in ("solution", "tests"):
            (step / part).mkdir(parents=True)
        (step / "instruction.md").write_text(f"Step {name}.\n")
        (step / "solution/solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
        (step / "tests/test.sh").write_text(TESTS)
    backend = make_backend(tasks_dir=make_task.folder, task_mode="dataset", mounts=[pipe.mount])
    async with serving(backend) as rollouts:
        handle = await rollouts.start(metadata={"harbor_task_id": "stepped"})
        await pipe.heard()
        result = await cancelled(rollouts, handle, "cancelled_running")
    assert result.err_message == "cancelled while its agent ran"


async def test_an_environment_that_does_not_stop_gets_a_grace_period(
    make_task, make_backend, serving, pipe, reached
):
    make_task(solution=f"{pipe.say}; sleep 3600")
    backend = make_backend(
        kind=VARIANTS + "HangingStop", mounts=[pipe.mount], cancel_grace_sec=0.05
    )
    async with serving(backend) as rollouts:
        event = reached(backend)
        handle = await rollouts.start()
        await pipe.heard()
        result = await cancelled(rollouts, handle, "cancelled_running")
        await event.wait()
    assert result.err_message == "cancelled while its agent ran"


async def test_all_of_them_by_a_prefix(make_task, make_backend, serving, pipe):
    make_task(solution=f"{pipe.say}; sleep 3600")
    backend = make_backend(max_concurrent=1, mounts=[pipe.mount])
    async with serving(backend) as rollouts:
        handles = [await rollouts.start(f"group-{number}") for number in range(3)]
        await pipe.heard()
        other = await rollouts.start("other")
        assert backend.cancel_rollouts(prefix="group-") == {
            "group-0": "cancelled_running",
            "group-1": "cancelled_queued",
            "group-2": "cancelled_queued",
        }
        assert [(await handle).status for handle in handles] == [RolloutStatus.CANCELLED] * 3
        await pipe.heard()
        assert backend.cancel_rollouts(["other", "no-such"]) == {
            "other": "cancelled_running",
            "no-such": "not_found",
        }
        assert (await other).status is RolloutStatus.CANCELLED


async def test_a_cancel_scope_around_execute(make_task, make_backend, pipe, tmp_path):
    make_task(solution=f"{pipe.say}; sleep 3600")
    backend = make_backend(mounts=[pipe.mount])
    request = ExecutionRequest(id="r", prompt=[{"role": "user", "content": "x"}], grade=False)
    async with backend.running():
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def run():
                    with RolloutContext(api_key=KEY, rollout_id="r"):
                        await backend.execute(request)

                nursery.start_soon(run)
                await pipe.heard()
                assert backend.rollout_status("r") == {"status": "running"}
                scope.cancel()
        assert scope.cancelled_caught
        assert backend.rollout_status("r") is None
    assert diagnostics(tmp_path)["status"] == "cancelled"
    assert list((tmp_path / "trials").iterdir()) == []


async def test_before_the_trial_has_begun(make_task, make_backend, serving, monkeypatch, tmp_path):
    """Harbor says nothing of such a trial: there is no event, and no result."""
    from harbor.trial.trial import Trial

    make_task()
    event, backend = trio.Event(), make_backend()

    async def create(config, **_):
        import asyncio

        (config.trials_dir / config.trial_name).mkdir(parents=True)
        backend.bridge.call_trio_soon(event.set)
        await asyncio.Event().wait()

    async with serving(backend) as rollouts:
        monkeypatch.setattr(Trial, "create", create)
        handle = await rollouts.start(label="42")
        await event.wait()
        result = await cancelled(rollouts, handle, "cancelled_queued")
    assert result.err_message == "cancelled while its trial was set up"
    assert list((tmp_path / "trials").iterdir()) == []
