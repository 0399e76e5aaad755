"""Rollouts whose model's endpoint fails them, told from those that fail by themselves."""

from __future__ import annotations

import httpx
import pytest
import trio
from attrs import evolve
from integrations.scripted import Step, refuse, say, scripted_endpoint, stall
from support import CHAT_URL, fresh_id, local_backend, make_app, served

from rollout import AgentWorkflow, Grader, get_rollout_context
from rollout.client import RolloutClient
from rollout.codec import structure, unstructure
from rollout.errors import IntegrationError
from rollout.integrations.chat import chat
from rollout.types import RolloutErrorCategory, RolloutResultResponse

SOURCE, KEY = "model_endpoint", "model_key"


async def ask_chat(messages, **options):
    return (await chat(messages, model="policy", **options)).message


async def ask_sdk(messages, *, timeout_sec=600.0, **options):
    openai = pytest.importorskip("rollout.integrations.openai")
    client = openai.rollout_client(timeout_sec=timeout_sec, max_retries=0, **options)
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.model_dump(exclude_none=True)


WAYS = {"chat": ask_chat}
try:
    import openai  # noqa: F401
except ImportError:
    pass  # the tests of the SDK say that they are skipped
else:
    WAYS["sdk"] = ask_sdk

every_way = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)


async def ended(*steps, run, grader=None, url=None, plain=False, **options):
    """The result of a rollout whose workflow is *run*."""

    class Workflow(AgentWorkflow):
        async def run(self, ctx):
            return await run(ctx)

    class Plain(AgentWorkflow):
        def run(self, ctx):
            return run(ctx)

    async with (
        scripted_endpoint(*steps) as endpoint,
        served(make_app(local_backend(Plain if plain else Workflow, grader))) as server,
        RolloutClient(url=server) as client,
    ):
        return await client.run_rollout(
            chat_completions_url=url or endpoint.url,
            rollout_id=fresh_id(),
            label="13",
            grade=grader is not None,
            **{"initial_messages": [{"role": "user", "content": "?"}], **options},
        )


def seen(result):
    return result.err_category, result.err_source


@every_way
@pytest.mark.parametrize(
    ("status", "record"),
    [(401, True), (403, False), (404, True), (429, False), (500, True), (503, False)],
)
async def test_a_refusal_by_the_endpoint(ask, status, record):
    result = await ended(refuse(status, "no"), run=lambda ctx: ask(ctx.prompt, record=record))
    source = KEY if status in {401, 403} else SOURCE
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, source)


@every_way
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("url", [CHAT_URL, None])
async def test_no_answer_of_the_endpoint(ask, record, url):
    async def run(ctx):
        await ask(ctx.prompt, record=record, timeout_sec=0.2)

    result = await ended(stall(), run=run, url=url)
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, SOURCE)


async def test_an_endpoint_that_is_none():
    step = Step(raw=b"<html>Welcome</html>", headers={"content-type": "text/html"})
    result = await ended(step, run=lambda ctx: chat(ctx.prompt, model="policy"))
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, SOURCE)


@pytest.mark.skipif("sdk" not in WAYS, reason="the OpenAI SDK is not installed")
@pytest.mark.parametrize("url", [CHAT_URL, None])
async def test_a_synchronous_client_meets_the_same(url):
    sdk = pytest.importorskip("rollout.integrations.openai")

    def run(ctx):
        client = sdk.sync_rollout_client(max_retries=0)
        client.chat.completions.create(model="policy", messages=ctx.prompt)

    result = await ended(refuse(401, "no"), run=run, url=url, plain=True)
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, SOURCE if url else KEY)


@every_way
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_that_is_wrong_is_the_agents_failure(ask, status):
    result = await ended(refuse(status, "too long"), run=lambda ctx: ask(ctx.prompt))
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, None)


@every_way
async def test_an_error_that_comes_from_it_is_one_too(ask):
    """Whatever it was wrapped in."""

    async def run(ctx):
        async def one():
            try:
                await ask(ctx.prompt)
            except Exception as error:
                raise ValueError("the answer is odd") from error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)

    result = await ended(refuse(500, "no"), run=run)
    assert seen(result) == (RolloutErrorCategory.VALIDATION_ERROR, SOURCE)


async def ask_by_hand(library, messages, *, timeout_sec):
    url = get_rollout_context().chat_completions_url
    async with library.AsyncClient(timeout=timeout_sec, trust_env=False) as http:
        response = await http.post(
            f"{url}/chat/completions", json={"model": "policy", "messages": messages}
        )
        response.raise_for_status()
        return response.json()["choices"][0]["message"]


@pytest.mark.parametrize(
    ("step", "url", "source"),
    [
        (refuse(503, "no"), None, SOURCE),
        (refuse(401, "no"), None, KEY),
        (stall(), None, SOURCE),
        (say("13"), CHAT_URL, SOURCE),
        (refuse(400, "too long"), None, None),
    ],
)
@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_a_client_of_httpx_by_hand(library, step, url, source):
    library = pytest.importorskip(library)

    async def run(ctx):
        try:
            await ask_by_hand(library, ctx.prompt, timeout_sec=0.5)
        except library.HTTPError as error:
            raise RuntimeError("the model is away") from error

    result = await ended(step, run=run, url=url)
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, source)


async def test_a_client_of_httpx_by_hand_that_fails_elsewhere():
    async def run(ctx):
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.get("http://127.0.0.1:9/v1/chat/completions")

    result = await ended(say("13"), run=run)
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, None)


async def test_an_error_of_the_agents_own_is_none():
    """Though the endpoint had failed before, or somebody else's did."""

    async def run(ctx):
        with pytest.raises(IntegrationError):
            await chat(ctx.prompt, model="policy")
        if "elsewhere" in ctx.prompt[0]["content"]:
            async with httpx.AsyncClient() as http:
                await http.get("http://127.0.0.1:9/")
        raise KeyError("gone")

    for text in ("?", "elsewhere"):
        prompt = [{"role": "user", "content": text}]
        result = await ended(refuse(500, "no"), run=run, initial_messages=prompt)
        assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, None)


async def test_an_endpoint_that_fails_the_grader():
    class Judge(Grader):
        async def grade(self, ctx):
            await chat(list(ctx.sample.messages), model="policy", record=False)

    async def run(ctx):
        return ctx.prompt

    result = await ended(refuse(503, "no"), run=run, grader=Judge)
    assert seen(result) == (RolloutErrorCategory.AGENT_ERROR, SOURCE)


@pytest.mark.parametrize("answers", [0, 1])
async def test_an_endpoint_that_has_not_answered_when_the_time_is_up(answers):
    """Where it has answered before, the agent may be what takes so long."""

    async def run(ctx):
        for _ in range(2):
            await chat(ctx.prompt, model="policy")

    steps = [say("13")] * answers + [stall()]
    result = await ended(*steps, run=run, agent_timeout_sec=0.5)
    assert seen(result) == (RolloutErrorCategory.TIMEOUT, None if answers else SOURCE)
    assert ("has not answered" in result.err_message) is (answers == 0)


async def test_a_failure_without_the_mark_says_nothing_of_it_on_the_wire():
    """Peers that know the protocol alone get what they know."""

    async def run(ctx):
        raise KeyError(get_rollout_context().rollout_id)

    result = await ended(say("13"), run=run)
    assert "err_source" not in unstructure(result)
    assert unstructure(evolve(result, err_source=SOURCE))["err_source"] == SOURCE
    body = {"rollout_id": "r", "status": "failure", "err_source": "something newer"}
    assert structure(body, RolloutResultResponse).err_source == "something newer"
