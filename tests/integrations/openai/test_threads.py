"""The synchronous client of the SDK, in plain workflows, which run in worker threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial

import pytest

pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')

import httpx
import openai
import trio
from integrations.openai.agents import KEY, QUESTION, TOOLS, trajectory
from integrations.scripted import call, refuse, say, scripted_endpoint, stall
from support import fresh_id, local_backend, make_app, served

from rollout import AgentWorkflow, RolloutContext
from rollout.client import RolloutClient
from rollout.errors import IntegrationError
from rollout.integrations.openai import get_recorder, share_connections, sync_rollout_client
from rollout.integrations.transport.threads import TrioSide
from rollout.types import RolloutStatus

in_thread = trio.to_thread.run_sync


class PlainAdder(AgentWorkflow):
    """The usual loop, without a single await."""

    def run(self, ctx):
        client = sync_rollout_client()
        history = list(ctx.prompt)
        while True:
            reply = client.chat.completions.create(model="policy", messages=history, tools=TOOLS)
            message = reply.choices[0].message
            history.append(message)
            if not message.tool_calls:
                return
            for each in message.tool_calls:
                numbers = json.loads(each.function.arguments)
                content = str(numbers["left"] + numbers["right"])
                history.append({"role": "tool", "tool_call_id": each.id, "content": content})


class PlainJudge:
    def __init__(self, config=None):
        pass

    def grade(self, ctx):
        client = sync_rollout_client(record=False)
        question = {"role": "user", "content": "Is it right?"}
        verdict = client.chat.completions.create(model="judge", messages=[question])
        ctx.set_reward(1.0 if verdict.choices[0].message.content == "yes" else 0.0)


async def test_a_plain_workflow_and_a_plain_grader_in_a_rollout():
    steps = (call("add", left=6, right=7), refuse(500, retry_after="0.01"), say("13"), say("yes"))
    async with scripted_endpoint(*steps) as endpoint:
        backend = local_backend(PlainAdder, grader=PlainJudge)
        async with (
            served(make_app(backend, lifespan=share_connections)) as url,
            RolloutClient(url=url) as client,
        ):
            result = await client.run_rollout(
                initial_messages=[QUESTION],
                chat_completions_url=endpoint.url,
                rollout_id=fresh_id(),
                llm_api_key=KEY,
                label="13",
            )
            assert endpoint.connections == 1
        await endpoint.all_closed()
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
    roles = [each["role"] for each in result.sample.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    metrics = result.sample.metrics
    assert (metrics["calls"], metrics["retries"], metrics["completion_tokens"]) == (2, 1, 2)
    assert {each.key for each in endpoint.requests} == {KEY}


async def test_a_stream_is_read_piece_by_piece():
    def read():
        stream = sync_rollout_client().chat.completions.create(
            model="policy", messages=[QUESTION], stream=True
        )
        with stream:
            return [chunk.choices[0].delta.content for chunk in stream]

    async with scripted_endpoint(say("It is 13.")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            assert await in_thread(read) == ["It", " is", " 13.", None]
            sample = await rollout.get_sample()
        await endpoint.all_closed()
    assert sample.messages[-1]["content"] == "It is 13."
    assert sample.metrics["completion_tokens"] == 3
    trajectory(sample)


async def test_a_stream_that_is_left_early_is_closed():
    def read():
        stream = sync_rollout_client().chat.completions.create(
            model="policy", messages=[QUESTION], stream=True
        )
        with stream:
            return next(iter(stream)).choices[0].delta.content

    async with scripted_endpoint(stall("one two three", after=1)) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as rollout:
            assert await in_thread(read) == "one"
            await endpoint.requests[0].gone.wait()
            sample = await rollout.get_sample()
    assert sample.messages[-1]["content"] == "one"
    assert sample.metrics["interrupted_calls"] == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_a_rollout_in_mid_call(streamed):
    ended = []

    class Ask(AgentWorkflow):
        def run(self, ctx):
            create = sync_rollout_client(max_retries=5).chat.completions.create
            try:
                answer = create(model="policy", messages=ctx.prompt, stream=streamed)
                if streamed:
                    with answer:
                        list(answer)
            except BaseException as error:
                ended.append(type(error))
                raise

    async with (
        scripted_endpoint(stall("one two", after=1 if streamed else 0), say("13")) as endpoint,
        served(make_app(local_backend(Ask, max_concurrent=1))) as url,
        RolloutClient(url=url) as client,
    ):
        start = partial(
            client.run_rollout_async,
            initial_messages=[QUESTION],
            chat_completions_url=endpoint.url,
            grade=False,
        )
        handle = await start(rollout_id="stalled")
        await (await endpoint.received()).stalled.wait()
        await client.cancel_rollout("stalled")
        assert (await handle).status is RolloutStatus.CANCELLED
        await endpoint.requests[0].gone.wait()
        # Its slot, the only one, is free, and nothing was tried again.
        assert (await (await start(rollout_id="next"))).status is RolloutStatus.SUCCESS
        await endpoint.all_closed()
    assert ended == [trio.Cancelled]
    assert len(endpoint.requests) == 2


class Drip(httpx.AsyncByteStream):
    """A body that never keeps its reader waiting."""

    def __init__(self):
        self.pieces = 0
        self.closed = False
        self.flowing = trio.Event()

    async def __aiter__(self):
        while True:
            self.pieces += 1
            self.flowing.set()
            await trio.lowlevel.checkpoint()
            yield b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'

    async def aclose(self):
        await trio.lowlevel.checkpoint()
        self.closed = True


async def test_a_stream_that_never_pauses_ends_with_its_rollout(monkeypatch):
    body = Drip()

    async def send(self, request):
        await trio.lowlevel.checkpoint()
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=body, request=request)

    monkeypatch.setattr("rollout.integrations.openai.RecordingTransport.send", send)

    def read():
        http = sync_rollout_client()._client
        body = {"messages": [QUESTION], "stream": True}
        request = http.build_request("POST", "http://h/v1/chat/completions", json=body)
        # Nobody closes this stream but the cancellation itself.
        for _ in http.send(request, stream=True).iter_raw():
            pass

    with RolloutContext(chat_completions_url="http://h/v1") as rollout:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(in_thread, abandon_on_cancel=False), read)
            await body.flowing.wait()
            nursery.cancel_scope.cancel()
        sample = await rollout.get_sample()
    assert body.closed
    assert sample.metrics["interrupted_calls"] == 1
    assert sample.messages[-1]["content"].startswith("a")


async def test_threads_that_a_workflow_starts_itself():
    def ask(client, text):
        question = {"role": "user", "content": text}
        reply = client.chat.completions.create(model="policy", messages=[question])
        return reply.choices[0].message.content

    def work():
        client = sync_rollout_client()
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(partial(ask, client), [f"q{n}" for n in range(12)]))

    script = lambda request: say(f"re: {request.body['messages'][0]['content']}")  # noqa: E731
    async with scripted_endpoint(script) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url) as rollout:
            assert await in_thread(work) == [f"re: q{n}" for n in range(12)]
            sample = await rollout.get_sample()
    assert sample.metrics["calls"] == 12
    assert len(sample.extra_fields["branches"]) == 11


async def test_the_recorder_is_there_in_the_thread():
    def work():
        create = sync_rollout_client().chat.completions.create
        ids = [
            create(model="policy", messages=[{"role": "user", "content": text}]).id
            for text in ("a", "b")
        ]
        get_recorder().choose(ids[0])
        return get_recorder()

    async with scripted_endpoint(say("13")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url) as rollout:
            assert await in_thread(work) is get_recorder()
            assert (await rollout.get_sample()).messages[0]["content"] == "a"


async def test_a_client_that_is_closed():
    def work():
        with sync_rollout_client() as client:
            client.chat.completions.create(model="policy", messages=[QUESTION])

    async with scripted_endpoint(say("13")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url):
            await in_thread(work)
        await endpoint.all_closed()


async def test_on_the_event_loop_it_explains_itself():
    """It would block every other rollout, or wait for itself for ever."""
    with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1") as rollout:
        with pytest.raises(IntegrationError, match="use rollout_client"):
            sync_rollout_client()
        assert rollout.sample_source is None
        client = await in_thread(partial(sync_rollout_client, max_retries=0))
        with pytest.raises((IntegrationError, openai.APIConnectionError)) as caught:
            client.chat.completions.create(model="policy", messages=[QUESTION])
    # Some versions of the SDK wrap it.
    assert IntegrationError in {type(caught.value), type(caught.value.__cause__)}


@pytest.mark.parametrize("function", [sync_rollout_client, get_recorder])
async def test_in_a_thread_of_somebody_else_it_explains_itself(function):
    def work():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, function).exception()

    with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1") as rollout:
        error = await in_thread(work)
        assert isinstance(error, IntegrationError)
        assert rollout.sample_source is None
    with pytest.raises(IntegrationError, match="no rollout is running here"):
        await in_thread(sync_rollout_client)


def test_a_thread_that_outlives_the_trio_run_is_not_left_waiting():
    sides = []

    async def main():
        sides.append(await in_thread(TrioSide))

    trio.run(main)
    with pytest.raises(trio.RunFinishedError):
        sides[0].run(trio.sleep, 0)
    sides[0].finish(trio.lowlevel.checkpoint)  # nothing is left to tidy up


def test_a_call_that_is_under_way_when_the_trio_run_ends():
    started = trio.Event()

    async def hang():
        started.set()
        await trio.sleep_forever()

    with ThreadPoolExecutor(1) as pool:

        async def main():
            side = await in_thread(TrioSide)
            pending.append(pool.submit(side.run, hang))
            await started.wait()

        pending = []
        trio.run(main)
        assert isinstance(pending[0].exception(timeout=20), trio.Cancelled)


async def test_a_call_that_comes_too_late_is_told_so(monkeypatch):
    """Between the end of the main task and that of the run, no task can be started any more."""

    def spawn(*args, **options):
        raise RuntimeError("Nursery is closed to new arrivals")

    monkeypatch.setattr(trio.lowlevel, "spawn_system_task", spawn)
    with pytest.raises(trio.RunFinishedError):
        await in_thread(lambda: TrioSide().run(trio.sleep, 0))


async def test_context_variables_of_the_thread_are_there():
    variable = ContextVar("variable")

    async def read():
        await trio.lowlevel.checkpoint()
        return variable.get()

    def work():
        variable.set("of the thread")
        return TrioSide().run(read)

    assert await in_thread(work) == "of the thread"


async def test_a_body_that_the_thread_makes_as_it_goes():
    async with scripted_endpoint(say("13")) as endpoint:

        def work():
            http = sync_rollout_client()._client
            body = iter([b'{"messages": ', b"[]}"])
            return http.post(f"{endpoint.url}/chat/completions", content=body).status_code

        with RolloutContext(chat_completions_url=endpoint.url):
            assert await in_thread(work) == 200
    assert endpoint.requests[0].body == {"messages": []}


async def test_an_answer_that_comes_in_spite_of_a_cancellation_is_handed_over():
    """Or nobody would close it."""
    began = trio.Event()

    async def stubborn():
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            return "answer"  # noqa: B012

    results = []

    def work():
        results.append(TrioSide().run(stubborn))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, work)
        await began.wait()
        nursery.cancel_scope.cancel()
    assert results == ["answer"]


@pytest.mark.parametrize("name", ["timeout", "base_url", "api_key", "http_client"])
async def test_what_is_not_for_its_caller_to_say(name):
    with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1"):
        with pytest.raises(ValueError, match=rf"{name} (must|is) .*with_options|{name} .*your own"):
            await in_thread(partial(sync_rollout_client, **{name: None}))
