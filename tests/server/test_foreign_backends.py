"""Backends that are not ours: what they do wrong costs one rollout, never the server."""

from __future__ import annotations

import json

import trio
from support import CHAT_URL, in_process, make_app, prompt

from rollout import ExecutionBackend
from rollout.types import ExecutionOutcome, ExecutionResult, RolloutStatus

KEY = "sk-hunter2-hunter2-hunter2"


class Misbehaving(ExecutionBackend):
    """Leaves a nursery open, or raises with the key in its message, as the prompt says."""

    async def execute(self, request):
        await trio.lowlevel.checkpoint()
        script = request.prompt[0]
        if script.get("leave_open"):
            await trio.open_nursery().__aenter__()
        if "message" in script:
            raise RuntimeError(script["message"])
        return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))


async def test_a_backend_that_leaves_a_nursery_open_fails_its_own_rollout_only(autojump_clock):
    async with in_process(make_app(Misbehaving())) as client:
        result = await client.run_rollout(prompt(leave_open=True), CHAT_URL, "a", grade=False)
        assert result.status is RolloutStatus.FAILURE
        result = await client.run_rollout(prompt(), CHAT_URL, "b", grade=False)
        assert result.status is RolloutStatus.SUCCESS


async def test_no_part_of_a_key_is_left_where_a_long_message_is_cut(autojump_clock):
    async with in_process(make_app(Misbehaving())) as client:
        for dots in range(7970, 8000):
            text = "." * dots + KEY + "." * 50
            result = await client.run_rollout(
                prompt(message=text), CHAT_URL, f"r{dots}", llm_api_key=KEY, grade=False
            )
            assert "sk-h" not in (result.err_message or "")


class Encoding(ExecutionBackend):
    """Returns what it has encoded itself, after as long as the prompt says."""

    async def execute(self, request):
        with trio.CancelScope(shield=True):
            await trio.sleep(request.prompt[0].get("sleep", 0))
        encoded = {"rollout_id": request.id, "status": "success", "err_message": "as it is"}
        return ExecutionOutcome(
            workflow=ExecutionResult(status=RolloutStatus.SUCCESS),
            encoded=json.dumps(encoded).encode(),
        )


async def test_what_a_backend_has_encoded_is_published_as_it_is(autojump_clock):
    async with in_process(make_app(Encoding())) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "a", grade=False)
        assert result.err_message == "as it is"


async def test_a_lease_that_has_ended_wins_over_what_a_backend_has_encoded(autojump_clock):
    app = make_app(Encoding(), polling_lease_timeout_sec=60)
    async with in_process(app) as client:
        handle = await client.run_rollout_async(prompt(sleep=200), CHAT_URL, "a", grade=False)
        handle.cancel()
        await trio.sleep(300)
        (entry,) = app.registry._entries.values()
        assert json.loads(entry.body)["err_category"] == "lease_expired"
