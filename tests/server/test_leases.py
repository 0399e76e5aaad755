"""Polling leases on a simulated clock, through the real application."""

from __future__ import annotations

import trio
from support import CHAT_URL, in_process, make_app, prompt

from rollout.types import RolloutErrorCategory, RolloutStatus


async def test_polling_keeps_a_rollout_alive_for_hours(autojump_clock):
    async with in_process(make_app()) as client:
        result = await client.run_rollout(prompt(sleep=7200), CHAT_URL, "a", label="42")
    assert result.status is RolloutStatus.SUCCESS
    assert trio.current_time() >= 7200


async def test_a_lease_that_nobody_renews_expires_at_its_deadline(autojump_clock):
    async with in_process(make_app()) as client:
        started = trio.current_time()
        handle = await client.run_rollout_async(prompt(sleep=7200), CHAT_URL, "a", label="42")
        await handle.wait_for_running()
        handle.cancel()
        await client.wait_idle(timeout_sec=1000, poll_interval_sec=0.1)
    assert 120 <= trio.current_time() - started < 121


async def test_an_expired_rollout_reports_lease_expired(autojump_clock, caplog):
    app = make_app()
    async with in_process(app) as client:
        handle = await client.run_rollout_async(prompt(sleep=7200), CHAT_URL, "a", label="42")
        entry = app.registry._entries["a"]
        handle.cancel()
        await trio.sleep(121)
        result = entry.record.result
    assert result is not None
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.LEASE_EXPIRED
    assert result.err_message == "polling lease expired"
    assert "rollout a: its polling lease expired" in caplog.messages
    assert result.agent_started_at is not None
