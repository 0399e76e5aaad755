"""Agents that nobody rewrote call their model through the gateway of a real server."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from attrs import evolve
from gateway.sdks import needs_openai
from gateway.served import KEY, QUESTION, calling, post, rig, workflow_of
from integrations.scripted import call, refuse, say, scripted_endpoint, stall
from support import fresh_id, local_backend, make_app

from rollout.client import RolloutClient
from rollout.errors import InvalidFieldError, RolloutServerError
from rollout.gateway import ModelGateway
from rollout.types import MODEL_ENDPOINT, RolloutStatus


def sdk(context, **options):
    openai = pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')
    return openai.OpenAI(base_url=context.chat_completions_url, api_key=context.api_key, **options)


def adder(context, *, stream=False):
    """The usual loop of an agent with tools, with OpenAI's own client."""
    with sdk(context) as client:
        messages = [QUESTION]
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        while True:
            asked = {"model": "gpt-4o", "messages": messages, "tools": tools}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    reply = events.get_final_completion().choices[0].message
            else:
                reply = client.chat.completions.create(**asked).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return
            for each in reply.tool_calls:
                numbers = json.loads(each.function.arguments)
                content = str(numbers["left"] + numbers["right"])
                messages.append({"role": "tool", "tool_call_id": each.id, "content": content})


@needs_openai
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_the_sdk_of_openai_returns_nothing_and_is_recorded(stream):
    seen = []

    def agent(context):
        seen.append((context.chat_completions_url, context.api_key))
        adder(context, stream=stream)

    steps = (call("add", left=6, right=7), say("13"))
    async with rig(agent, *steps) as it:
        result = await it.run(label="13")
        (url, token), *_ = seen
        assert url == f"{it.url}/model/v1"
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
    assert [each["role"] for each in result.sample.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert result.sample.metrics["calls"] == 2
    assert result.sample.metrics["tool_calls"] == 1
    assert result.sample.metrics["completion_tokens"] == 2
    assert [each.key for each in it.endpoint.requests] == [KEY, KEY]
    assert [each.path for each in it.endpoint.requests] == ["/v1/chat/completions"] * 2
    assert token != KEY
    assert len(token) >= 40
    sent = it.endpoint.requests[0]
    assert token not in json.dumps([sent.headers, sent.body])


async def test_a_stream_comes_in_pieces_and_unchanged():
    pieces = []

    def agent(context):
        url = f"{context.chat_completions_url}/chat/completions"
        headers = {"Authorization": f"Bearer {context.api_key}"}
        body = {"model": "m", "messages": [QUESTION], "stream": True, "odd": {"kept": [1]}}
        with httpx.stream("POST", url, headers=headers, json=body, trust_env=False) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-request-id"] == "req-0"
            for line in response.iter_lines():
                if line:
                    pieces.append(line.removeprefix("data: "))
                if len(pieces) == 2:
                    break  # the endpoint holds the rest back, so these did not wait for it
        # Whoever leaves cancels the request.
        trio.from_thread.run(it.endpoint.requests[0].gone.wait)

    async with rig(agent, evolve(stall("one two three"), hold_after=2)) as it:
        result = await it.run()
    assert [json.loads(each)["choices"][0]["delta"]["content"] for each in pieces] == [
        "one",
        " two",
    ]
    assert it.endpoint.requests[0].body["odd"] == {"kept": [1]}
    assert result.sample.metrics["interrupted_calls"] == 1
    assert result.sample.messages[-1]["content"] == "one two"


@pytest.mark.parametrize("asked", [False, True])
async def test_the_usage_of_a_stream_is_recorded_and_shown_to_who_asked(asked):
    lines = []

    async def agent(context):
        more = {"stream_options": {"include_usage": True}} if asked else {}
        response = await post(context, stream=True, **more)
        lines.extend(line for line in response.text.splitlines() if line)

    async with rig(agent, say("thirteen it is")) as it:
        result = await it.run()
    assert lines[-1] == "data: [DONE]"
    assert ('"usage"' in "".join(lines)) is asked
    assert result.sample.metrics["completion_tokens"] == 3


async def test_the_answer_of_the_endpoint_passes_unchanged():
    got = []
    raw = b'{"choices":[{"message":{"content":"13"}}],"more": 1e2,  "other":[]}'

    async def agent(context):
        got.append(await post(context, temperature=0.5))

    async with rig(
        agent, evolve(say(""), raw=raw, headers={"x-own": "yes", "set-cookie": "a=b"})
    ) as it:
        await it.run()
    assert got[0].content == raw
    assert got[0].headers["x-own"] == "yes"
    assert "set-cookie" not in got[0].headers
    assert it.endpoint.requests[0].body["temperature"] == 0.5


async def test_conversations_are_told_apart():
    async def agent(context):
        await post(context)
        await post(context, messages=[{"role": "user", "content": "You are a helper."}])
        await post(
            context,
            messages=[
                QUESTION,
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "?"},
            ],
        )

    async with rig(agent, say("a"), say("b"), say("c")) as it:
        result = await it.run()
    assert [each["content"] for each in result.sample.messages] == [
        QUESTION["content"],
        "a",
        "?",
        "c",
    ]
    (branch,) = result.sample.extra_fields["branches"]
    assert [each["content"] for each in branch["messages"]] == ["You are a helper.", "b"]


