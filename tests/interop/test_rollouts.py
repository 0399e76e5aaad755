"""Rollouts from admission to result, the official client with our server and vice versa."""

from __future__ import annotations

import pytest
import trio
from interop.sides import Failed
from support import fresh_id


async def test_a_graded_rollout_gets_its_reward(pair):
    _, client = await pair.connect()
    rollout_id = fresh_id()
    result = await client.run(rollout_id=rollout_id, label="42", metadata={"set": "train"})
    assert result["rollout_id"] == rollout_id
    assert result["status"] == "success"
    assert result["err_message"] is None
    assert result["err_category"] is None
    sample = result["sample"]
    assert sample["reward"] == 1.0
    assert sample["label"] == "42"
    assert [message["role"] for message in sample["messages"]] == ["user", "assistant"]
    assert sample["metrics"] == {"length": 2}  # the NaN beside it has no JSON form
    assert sample["remove_sample"] is False


async def test_a_wrong_answer_gets_the_reward_zero(pair):
    _, client = await pair.connect()
    result = await client.run(rollout_id=fresh_id(), label="42", script={"answer": "41"})
    assert result["status"] == "success"
    assert result["sample"]["reward"] == 0.0


async def test_metadata_alone_is_enough_for_grading(pair):
    _, client = await pair.connect()
    result = await client.run(rollout_id=fresh_id(), metadata={"grader": {}})
    assert result["status"] == "success"
    assert result["sample"]["reward"] == 0.0
    assert result["sample"]["label"] is None


async def test_an_ungraded_rollout_has_a_sample_and_no_reward(pair):
    _, client = await pair.connect(grader=False)
    result = await client.run(rollout_id=fresh_id(), grade=False)
    assert result["status"] == "success"
    assert result["sample"]["messages"][-1]["content"] == "42"
    assert result["sample"]["reward"] is None


async def test_a_removed_sample_has_no_reward(pair):
    _, client = await pair.connect()
    metadata = {"grader": {"remove": True}}
    result = await client.run(rollout_id=fresh_id(), label="42", metadata=metadata)
    assert result["status"] == "success"
    assert result["sample"]["remove_sample"] is True
    assert result["sample"]["reward"] is None


async def test_every_field_of_an_admission_is_accepted(pair):
    _, client = await pair.connect()
    result = await client.run(
        rollout_id=fresh_id(),
        llm_api_key="sk-not-for-logs",
        label="42",
        metadata={"deep": [{"er": None}]},
        grade=True,
        agent_timeout_sec=60,
        grader_timeout_sec=60.5,
        extra_fields={"run": "ü", "n": 1},
    )
    assert result["status"] == "success"
    assert result["sample"]["reward"] == 1.0


@pytest.mark.parametrize("text", ["a b", "räksmörgås", "1:2@x+y=z,;!'()*&$~", "日本語"])
async def test_an_id_of_any_characters_finds_its_result(pair, text):
    _, client = await pair.connect()
    rollout_id = fresh_id(text)
    result = await client.run(rollout_id=rollout_id, label="42")
    assert result["rollout_id"] == rollout_id
    assert result["status"] == "success"


async def test_text_of_any_language_travels_unchanged(pair):
    _, client = await pair.connect()
    text = "Grüße, 世界 \U0001f30d \u2028 \x7f"
    result = await client.run(rollout_id=fresh_id(), label=text, script={"answer": text})
    assert result["sample"]["reward"] == 1.0
    assert result["sample"]["label"] == text
    assert result["sample"]["messages"][-1]["content"] == text


async def test_large_messages_travel_both_ways(pair):
    _, client = await pair.connect()
    text = "ä" * 300_000
    result = await client.run(rollout_id=fresh_id(), label=text, script={"answer": text})
    assert result["sample"]["reward"] == 1.0
    assert result["sample"]["messages"][-1]["content"] == text


