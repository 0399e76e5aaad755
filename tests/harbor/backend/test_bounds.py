"""What of a trial may hang: its environment's start, its agent's setup, its environment's stop."""

from __future__ import annotations

import json

import pytest
import trio

from rollout.client.admission import Progress
from rollout.types import RolloutErrorCategory, RolloutInitRequest, RolloutStatus

VARIANTS = "trial_variants:"

pytestmark = [pytest.mark.harbor, pytest.mark.usefixtures("no_key_is_left")]


def harbor_note(tmp_path, rollout_id="r"):
    return json.loads((tmp_path / "kept" / rollout_id / "diagnostics.json").read_text())["harbor"]


def timed_out(result):
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.TIMEOUT
    return result.err_message


@pytest.mark.parametrize("kind", ["HangingStart", "DeafStart"])
async def test_a_deadline_that_passes_while_the_environment_starts(
    make_task, make_backend, serving, reached, tmp_path, kind
):
    make_task()
    backend = make_backend(kind=VARIANTS + kind, max_concurrent=1)
    async with serving(backend) as rollouts:
        event = reached(backend)
        with trio.fail_after(120):
            result = await rollouts.run(label="42", agent_timeout_sec=3)
            await event.wait()
        assert backend.health()["concurrency"]["running"] == 0
    message = timed_out(result)
    assert message == "agent exceeded its deadline of 3 s, while its environment was set up"
    assert result.agent_started_at is None
    assert result.sample is None
    assert list((tmp_path / "trials").iterdir()) == []


async def test_a_deadline_that_passes_while_the_agent_is_set_up(
    make_task, make_backend, serving, monkeypatch, tmp_path
):
    from harbor.agents.oracle import OracleAgent

    make_task()
    event, backend = trio.Event(), make_backend()

    async def setup(self, environment):
        backend.bridge.call_trio_soon(event.set)
        await environment.exec("sleep 3600")

    monkeypatch.setattr(OracleAgent, "setup", setup)
    async with serving(backend) as rollouts:
        with trio.fail_after(120):
            result = await rollouts.run(label="42", agent_timeout_sec=3)
            await event.wait()
    assert timed_out(result).endswith("while its environment was set up")
    assert result.agent_started_at is None
    assert list((tmp_path / "trials").iterdir()) == []


class Started(Progress):
    """Sets an event when the agent could start."""

    def __init__(self):
        super().__init__()
        self.event = trio.Event()

    def hear(self, result):
        super().hear(result)
        if result.agent_started_at is not None:
            self.event.set()


@pytest.mark.parametrize("end", ["confirmed", "cancelled", "deadline"])
async def test_an_agent_runs_once_its_start_is_confirmed(
    make_task, make_backend, serving, monkeypatch, end
):
    from harbor.agents.oracle import OracleAgent

    make_task()
    runs, progress, run = [], Started(), OracleAgent.run

    async def noted(self, *args, **kwargs):
        runs.append(end)
        return await run(self, *args, **kwargs)

    monkeypatch.setattr(OracleAgent, "run", noted)
    async with serving(make_backend()) as rollouts, trio.open_nursery() as nursery:

        async def decide():
            await progress.event.wait()
            if end == "confirmed":
                assert await rollouts.client._wire.start([progress.admission]) == {"r": 200}
            elif end == "cancelled":
                await rollouts.client.cancel_rollout("r")

        nursery.start_soon(decide)
        fields = {"confirm_start": True, "agent_timeout_sec": 5 if end == "deadline" else None}
        request = RolloutInitRequest(**rollouts._request("r", {"label": "42"} | fields))
        with trio.fail_after(120):
            result = await rollouts.client._run(request, progress)
        nursery.cancel_scope.cancel()
    assert result.status == {"confirmed": "success", "cancelled": "cancelled"}.get(end, "failure")
    assert (result.err_category == "timeout") == (end == "deadline")
    assert runs == (["confirmed"] if end == "confirmed" else [])


async def test_the_agent_gets_what_its_setup_leaves(make_task, make_backend, serving):
    """The whole deadline goes by, whatever part of it the setup takes."""
    make_task(solution="sleep 3600")
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42", agent_timeout_sec=3)
    assert timed_out(result) == (
        "AgentTimeoutError: agent exceeded its deadline of 3 s, counted from admission"
    )
    assert result.agent_started_at is not None


async def test_the_tasks_own_deadline_is_a_timeout_for_the_oracle_too(
    make_task, make_backend, serving
):
    """Which would count it itself, in whole seconds, and end with an error of its own."""
    make_task(solution="sleep 3600", agent_sec=1.5)
    async with serving(make_backend()) as rollouts:
        result = await rollouts.run(label="42")
    assert "1.5" in timed_out(result)


async def test_an_environment_that_does_not_stop_holds_nothing_up(
    make_task, make_backend, serving, reached, tmp_path, caplog
):
    make_task()
    backend = make_backend(kind=VARIANTS + "HangingStop", stop_timeout_sec=0.05)
    async with serving(backend) as rollouts:
        reached(backend)
        with trio.fail_after(120):
            result = await rollouts.run(label="42")
        (trial,) = (await rollouts.client.health())["unstopped"]
    assert result.sample.reward == 1.0
    note = harbor_note(tmp_path)
    assert note["trial"] == trial
    assert note["stop"] == "had not ended after 0.05 s and was given up"
    assert f"trial {trial}: its environment has not stopped within 0.05 s" in caplog.text


async def test_a_stop_that_outlives_its_rollout_is_named(
    make_task, make_backend, serving, pipe, reached, tmp_path
):
    make_task(solution=f"{pipe.say}; sleep 3600")
    backend = make_backend(
        kind=VARIANTS + "HangingStop", mounts=[pipe.mount], cancel_grace_sec=0.05
    )
    async with serving(backend) as rollouts:
        event = reached(backend)
        handle = await rollouts.start()
        await pipe.heard()
        await rollouts.client.cancel_rollout("r")
        result = await handle
        await event.wait()
        (trial,) = (await rollouts.client.health())["unstopped"]
    assert result.status is RolloutStatus.CANCELLED
    assert harbor_note(tmp_path)["stop"] == "was under way when the rollout ended"
    assert harbor_note(tmp_path)["trial"] == trial


async def test_a_stop_that_fails_does_not_cost_the_reward(
    make_task, make_backend, serving, tmp_path
):
    make_task()
    async with serving(make_backend(kind=VARIANTS + "FailingStop")) as rollouts:
        result = await rollouts.run(label="42")
        health = await rollouts.client.health()
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward == 1.0
    note = harbor_note(tmp_path)
    assert note["stop"] == "NamespaceError: the provider does not answer"
    assert note["errors"] == []
    assert health["unstopped"] == [note["trial"]]
