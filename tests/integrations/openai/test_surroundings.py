"""What a client of the SDK is bound to, and where it explains itself."""

from __future__ import annotations

import logging
import sys

import pytest

pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')

import openai
import trio
from integrations.openai.agents import KEY, QUESTION, trajectory
from integrations.scripted import refuse, say, scripted_endpoint

from rollout import RolloutContext
from rollout.errors import IntegrationError
from rollout.integrations.chat import chat
from rollout.integrations.openai import get_recorder, rollout_client, share_connections
from rollout.integrations.transport import recording


def entered(endpoint, key=KEY):
    return RolloutContext(chat_completions_url=endpoint.url, api_key=key)


async def ask(client, text="What is 6 + 7?", **options):
    return await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": text}], **options
    )


async def test_outside_of_a_rollout():
    with pytest.raises(IntegrationError, match="no rollout is running here"):
        rollout_client()


async def test_in_a_worker_thread():
    with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1"):
        with pytest.raises(IntegrationError, match="worker thread"):
            await trio.to_thread.run_sync(rollout_client)


async def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with RolloutContext(chat_completions_url="http://127.0.0.1:9/v1") as rollout:
        with pytest.raises(IntegrationError, match=r'pip install "trio-rollout\[openai\]"'):
            rollout_client()
    assert rollout.sample_source is None


async def test_all_clients_of_a_rollout_share_its_recorder():
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint) as rollout:
            await ask(rollout_client(), "first")
            await ask(rollout_client(), "second")
            await ask(rollout_client().with_options(max_retries=0), "third")
            await chat([QUESTION], model="policy")
            sample = await rollout.get_sample()
            assert rollout.sample_source is get_recorder()
    assert sample.metrics["calls"] == 4
    assert sample.messages[0] == QUESTION
    assert len(sample.extra_fields["branches"]) == 3


async def test_a_rollout_without_a_key_sends_none(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-key-of-somebody-else")
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint, key=None):
            await ask(rollout_client())
    assert endpoint.requests[0].key is None


async def test_nothing_of_an_account_in_the_environment_gets_to_the_endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://model.invalid/v1")
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint):
            await ask(rollout_client())
    assert "secret" not in str(endpoint.requests[0].headers).replace(KEY, "")


async def test_the_key_stays_at_its_endpoint():
    """A client that is pointed elsewhere neither tells the key nor is recorded."""
    async with (
        scripted_endpoint(say("13")) as endpoint,
        scripted_endpoint(say("14")) as other,
    ):
        with entered(endpoint):
            client = rollout_client()
            await ask(client.with_options(base_url=other.url))
            await ask(client.with_options(base_url=other.url, api_key="their-own-key"))
            assert get_recorder().calls == []
    assert [request.key for request in other.requests] == [None, "their-own-key"]


async def test_no_redirect_is_followed():
    async with scripted_endpoint(say("13")) as other:
        step = refuse(307, location=f"{other.url}/chat/completions")
        async with scripted_endpoint(type(step)(status=307, raw=b"", headers=step.headers)) as here:
            with entered(here):
                with pytest.raises(openai.APIStatusError) as caught:
                    await ask(rollout_client())
    assert caught.value.status_code == 307
    assert other.requests == []


async def test_further_options_go_to_the_sdk():
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint):
            client = rollout_client(
                default_headers={"X-Tenant": "t1"}, default_query={"tenant": "t2"}
            )
            await ask(client)
    request = endpoint.requests[0]
    assert (request.headers["x-tenant"], request.path) == (
        "t1",
        "/v1/chat/completions?tenant=t2",
    )


async def test_a_failure_that_stays_is_counted_once():
    async with scripted_endpoint(refuse(503, f"no {KEY}", retry_after="0.01")) as endpoint:
        with entered(endpoint) as rollout:
            with pytest.raises(openai.InternalServerError):
                await ask(rollout_client(max_retries=2))
            sample = await rollout.get_sample()
    metrics = sample.metrics
    assert (metrics["calls"], metrics["failed_calls"], metrics["retries"]) == (1, 1, 2)
    assert [each.get("retry") for each in sample.extra_fields["call_problems"]] == [None, 1, 2]
    assert KEY not in str(sample.extra_fields)
    assert sample.messages == [QUESTION]
    trajectory(sample)


async def test_calls_at_once_do_not_corrupt_the_record():
    async with scripted_endpoint(
        lambda request: say(f"re: {request.body['messages'][-1]['content']}")
    ) as endpoint:
        with entered(endpoint) as rollout:
            client = rollout_client()

            async def talk(name):
                history = [{"role": "user", "content": name}]
                for turn in range(3):
                    reply = await client.chat.completions.create(model="policy", messages=history)
                    history += [reply.choices[0].message, {"role": "user", "content": f"{turn}"}]

            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(talk, f"task {number}")
            sample = await rollout.get_sample()
    assert sample.metrics["calls"] == 24
    conversations = [sample.messages, *(b["messages"] for b in sample.extra_fields["branches"])]
    assert len(conversations) == 8
    for messages in conversations:
        name = messages[0]["content"]
        texts = [message["content"] for message in messages]
        assert texts == [name, f"re: {name}", "0", "re: 0", "1", "re: 1"]


async def test_nothing_that_is_logged_or_shown_has_the_key(caplog):
    caplog.set_level(logging.DEBUG)
    async with scripted_endpoint(refuse(401, "who are you?")) as endpoint:
        with entered(endpoint):
            client = rollout_client()
            with pytest.raises(openai.AuthenticationError):
                await ask(client)
            assert KEY not in repr(client._client._transport)
            assert KEY not in repr(get_recorder()) + repr(get_recorder().calls)
    assert "401" in caplog.text
    assert KEY not in caplog.text


async def test_closing_a_client_leaves_shared_connections_alone():
    async with scripted_endpoint(say("13")) as endpoint:
        async with share_connections():
            with entered(endpoint):
                for _ in range(3):
                    async with rollout_client() as client:
                        await ask(client)
            assert (endpoint.connections, endpoint.open_connections) == (1, 1)
        await endpoint.all_closed()


async def test_a_client_that_outlives_the_shared_connections_still_works():
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint):
            async with share_connections():
                client = rollout_client()
            await ask(client)
        await endpoint.all_closed()
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("way", ["sdk", "stream", "chat"])
async def test_a_request_is_recorded_without_reading_it_again(monkeypatch, way):
    """Nor is it recorded as what its caller makes of it later."""
    read = []
    monkeypatch.setattr(recording, "parse", lambda data: read.append(data))
    history = [{"role": "user", "content": "first"}]
    async with scripted_endpoint(say("13")) as endpoint:
        with entered(endpoint) as rollout:
            if way == "chat":
                await chat(history, model="policy", seed=7)
            else:
                options = {"stream": True} if way == "stream" else {}
                reply = await rollout_client().chat.completions.create(
                    model="other", messages=history, extra_body={"model": "policy"}, **options
                )
                if way == "stream":
                    async with reply:
                        assert [chunk async for chunk in reply]
            history[0]["content"] = "changed"
            sample = await rollout.get_sample()
    assert read == []
    assert [each["content"] for each in sample.messages] == ["first", "13"]
    assert sample.metrics["completion_tokens"] == 1
    (sent,) = endpoint.requests
    assert sent.body["messages"] == [{"role": "user", "content": "first"}]
    assert sent.body["model"] == "policy"