async def test_a_handle_reaches_its_milestones(pair):
    server, client = await pair.connect()
    work, grade = fresh_id("gate"), fresh_id("gate")
    handle = await client.start(
        rollout_id=fresh_id(),
        label="42",
        script={"hold": work},
        metadata={"grader": {"hold": grade}},
    )
    first = await handle.look()
    assert first["status"] in {"queued", "running"}
    assert not first["done"]
    await server.reached(work)
    assert await handle.running() == "running"
    await server.release(work)
    await server.reached(grade)
    assert await handle.grading() == "grading"
    assert await handle.running() == "grading"
    await server.release(grade)
    result = await handle.completion()
    assert result["status"] == "success"
    assert result["sample"]["reward"] == 1.0
    assert await handle.running() == await handle.grading() == "success"
    assert await handle.completion() == result
    assert await handle.look() == {"status": "success", "done": True, "latest": result}

    answers = await client.answered("result")
    assert {answer["status_code"] for answer in answers} == {200}
    statuses = [answer["body"]["status"] for answer in answers]
    order = ["queued", "running", "grading", "success"]
    assert statuses == sorted(statuses, key=order.index)
    assert statuses.count("success") == 1
    in_flight = [answer["body"] for answer in answers if answer["body"]["status"] != "success"]
    assert all(body["sample"] is body["err_category"] is None for body in in_flight)


async def test_an_ungraded_rollout_skips_the_milestone_of_grading(pair):
    _, client = await pair.connect()
    handle = await client.start(rollout_id=fresh_id(), label="42", grade=False)
    assert await handle.grading() == "success"


@pytest.mark.parametrize(
    ("kind", "category"),
    [
        ("RuntimeError", "agent_error"),
        ("LookupError", "agent_error"),
        ("ValueError", "validation_error"),
        ("TypeError", "validation_error"),
        ("AssertionError", "validation_error"),
        ("TimeoutError", "timeout"),
    ],
)
async def test_a_failure_of_the_workflow_is_reported(pair, kind, category):
    _, client = await pair.connect()
    handle = await client.start(rollout_id=fresh_id(), label="42", script={"raise": [kind, "boom"]})
    result = await handle.completion()
    assert result["status"] == "failure"
    assert result["err_category"] == category
    assert result["err_message"] == "boom"
    assert result["sample"] is None
    assert await handle.grading() == "failure"


async def test_a_failure_of_the_grader_keeps_the_sample_without_a_reward(pair):
    _, client = await pair.connect()
    metadata = {"grader": {"raise": ["RuntimeError", "no judge"]}}
    result = await client.run(rollout_id=fresh_id(), label="42", metadata=metadata)
    assert result["status"] == "failure"
    assert result["err_category"] == "agent_error"
    assert result["err_message"] == "no judge"
    assert result["sample"]["messages"][-1]["content"] == "42"
    assert result["sample"]["reward"] is None


async def test_a_grader_that_sets_no_reward_is_a_failure(pair):
    _, client = await pair.connect()
    metadata = {"grader": {"silent": True}}
    result = await client.run(rollout_id=fresh_id(), label="42", metadata=metadata)
    assert result["status"] == "failure"
    assert result["err_category"] == "validation_error"
    assert result["sample"]["reward"] is None


@pytest.mark.parametrize("missing", ["grader", "label and metadata"])
async def test_a_rollout_that_cannot_be_graded_is_a_failure(pair, missing):
    _, client = await pair.connect(grader=missing != "grader")
    label = "42" if missing == "grader" else None
    result = await client.run(rollout_id=fresh_id(), label=label)
    assert result["status"] == "failure"
    # Ours says what is missing, and spends no token on it; the official server says nothing.
    assert result["err_category"] == ("validation_error" if pair.our_server else None)