async def test_the_list_of_models_is_passed_on_and_not_recorded():
    got = []

    async def agent(context):
        async with calling(context) as http:
            got.append((await http.get("/v1/models")).json())
            got.append((await http.get("/v1/models/org/name")).json())
        return []

    steps = [evolve(say(""), raw=json.dumps({"n": n}).encode()) for n in range(2)]
    async with rig(agent, *steps) as it:
        result = await it.run()
    assert got == [{"n": 0}, {"n": 1}]
    assert [each.path for each in it.endpoint.requests] == ["/v1/models", "/v1/models/org/name"]
    assert it.endpoint.requests[0].key == KEY
    assert "calls" not in result.sample.metrics


async def test_a_workflow_that_calls_nothing_has_no_sample_of_the_gateway():
    async def agent(context):
        await trio.lowlevel.checkpoint()

    async with rig(agent, say("")) as it:
        result = await it.run()
    assert result.sample is None


# --- the library's own clients ------------------------------------------------------------------


async def test_calls_of_the_library_are_recorded_once_and_by_their_conversation():
    pytest.importorskip("openai")
    from rollout.integrations.openai import get_recorder, rollout_client

    async def agent(context):
        ask = rollout_client().chat.completions.create
        await ask(model="p", messages=[QUESTION])
        stream = await ask(model="p", messages=[QUESTION], stream=True)
        assert [chunk async for chunk in stream]
        await rollout_client(conversation="sub/é").chat.completions.create(
            model="p", messages=[QUESTION]
        )
        await rollout_client(record=False).chat.completions.create(
            model="judge", messages=[{"role": "user", "content": "Is it right?"}]
        )
        recorder = get_recorder()
        recorder.extra_fields["mine"] = 1
        recorder.choose("sub/é")

    async with rig(agent, say("a"), say("b"), say("c"), say("yes")) as it:
        result = await it.run()
    assert result.sample.metrics["calls"] == 3
    assert result.sample.extra_fields["mine"] == 1
    assert result.sample.messages[-1]["content"] == "c"
    assert {each["conversation"] for each in result.sample.extra_fields["branches"]} == {"main"}
    assert "judge" not in json.dumps(result.sample.messages)
    assert len(it.endpoint.requests) == 4
    assert all("x-rollout-conversation" not in each.headers for each in it.endpoint.requests)


