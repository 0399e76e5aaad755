"""Groups of rollouts of one prompt: samples, failures and stragglers, and never less."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from support import CHAT_URL, Script, in_process, local_backend, make_app, prompt

from rollout import get_rollout_context
from rollout.client import RolloutRetry
from rollout.types import RolloutInitRequest


class ByNumber(Script):
    """Does what the prompt says for the number of its sample."""

    async def run(self, ctx):
        number = int(get_rollout_context().rollout_id.split("-")[1])
        ctx.prompt[:] = prompt(**ctx.prompt[0]["samples"][number])
        return await super().run(ctx)


def app_of(**options):
    return make_app(local_backend(ByNumber, max_concurrent=None, **options))


def group_of(rollout_id, *samples):
    return RolloutInitRequest(
        rollout_id=rollout_id,
        initial_messages=[{"role": "user", "content": "?", "samples": list(samples)}],
        chat_completions_url=CHAT_URL,
        label="42",
    )


async def receive_all(client, prompts, **options):
    async with client.run_groups(prompts, **options) as groups:
        received = [group async for group in groups]
    await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)  # the rest was cancelled
    return received


def ids_of(finished):
    return [ended.request.rollout_id for ended in finished]


async def test_each_prompt_gets_all_of_its_rollouts(autojump_clock):
    wrong, boom = {"answer": "41", "sleep": 2}, {"raise": "boom", "sleep": 1}
    prompts = [group_of("a", {"sleep": 5}, wrong, boom), group_of("b", {}, {}, {"sleep": 1})]
    async with in_process(app_of()) as client:
        b, a = await receive_all(client, prompts, samples=3)
    assert (a.prompt, b.prompt) == tuple(prompts)
    assert [sample.reward for sample in a.samples] == [0.0, 1.0]
    assert [ended.result.err_message for ended in a.failures] == ["boom"]
    assert ids_of(a.finished) == ["a-2", "a-1", "a-0"]
    assert not a.stragglers
    assert len(b.samples) == 3


async def test_what_has_ended_survives_the_deadline(autojump_clock):
    prompts = [
        group_of("a", {"sleep": 1}, {"sleep": 3600}, {"raise": "boom"}, {"sleep": 10}),
        group_of("b", *[{"sleep": 3600}] * 4),
    ]
    async with in_process(app_of()) as client:
        a, b = sorted(
            await receive_all(client, prompts, samples=4, deadline_sec=20),
            key=lambda group: group.prompt.rollout_id,
        )
    assert ids_of(a.finished) == ["a-2", "a-0", "a-3"]
    assert [request.rollout_id for request in a.stragglers] == ["a-1"]
    assert len(b.stragglers) == 4


async def test_enough_samples_end_a_group_and_failures_do_not_count(autojump_clock):
    samples = [{"raise": "boom"}, {"sleep": 3600}, {"sleep": 2}, {"sleep": 1}]
    async with in_process(app_of()) as client:
        (group,) = await receive_all(client, [group_of("a", *samples)], samples=4, min_samples=2)
    assert ids_of(group.finished) == ["a-0", "a-3", "a-2"]
    assert [request.rollout_id for request in group.stragglers] == ["a-1"]


@pytest.mark.parametrize("max_in_flight", [1, 3, 5])
async def test_groups_share_the_places_and_none_is_idle(autojump_clock, max_in_flight):
    running, most = 0, 0

    class Counting(ByNumber):
        async def run(self, ctx):
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().run(ctx)
            finally:
                running -= 1

    prompts = [group_of(name, *[{"sleep": 10}] * 3) for name in "abcde"]
    app = make_app(local_backend(Counting, max_concurrent=None))
    async with in_process(app) as client:
        groups = await receive_all(client, prompts, samples=3, max_in_flight=max_in_flight)
    assert [len(group.samples) for group in groups] == [3] * 5
    assert most == max_in_flight
    assert trio.current_time() < 10 * (15 // max_in_flight) + 1


async def test_prompts_are_pulled_as_groups_are_received(autojump_clock):
    pulled = []

    async def endless():
        while True:
            pulled.append(f"g{len(pulled)}")
            yield group_of(pulled[-1], {"sleep": 1}, {"sleep": 1})

    async with in_process(app_of()) as client:
        async with client.run_groups(endless(), samples=2, max_in_flight=4) as groups:
            await trio.sleep(100)
            assert len(pulled) == 4  # twice as many as there are places for
            await groups.receive()
            await trio.sleep(100)
            assert len(pulled) == 5
        await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)


async def test_leaving_cancels_what_is_left_of_all_groups_at_once(autojump_clock):
    prompts = [group_of("a", {}, {}), *(group_of(name, *[{"sleep": 3600}] * 2) for name in "bcd")]
    asked = []
    async with in_process(app_of()) as client:
        cancel = client.cancel_rollouts

        async def noted(**selector):
            asked.append(sorted(selector["ids"]))
            return await cancel(**selector)

        client.cancel_rollouts = noted
        with pytest.raises(KeyError):
            async with client.run_groups(prompts, samples=2) as groups:
                assert (await groups.receive()).prompt.rollout_id == "a"
                await trio.testing.wait_all_tasks_blocked()
                raise KeyError("mine")
        await client.wait_idle(timeout_sec=5, poll_interval_sec=0.1)
    assert asked == [[f"{name}-{number}" for name in "bcd" for number in range(2)]]


async def test_an_exception_of_the_prompts_comes_out_plain(autojump_clock):
    def prompts():
        yield group_of("a", {"sleep": 1}, {"sleep": 1})
        raise LookupError("no more prompts")

    async with in_process(app_of()) as client:
        with pytest.raises(LookupError, match="no more prompts"):
            await receive_all(client, prompts(), samples=2)


async def test_a_group_may_run_again_what_has_not_begun(autojump_clock):
    app = make_app(local_backend(ByNumber, max_concurrent=1))
    request = group_of("a", {"sleep": 3}, {"sleep": 3})
    request.agent_timeout_sec = 20  # too short for as long as the other one has the slot
    other = group_of("b", {"sleep": 30})
    async with in_process(app) as client, trio.open_nursery() as nursery:
        nursery.start_soon(
            client.run_rollout, other.initial_messages, CHAT_URL, "b-0", None, other.label
        )
        await trio.sleep(1)
        (group,) = await receive_all(client, [request], samples=2, retry=RolloutRetry())
    assert [ended.attempts for ended in group.finished] == [2, 2]
    assert len(group.samples) == 2


async def test_first_successes_say_what_failed(autojump_clock):
    requests = [
        RolloutInitRequest(
            rollout_id=f"a-{number}",
            initial_messages=group_of("a", {"raise": "boom"}, {"sleep": 1}).initial_messages,
            chat_completions_url=CHAT_URL,
            label="42",
        )
        for number in range(2)
    ]
    async with in_process(app_of()) as client:
        found = await client.first_successes(requests, 1)
        assert ids_of(found) == ["a-1"]
        assert [ended.result.err_message for ended in found.failures] == ["boom"]


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 0},
        {"samples": True},
        {"min_samples": 0},
        {"max_in_flight": 0},
        {"deadline_sec": 0},
        {"deadline_sec": float("inf")},
        {"deadline_sec": "5"},
    ],
)
async def test_numbers_that_make_no_sense_are_refused(autojump_clock, options):
    async with in_process(app_of()) as client:
        with pytest.raises(ValueError, match=next(iter(options))):
            async with client.run_groups([], **options):
                pass
