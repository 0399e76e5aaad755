"""Rollouts to their reward, over the wire."""

from __future__ import annotations

from trial_support import KEY, files_with

from rollout.types import RolloutStatus


async def test_the_oracle_on_a_template(make_task, make_backend, serving, tmp_path):
    make_task()
    async with serving(make_backend()) as rollouts:
        handle = await rollouts.start(label="42")
        seen = [status async for status in handle.statuses()]
        result = await handle
        health = await rollouts.client.health()
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert result.sample.reward == 1.0
    assert result.sample.label == "42"
    assert result.sample.messages == [{"role": "user", "content": "What is 6 * 7?\n"}]
    assert seen[-1] is RolloutStatus.SUCCESS
    assert health["agent"] == "oracle"
    assert health["concurrency"] == {"max_concurrent": 4, "queued": 0, "running": 0}
    assert list((tmp_path / "trials").iterdir()) == []
    assert files_with(tmp_path, KEY) == []