@pytest.mark.parametrize("limit", [0.2, 0, -1])
async def test_a_workflow_that_outlives_its_deadline_is_a_timeout(pair, limit):
    _, client = await pair.connect()
    result = await client.run(
        rollout_id=fresh_id(),
        label="42",
        script={"hold": fresh_id("gate")},
        agent_timeout_sec=limit,
    )
    assert result["status"] == "failure"
    assert result["err_category"] == "timeout"
    assert "workflow" in result["err_message"]
    assert result["sample"] is None


async def test_time_in_the_queue_counts_against_the_deadline(pair):
    server, client = await pair.connect(max_concurrent=1)
    waiting = await pair.client(server.url)
    gate = fresh_id("gate")
    first = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    await server.reached(gate)
    second = await waiting.start(rollout_id=fresh_id(), label="42", agent_timeout_sec=0.2)
    # Ours ends at the deadline; the official server looks once the rollout has its slot.
    await waiting.answered("result", count=1 if pair.our_server else 2)
    if pair.our_server:
        await second.completion()
    await server.release(gate)
    result = await second.completion()
    assert result["status"] == "failure"
    assert result["err_category"] == "timeout"
    assert (await first.completion())["status"] == "success"


async def test_a_grader_that_outlives_its_deadline_is_a_timeout(pair):
    _, client = await pair.connect()
    result = await client.run(
        rollout_id=fresh_id(),
        label="42",
        metadata={"grader": {"hold": fresh_id("gate")}},
        grader_timeout_sec=0.2,
    )
    assert result["status"] == "failure"
    assert result["err_category"] == "timeout"
    assert "grader" in result["err_message"]
    assert result["sample"]["reward"] is None


async def test_many_rollouts_at_a_time_keep_their_results_apart(pair):
    _, client = await pair.connect(max_concurrent=None)
    results = {}

    async def one(text: str) -> None:
        results[text] = await client.run(rollout_id=fresh_id(), label=text, script={"answer": text})

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, str(number))
    assert len(results) == 20
    for text, result in results.items():
        assert result["sample"]["label"] == text
        assert result["sample"]["reward"] == 1.0


async def test_an_id_that_is_active_or_retained_is_refused(pair):
    server, client = await pair.connect()
    rollout_id, gate = fresh_id(), fresh_id("gate")
    handle = await client.start(rollout_id=rollout_id, label="42", script={"hold": gate})
    with pytest.raises(Failed) as active:
        await client.run(rollout_id=rollout_id, label="42")
    await server.release(gate)
    assert (await handle.completion())["status"] == "success"
    with pytest.raises(Failed) as retained:
        await client.start(rollout_id=rollout_id, label="42")
    for refusal in (active.value, retained.value):
        assert "RolloutProtocolError" in refusal.kinds
        assert refusal.status_code == 409


async def test_a_full_server_admits_once_there_is_room(pair):
    server, client = await pair.connect(max_concurrent=1, max_queue_depth=1)
    hasty = await pair.client(server.url, admission_timeout_sec=0.3)
    gate = fresh_id("gate")
    first = await client.start(rollout_id=fresh_id(), label="42", script={"hold": gate})
    await server.reached(gate)
    second = await client.start(rollout_id=fresh_id(), label="42")
    await until_queued(client, 1)

    results = []

    async def third() -> None:
        results.append(await client.run(rollout_id=fresh_id(), label="42"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(third)
        (refusal,) = await client.answered("rollout", status_code=429)
        assert refusal["headers"]["retry-after"] in {"5", "6", "7", "8"}
        with pytest.raises(Failed) as too_late:
            await hasty.run(rollout_id=fresh_id(), label="42")
        assert "RolloutAdmissionTimeoutError" in too_late.value.kinds
        assert "TimeoutError" in too_late.value.kinds
        await server.release(gate)
    results += [await first.completion(), await second.completion()]
    assert [result["sample"]["reward"] for result in results] == [1.0, 1.0, 1.0]


async def until_queued(client, count: int) -> None:
    """Look at the server's health until that many rollouts wait for a slot."""
    while (await client.health())["concurrency"]["queued"] != count:
        await trio.lowlevel.checkpoint()