async def test_plain_functions_and_the_small_helper_go_through_the_gateway_too():
    pytest.importorskip("openai")
    from rollout.integrations.chat import chat

    async def agent(context):
        assert (await chat([QUESTION], model="p")).message["content"] == "13"

    async with rig(agent, say("13")) as it:
        result = await it.run()
    assert result.sample.metrics["calls"] == 1
    assert it.endpoint.requests[0].key == KEY


async def test_a_sample_source_of_the_workflow_wins():
    from rollout.context import SampleSource
    from rollout.types import RolloutSample

    class Own(SampleSource):
        async def get_sample(self):
            await trio.lowlevel.checkpoint()
            return RolloutSample(messages=[{"role": "user", "content": "own"}])

    async def agent(context):
        await post(context)
        context.set_sample_source(Own())

    async with rig(agent, say("13")) as it:
        result = await it.run()
    assert result.sample.messages == [{"role": "user", "content": "own"}]


# --- what goes wrong at the endpoint ------------------------------------------------------------


@needs_openai
async def test_a_refusal_passes_unchanged_and_the_sdk_tries_again():
    def agent(context):
        with sdk(context) as client:
            client.chat.completions.create(model="m", messages=[QUESTION])

    steps = (
        refuse(429, "slow down", retry_after="0.01"),
        refuse(500, retry_after="0.01"),
        say("13"),
    )
    async with rig(agent, *steps, gateway=ModelGateway(retries=0)) as it:
        result = await it.run()
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.metrics["retries"] == 2
    assert result.sample.metrics["calls"] == 1


async def test_an_error_is_that_of_the_endpoint_without_its_key():
    got = []

    async def agent(context):
        got.append(await post(context))

    async with rig(agent, refuse(400, f"no {KEY} here")) as it:
        await it.run()
    assert got[0].status_code == 400
    assert got[0].json()["error"]["type"] == "scripted"
    assert KEY not in got[0].text


async def test_an_endpoint_that_cannot_be_reached_is_blamed():
    got = []

    async def agent(context):
        got.append(await post(context))
        raise RuntimeError("the tool exited with 1")

    async with rig(agent, say(""), gateway=ModelGateway(retries=0)) as it:
        result = await it.run(chat_completions_url="http://127.0.0.1:9/v1")
    assert got[0].status_code == 502
    assert "cannot be reached" in got[0].json()["error"]["message"]
    assert (result.status, result.err_source) == (RolloutStatus.FAILURE, MODEL_ENDPOINT)


@needs_openai
async def test_a_refusal_of_the_sdk_in_process_is_blamed_on_the_endpoint():
    def agent(context):
        with sdk(context, max_retries=0) as client:
            client.chat.completions.create(model="m", messages=[QUESTION])

    async with rig(agent, refuse(503, "down for today"), gateway=ModelGateway(retries=0)) as it:
        result = await it.run()
    assert result.err_source == MODEL_ENDPOINT
    assert "down for today" in result.err_message


async def test_a_bad_request_is_blamed_on_nobody():
    async def agent(context):
        await post(context)
        raise RuntimeError("the tool exited with 1")

    async with rig(agent, refuse(400, "too long")) as it:
        result = await it.run()
    assert (result.status, result.err_source) == (RolloutStatus.FAILURE, None)


async def test_an_endpoint_that_says_nothing_costs_the_time_of_its_silence():
    got = []

    async def agent(context):
        got.append(await post(context))

    async with rig(agent, stall(), gateway=ModelGateway(silence_sec=0.05)) as it:
        await it.run()
    assert got[0].status_code == 504
    assert "silent" in got[0].json()["error"]["message"]


