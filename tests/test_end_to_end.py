"""The main job, over real HTTP on loopback."""

from __future__ import annotations

import pytest
from support import CHAT_URL, fresh_id, make_app, prompt, served

from rollout.client import RolloutClient, RolloutHandleCancelled
from rollout.types import RolloutErrorCategory, RolloutStatus


async def test_a_graded_rollout_gets_its_reward():
    async with served(make_app()) as url, RolloutClient(url=url) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, fresh_id(), label="42")
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample is not None
    assert result.sample.reward == 1.0
    assert result.sample.messages[-1]["content"] == "42"
    assert result.agent_started_at is not None
    assert result.err_message is None


async def test_a_handle_goes_through_the_phases():
    async with served(make_app()) as url, RolloutClient(url=url) as client:
        handle = await client.run_rollout_async(
            prompt(sleep=0.05),
            CHAT_URL,
            fresh_id(),
            label="42",
            metadata={"grader": {"sleep": 0.05}},
        )
        statuses = [status async for status in handle.statuses()]
        assert await handle is await handle.wait_for_completion()
    assert statuses == ["queued", "running", "grading", "success"]
    assert handle.latest_result == await handle


async def test_a_failing_workflow_is_a_failure_with_its_message():
    async with served(make_app()) as url, RolloutClient(url=url) as client:
        result = await client.run_rollout(
            prompt(**{"raise": "boom"}), CHAT_URL, fresh_id(), label=""
        )
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.AGENT_ERROR
    assert result.err_message == "boom"


async def test_cancelling_on_the_server_and_locally_are_different_things():
    async with served(make_app()) as url, RolloutClient(url=url) as client:
        on_server = await client.run_rollout_async(prompt(sleep=60), CHAT_URL, "s", label="42")
        locally = await client.run_rollout_async(prompt(sleep=60), CHAT_URL, "l", label="42")
        await on_server.wait_for_running()
        await locally.wait_for_running()
        answer = await client.cancel_rollout("s")
        assert answer.dispositions == {"s": "cancelled_running"}
        assert (await on_server).status is RolloutStatus.CANCELLED
        assert locally.cancel() is True
        with pytest.raises(RolloutHandleCancelled):
            await locally
        assert (await client.health())["lifecycle"]["active_rollouts"] == 1
