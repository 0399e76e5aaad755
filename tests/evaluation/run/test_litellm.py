"""Runs whose model is of a provider, asked through LiteLLM; the provider is played on loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import textwrap
from typing import ClassVar

import pytest
from evaluation.run.cases import TESTS, config_of, run_all, scripted
from integrations.scripted import refuse, say, scripted_endpoint
from support import local_backend, make_app, served

from rollout import AgentWorkflow, get_rollout_context
from rollout.errors import EvaluationError, EvaluationStoppedError, InvalidBodyError
from rollout.evaluation import read_records
from rollout.integrations.chat import chat

needs_litellm = pytest.mark.skipif(
    importlib.util.find_spec("litellm") is None, reason='needs pip install "trio-rollout[litellm]"'
)
pytestmark = pytest.mark.filterwarnings("ignore:::(litellm|pydantic|openai)")

KEY = "sk-the-key-of-the-provider"
APP = """
    import json, os
    from rollout import AgentWorkflow, get_rollout_context
    from rollout.integrations.chat import chat
    from support import local_backend, make_app

    class Asks(AgentWorkflow):
        async def run(self, ctx):
            context = get_rollout_context()
            print("has", dict(os.environ), context.chat_completions_url, context.api_key)
            reply = await chat(ctx.prompt, model=os.environ["ROLLOUT_MODEL"])
            return [*ctx.prompt, reply.message]

    app = make_app(local_backend(Asks))
"""


class Asks(AgentWorkflow):
    seen: ClassVar[list[tuple[str, str]]] = []

    async def run(self, ctx):
        context = get_rollout_context()
        self.seen.append((context.chat_completions_url, context.api_key))
        reply = await chat(ctx.prompt, model="any", record=False)
        return [*ctx.prompt, reply.message]


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    Asks.seen = []


def through(provider, **chat):
    return {"url": None, "model": "openai/gpt-x", "api_base": provider.url, **chat}


@needs_litellm
async def test_the_key_stays_here_and_tokens_are_counted(tmp_path, key, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    )
    app = tmp_path / "own_app.py"
    app.write_text(textwrap.dedent(APP))
    async with scripted_endpoint(say("42")) as provider:
        config = config_of(
            tmp_path, server={"app": f"{app}:app"}, rows=scripted(2), chat=through(provider)
        )
        run, records = await run_all(config, check_model=True)
    assert run.complete
    assert [each.passed for each in records] == [True, True]
    assert {each.key for each in provider.requests} == {KEY}
    assert {each.body["model"] for each in provider.requests} == {"gpt-x"}
    log = (run.folder / "server.log").read_text()
    assert "'ROLLOUT_MODEL': 'openai/gpt-x'" in log
    assert "OPENAI_API_KEY" not in log
    for path in run.folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["chat"] == {"url": None, "model": "openai/gpt-x", "api_base": provider.url}
    assert run.metrics.results.prompt_tokens.total > 0


@needs_litellm
async def test_agents_elsewhere_get_the_advertised_address_and_a_token_each(tmp_path, key):
    """Their calls are counted though neither agent nor sample says anything of them."""
    async with scripted_endpoint(
        say("42", usage={"prompt_tokens": 7, "completion_tokens": 2})
    ) as provider:
        async with served(make_app(local_backend(Asks))) as url:
            bind = "127.0.0.1:0"
            config = config_of(
                tmp_path, server=url, rows=scripted(2), chat=through(provider, bind=bind)
            )
            run, _ = await run_all(config)
            (first, token), (second, other) = Asks.seen
            (tmp_path / "more").mkdir()
            advertised = through(provider, advertise_url="http://host.docker.internal:9")
            config = config_of(tmp_path / "more", server=url, rows=scripted(1), chat=advertised)
            # It cannot be reached from here, but the test call of this process goes through.
            _, (record,) = await run_all(config, check_model=True)
    assert first == second
    assert token != other
    assert KEY not in (token, other)
    assert Asks.seen[2][0] == "http://host.docker.internal:9/model/v1"
    assert record.err_source == "model_endpoint"
    tokens = run.metrics.results
    assert (tokens.prompt_tokens.total, tokens.completion_tokens.total) == (14, 4)


@needs_litellm
async def test_a_key_that_the_provider_refuses(tmp_path, key):
    async with scripted_endpoint(lambda _: refuse(401, f"no {KEY}")) as provider:
        async with served(make_app(local_backend(Asks))) as url:
            config = config_of(tmp_path, server=url, rows=scripted(2), chat=through(provider))
            with pytest.raises(
                EvaluationError, match=r"model openai/gpt-x failed: .*401: "
            ) as early:
                await run_all(config, check_model=True)
            with pytest.raises(EvaluationStoppedError, match="refuses the key") as late:
                await run_all(config)
    assert KEY not in f"{early.value} {late.value}"
    assert not list(read_records(tmp_path / "out"))


async def test_litellm_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm", None)
    chat = {"url": None, "model": "openai/gpt-x"}
    config = config_of(tmp_path, server="http://fake", rows=scripted(1), chat=chat)
    with pytest.raises(EvaluationError, match=r"pip install \"trio-rollout\[litellm\]"):
        await run_all(config)


@needs_litellm
async def test_an_address_that_is_taken(tmp_path, key):
    async with scripted_endpoint(say("")) as provider:
        bind = provider.url.removeprefix("http://").removesuffix("/v1")
        config = config_of(
            tmp_path, server="http://fake", rows=scripted(1), chat=through(provider, bind=bind)
        )
        with pytest.raises(EvaluationError, match=r"chat: cannot listen on 127.0.0.1"):
            await run_all(config)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"url": None}, "chat.url: is required, or a model of a provider without it"),
        ({"url": None, "model": "gpt"}, "chat.url: is required, or a model of a provider"),
        ({"bind": "0.0.0.0:1"}, "chat.bind: goes with a model that is asked through LiteLLM"),
        ({"advertise_url": "nowhere"}, "chat.advertise_url: "),
    ],
)
def test_what_a_config_may_not_say(tmp_path, chat, message):
    with pytest.raises(InvalidBodyError, match=message):
        config_of(tmp_path, server="http://fake", rows=scripted(1), chat=chat)