@needs_openai
@pytest.mark.parametrize("how", ["cut_after", "hold_after"])
async def test_a_stream_that_breaks_off_ends_with_an_error_and_without_a_mark(how):
    got = []

    def agent(context):
        openai = pytest.importorskip("openai")
        with sdk(context, max_retries=0) as client:
            stream = client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
            with pytest.raises(openai.APIError) as caught:
                got.extend(chunk.choices[0].delta.content for chunk in stream)
            got.append(str(caught.value))

    step = evolve(say("one two three"), **{how: 2})
    async with rig(agent, step, gateway=ModelGateway(silence_sec=0.2)) as it:
        result = await it.run()
    assert got[:2] == ["one", " two"]
    assert "the model's endpoint" in got[2]
    assert result.sample.metrics["failed_calls"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_end_is_cut_off(stream):
    got = []

    async def agent(context):
        try:
            got.append(await post(context, stream=stream))
        except httpx.RemoteProtocolError as error:
            got.append(error)

    step = say(" ".join(["word"] * 200))
    async with rig(agent, step, gateway=ModelGateway(max_answer_bytes=1000)) as it:
        await it.run()
    if stream:
        assert isinstance(got[0], httpx.RemoteProtocolError)
    else:
        assert got[0].status_code == 502
        assert "more than 1000 bytes" in got[0].json()["error"]["message"]


async def test_nonsense_is_passed_on_and_recorded_as_a_failure():
    got = []

    async def agent(context):
        got.append(await post(context))
        raise RuntimeError("the tool exited with 1")

    async with rig(agent, evolve(say(""), raw=b"<html>")) as it:
        result = await it.run()
    assert (got[0].status_code, got[0].content) == (200, b"<html>")
    assert result.err_source == MODEL_ENDPOINT


async def test_a_redirect_is_not_followed():
    got = []

    async def agent(context):
        got.append(await post(context))

    step = evolve(say(""), status=307, raw=b"", headers={"location": "http://127.0.0.1:9/"})
    async with rig(agent, step) as it:
        await it.run()
    assert got[0].status_code == 502
    assert "location" not in got[0].headers


# --- who may call -------------------------------------------------------------------------------


async def test_a_token_counts_while_its_rollout_runs_and_for_the_gateway_alone():
    contexts = []

    async def agent(context):
        contexts.append(context)
        await post(context)

    async with rig(agent, say("13"), api_key="the-key-of-the-server") as it:
        await it.run()
        late = await post(contexts[0])
        assert late.status_code == 401
        assert late.json()["error"]["code"] == "invalid_api_key"
        assert len(it.endpoint.requests) == 1
        async with httpx.AsyncClient(base_url=it.url, trust_env=False) as http:
            bearer = {"Authorization": f"Bearer {contexts[0].api_key}"}
            assert (await http.get("/health", headers=bearer)).status_code == 401
            for headers in ({}, {"Authorization": "Bearer the-key-of-the-server"}):
                assert (await http.get("/model/v1/models", headers=headers)).status_code == 401


async def test_what_the_gateway_does_not_have_is_refused():
    got = []

    async def agent(context):
        async with calling(context) as http:
            for method, path in (
                ("POST", "/v1/embeddings"),
                ("GET", "/v1/chat/completions"),
                ("GET", "/v1/models/../files"),
                ("GET", "/v1/models/%2e%2e/files"),
                ("DELETE", "/v1/models/a"),
                ("POST", "/"),
            ):
                response = await http.request(method, path, json={})
                got.append((response.status_code, response.json()["error"]["type"]))

    async with rig(agent, say("")) as it:
        await it.run()
        assert it.endpoint.requests == []
    assert got == [(404, "not_found_error")] * 6


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 400), (b"[]", 400), (b"{", 400), (b'{"a":NaN}', 400), (b'{"a":"' + b"x" * 3000, 413)],
)
async def test_bodies_that_are_no_request_are_refused(content, status):
    got = []

    async def agent(context):
        async with calling(context) as http:
            got.append(await http.post("/v1/chat/completions", content=content))

    async with rig(agent, say(""), max_request_bytes=2000) as it:
        await it.run()
        assert it.endpoint.requests == []
    assert got[0].status_code == status
    assert got[0].json()["error"]["message"]


