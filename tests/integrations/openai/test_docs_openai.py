"""The examples of the page about the OpenAI SDK do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("openai", reason='needs pip install "trio-rollout[openai]"')

from integrations.scripted import call, say, scripted_endpoint
from support import fresh_id, local_backend, make_app, served

from rollout import RolloutContext
from rollout.client import RolloutClient
from rollout.integrations.openai import get_recorder, rollout_client

PAGE = (Path(__file__).parents[3] / "docs" / "openai.md").read_text("utf-8")
QUESTION = {"role": "user", "content": "What is 6 * 7?"}


def example(marker):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if marker in block]
    namespace = {"__name__": "documented"}
    exec(code, namespace)
    return namespace


async def sample_of(app, endpoint):
    async with served(app) as url, RolloutClient(url=url) as client:
        result = await client.run_rollout(
            initial_messages=[QUESTION],
            chat_completions_url=endpoint.url,
            rollout_id=fresh_id(),
            grade=False,
        )
    assert result.err_message is None
    return result.sample


async def test_the_workflow():
    async with scripted_endpoint(call("multiply", left=6, right=7), say("It is 42.")) as endpoint:
        sample = await sample_of(example("class Solve")["app"], endpoint)
    assert [each["content"] for each in sample.messages] == [
        QUESTION["content"],
        None,
        "42",
        "It is 42.",
    ]


async def test_a_lifespan_of_ones_own():
    async with scripted_endpoint(say("42")) as endpoint:
        lifespan = example("async def lifespan")["lifespan"]
        app = make_app(local_backend(example("class Ask")["Ask"]), lifespan=lifespan)
        assert len((await sample_of(app, endpoint)).messages) == 2


async def test_best_of_three():
    async with scripted_endpoint(say("42"), say("It is 42."), say("42?")) as endpoint:
        app = make_app(local_backend(example("class BestOfThree")["BestOfThree"]))
        sample = await sample_of(app, endpoint)
    assert sample.messages[-1]["content"] == "It is 42."
    assert len(sample.extra_fields["branches"]) == 2


async def test_the_stream():
    async with scripted_endpoint(say("It is 42.")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url):
            text_of = example("async def text_of")["text_of"]
            assert await text_of(rollout_client(), [QUESTION]) == "It is 42."


async def test_the_plain_function():
    async with scripted_endpoint(say("42")) as endpoint:
        app = make_app(local_backend(example("class Plain")["Plain"]))
        assert len((await sample_of(app, endpoint)).messages) == 2


async def test_the_helper():
    async with scripted_endpoint(say("42 or 43?"), say("42")) as endpoint:
        app = make_app(local_backend(example("class Ask")["Ask"]))
        assert len((await sample_of(app, endpoint)).messages) == 4


async def test_the_script():
    async with scripted_endpoint(say("Hello.")) as endpoint:
        messages = await example("async def try_out")["try_out"](endpoint.url)
    assert messages[-1] == {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize("title", ["Metric", "Field"])
async def test_the_tables_name_what_there_is(title):
    (table,) = re.findall(rf"^\| {title} \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    first = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    async with scripted_endpoint(say("42")) as endpoint:
        with RolloutContext(chat_completions_url=endpoint.url) as rollout:
            create = rollout_client().chat.completions.create
            tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
            for text in ("a", "b"):
                question = {"role": "user", "content": text}
                await create(model="policy", messages=[question], tools=tools)
            get_recorder().note_unrecorded("/v1/completions")
            sample = await rollout.get_sample()
    # Problems are tested where there are some.
    there = {"Metric": sample.metrics, "Field": {**sample.extra_fields, "call_problems": []}}
    assert named == set(there[title])
