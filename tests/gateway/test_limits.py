"""Limits of a rollout: the next call is refused, and what the agent has is graded."""

from __future__ import annotations

import pytest
from attrs import evolve
from gateway.sdks import needs_openai
from gateway.served import QUESTION, post, rig
from gateway.test_apis import anthropic_sdk, openai_sdk
from integrations.scripted import refuse, say
from support import fresh_id, local_backend, make_app, served

from rollout.client import RolloutClient
from rollout.errors import InvalidFieldError, RolloutProtocolError
from rollout.gateway import Limits, ModelGateway, Price
from rollout.gateway.limits import Used, tighter
from rollout.types import RolloutStatus

USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


def counted(text="13"):
    return evolve(say(text), usage=USAGE)


@pytest.mark.parametrize(
    ("name", "most", "calls"),
    [
        ("calls", 2, 2),
        ("prompt_tokens", 20, 2),
        ("completion_tokens", 4, 2),
        ("total_tokens", 14, 2),
        ("cost_usd", 0.00003, 3),
        ("calls", 0, 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_call_after_a_limit_is_refused_and_the_sample_is_graded(
    name, most, calls, stream
):
    replies = []

    async def agent(context):
        for _ in range(5):
            replies.append(await post(context, stream=stream))
            if replies[-1].status_code != 200:
                return

    gateway = ModelGateway(
        limits=Limits(**{name: most}), prices={"*": Price(prompt=0.7, completion=2)}
    )
    async with rig(agent, counted(), gateway=gateway) as it:
        result = await it.run(label="13")
        assert len(it.endpoint.requests) == calls
    assert len(replies) == calls + 1
    assert replies[-1].status_code == 403
    assert name in replies[-1].json()["error"]["message"]
    assert replies[-1].headers["x-rollout-limit"] == name
    if calls:
        assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
        assert result.sample.metrics["limit_reached"] == name
        assert result.sample.metrics["calls"] == calls


@needs_openai
async def test_the_sdks_do_not_try_again_and_the_result_names_the_limit():
    def agent(context):
        anthropic = pytest.importorskip("anthropic")
        with openai_sdk(context) as client:
            client.chat.completions.create(model="m", messages=[QUESTION])
        with anthropic_sdk(context) as client, pytest.raises(anthropic.PermissionDeniedError):
            client.messages.create(model="m", max_tokens=1, messages=[QUESTION])
        with openai_sdk(context) as client:
            client.chat.completions.create(model="m", messages=[QUESTION])

    async with rig(agent, counted(), gateway=ModelGateway(limits=Limits(calls=1))) as it:
        result = await it.run()
        assert len(it.endpoint.requests) == 1
    assert (result.status, result.err_source) == (RolloutStatus.FAILURE, None)
    assert "the rollout has reached its limit of calls" in result.err_message


async def test_an_agent_of_which_only_the_exit_code_is_known():
    async def agent(context):
        await post(context)
        await post(context)
        raise RuntimeError("the tool exited with 1")

    async with rig(agent, counted(), gateway=ModelGateway(limits=Limits(calls=1))) as it:
        result = await it.run()
    assert result.err_message == (
        "the tool exited with 1; the rollout has reached its limit of calls"
    )


async def test_a_request_may_ask_for_less_and_not_for_more():
    async def agent(context):
        while (await post(context)).status_code == 200:
            pass

    async with rig(agent, counted(), gateway=ModelGateway(limits=Limits(calls=3))) as it:
        assert (await it.run(limits={"calls": 2})).sample.metrics["calls"] == 2
        assert (await it.run(limits={"calls": 9})).sample.metrics["calls"] == 3
        assert (await it.run(limits={"total_tokens": 14})).sample.metrics["calls"] == 2
        for limits in ({"calls": -1}, {"call": 1}, {"calls": "2"}):
            with pytest.raises(InvalidFieldError, match="limits"):
                await it.run(limits=limits)


async def test_a_server_without_a_gateway_refuses_limits():
    async with (
        served(make_app(local_backend())) as url,
        RolloutClient(url=url) as client,
    ):
        with pytest.raises(RolloutProtocolError, match="model gateway"):
            await client.run_rollout(
                initial_messages=[QUESTION],
                chat_completions_url="http://127.0.0.1:9/v1",
                rollout_id=fresh_id(),
                limits={"calls": 1},
            )


async def test_a_limited_cost_needs_a_price():
    replies = []

    async def agent(context):
        replies.append(await post(context, model="another"))

    gateway = ModelGateway(
        limits=Limits(cost_usd=1), prices={"policy": Price(prompt=1, completion=1)}
    )
    async with rig(agent, counted(), gateway=gateway) as it:
        await it.run()
        assert it.endpoint.requests == []
    assert replies[0].status_code == 403
    assert "has no price" in replies[0].json()["error"]["message"]
    with pytest.raises(InvalidFieldError, match="prices"):
        ModelGateway(limits=Limits(cost_usd=1))


async def test_failed_calls_count_as_calls():
    async def agent(context):
        await post(context)
        await post(context)

    gateway = ModelGateway(limits=Limits(calls=1))
    async with rig(agent, refuse(500), gateway=gateway) as it:
        result = await it.run()
        assert len(it.endpoint.requests) == 1
    assert result.sample.metrics["limit_reached"] == "calls"


async def test_a_judge_that_grades_is_not_limited():
    from rollout import Grader, get_rollout_context

    class Judge(Grader):
        async def grade(self, ctx):
            context = get_rollout_context()
            assert context is not None
            ctx.set_reward(float((await post(context)).status_code == 200))

    async def agent(context):
        await post(context)
        await post(context)

    from gateway.served import workflow_of
    from integrations.scripted import scripted_endpoint

    app = make_app(
        local_backend(workflow_of(agent), Judge), gateway=ModelGateway(limits=Limits(calls=1))
    )
    async with (
        scripted_endpoint(counted()) as endpoint,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        result = await client.run_rollout(
            initial_messages=[QUESTION],
            chat_completions_url=endpoint.url,
            rollout_id=fresh_id(),
            label="13",
        )
    assert result.sample.reward == 1.0
    assert result.sample.metrics["calls"] == 1


def test_the_lower_limit_counts():
    both = tighter(Limits(calls=3, cost_usd=1.5), Limits(calls=5, total_tokens=7))
    assert both == Limits(calls=3, cost_usd=1.5, total_tokens=7)


def test_costs_of_cached_tokens_and_those_that_the_endpoint_names():
    used = Used()
    cached = {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}
    used.add(cached, Price(prompt=1, completion=2, cached_prompt=0.5))
    assert used.cost_usd == pytest.approx((6 * 1 + 4 * 0.5 + 3 * 2) / 1e6)
    used.add({**USAGE, "cost": 0.25}, None)
    assert used.cost_usd == pytest.approx(0.25 + 14e-6)
    assert used.total_tokens == 26


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Limits, {"calls": -1}),
        (Limits, {"calls": 1.5}),
        (Limits, {"cost_usd": float("nan")}),
        (Price, {"prompt": -1, "completion": 1}),
        (Price, {"prompt": "1", "completion": 1}),
        (ModelGateway, {"models": {"*": 7}}),
        (ModelGateway, {"prices": {"*": 7}}),
        (ModelGateway, {"limits": {"calls": 1}}),
    ],
)
def test_settings_are_checked(kind, given):
    with pytest.raises(InvalidFieldError, match=next(iter(given))):
        kind(**given)