async def test_the_end_of_a_rollout_cancels_its_calls():
    left = []

    async def agent(context):
        async def ask():
            left.append(await post(context))
            done.set()

        outside.start_soon(ask)
        await it.endpoint.received()

    done = trio.Event()
    async with rig(agent, stall()) as it, trio.open_nursery() as outside:
        await it.run()
        with trio.fail_after(20):
            await it.endpoint.requests[0].gone.wait()
            await done.wait()
    assert left[0].status_code == 401
    assert "has ended" in left[0].json()["error"]["message"]


async def test_many_agents_at_once_have_tokens_and_records_of_their_own():
    async def agent(context):
        reply = await post(context, messages=[{"role": "user", "content": context.rollout_id}])
        assert reply.json()["choices"][0]["message"]["content"] == context.rollout_id

    def echo(request):
        return say(request.body["messages"][0]["content"])

    results = []

    async with rig(agent, echo) as it:

        async def one():
            results.append(await it.run())

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
    assert all(
        each.sample.messages[0]["content"] == each.sample.messages[1]["content"] == each.rollout_id
        for each in results
    )


# --- where agents reach it ----------------------------------------------------------------------


async def test_the_advertised_url_is_what_agents_get():
    urls = []

    async def agent(context):
        urls.append(context.chat_completions_url)
        return []

    gateway = ModelGateway(advertise_url="http://host.docker.internal:8000/")
    async with rig(agent, say(""), gateway=gateway) as it:
        await it.run()
    assert urls == ["http://host.docker.internal:8000/model/v1"]


async def test_agents_of_a_server_on_a_unix_socket_have_an_address_of_the_loopback(tmp_path):
    from functools import partial

    from rollout.server import serve

    codes = []

    async def agent(context):
        codes.append((await post(context)).status_code)
        async with httpx.AsyncClient(trust_env=False) as http:
            base = context.chat_completions_url.removesuffix("/model/v1")
            bearer = {"Authorization": f"Bearer {context.api_key}"}
            codes.append((await http.get(f"{base}/health", headers=bearer)).status_code)
            codes.append((await http.get(f"{base}/health")).status_code)

    app = make_app(local_backend(workflow_of(agent)), gateway=ModelGateway())
    path = tmp_path / "server"
    async with scripted_endpoint(say("13")) as endpoint, trio.open_nursery() as nursery:
        await nursery.start(partial(serve, app, bind=f"unix:{path}", handle_signals=False))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://server") as http,
            RolloutClient(url="http://server", http_client=http) as client,
        ):
            result = await client.run_rollout(
                initial_messages=[QUESTION],
                chat_completions_url=endpoint.url,
                rollout_id=fresh_id(),
                grade=False,
            )
        nursery.cancel_scope.cancel()
    assert result.sample.metrics["calls"] == 1
    assert codes == [200, 404, 401]


async def test_a_server_that_is_not_run_by_serve_needs_an_advertised_url():
    app = make_app(local_backend(), gateway=ModelGateway())
    with pytest.raises(RolloutServerError, match="advertise_url"):
        async with app.serving():
            pass


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("advertise_url", "host:80"),
        ("advertise_url", 7),
        ("silence_sec", 0),
        ("max_answer_bytes", 0),
        ("stream_usage", "yes"),
    ],
)
def test_settings_are_checked(setting, value):
    with pytest.raises(InvalidFieldError, match=setting):
        ModelGateway(**{setting: value})


@pytest.mark.parametrize(
    ("bound", "given"),
    [
        ("http://0.0.0.0:80", "http://127.0.0.1:80"),
        ("http://[::]:80", "http://[::1]:80"),
        ("http://10.0.0.7:80", "http://10.0.0.7:80"),
    ],
)
def test_all_interfaces_are_reached_by_the_loopback(bound, given):
    gateway = ModelGateway()
    gateway.bound(bound)
    assert gateway.base_url == f"{given}/model/v1"
