"""The demo's chat endpoint, as an OpenAI client sees it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import httpx
import pytest

from rollout.demo.arithmetic import MODEL_NAME, ScriptedModel
from rollout.demo.chat import create_chat_app

KEY = "chat-key"


@asynccontextmanager
async def chat(key=KEY, **model):
    app = create_chat_app(ScriptedModel(**{"error_rate": 0.0, **model}), KEY)
    transport = httpx.ASGITransport(app=app)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://chat/v1", headers=headers
    ) as http:
        yield http


def asking(content="What is 6 * 7?", **more):
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], **more}


async def test_answers_in_the_form_of_the_openai_api(autojump_clock):
    async with chat() as http:
        first = (await http.post("/chat/completions", json=asking())).json()
        second = (await http.post("/chat/completions", json=asking())).json()
    assert first["object"] == "chat.completion"
    assert first["model"] == MODEL_NAME
    assert first["id"] != second["id"]
    assert first["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "6 * 7 = 42"},
            "finish_reason": "stop",
        }
    ]
    assert first["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


async def test_takes_as_long_as_it_says(autojump_clock):
    import trio

    model = ScriptedModel(think_sec=100)
    async with chat(think_sec=100) as http:
        started = trio.current_time()
        await http.post("/chat/completions", json=asking())
        assert trio.current_time() - started == pytest.approx(model.thinking_sec("What is 6 * 7?"))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "1 + 1"}, {"role": "user", "content": "6 * 7"}],
        [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": None},
         {"role": "user", "content": [{"type": "text", "text": "6 * 7"}]}],
        [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": "1 + 1"}],
    ],
)  # fmt: skip
async def test_answers_the_last_user_message(autojump_clock, messages):
    async with chat() as http:
        answer = await http.post("/chat/completions", json=asking() | {"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "6 * 7 = 42"


async def test_half_a_pair_of_surrogates_is_only_a_character(autojump_clock):
    """JSON can say it, UTF-8 cannot."""
    body = json.dumps(asking("\ud800 6 * 7"))
    assert "\\ud800" in body
    async with chat() as http:
        answer = await http.post("/chat/completions", content=body)
    assert answer.json()["choices"][0]["message"]["content"] == "6 * 7 = 42"


async def test_says_what_it_can_do_where_there_is_no_sum(autojump_clock):
    async with chat() as http:
        answer = await http.post("/chat/completions", json=asking("Who are you?"))
    assert "a script that does sums" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"temperature": 2},
        {"stream": False},
        {"n": 1},
        {"n": None},
        {"tools": [{"type": "function"}]},
    ],
)
async def test_ignores_what_makes_no_difference(autojump_clock, harmless):
    async with chat() as http:
        assert (await http.post("/chat/completions", json=asking(**harmless))).status_code == 200


@pytest.mark.parametrize("usage", [False, True])
async def test_streams(autojump_clock, usage):
    """Frameworks of agents ask for streams alone."""
    body = asking(stream=True, stream_options={"include_usage": usage})
    async with chat() as http:
        answer = await http.post("/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": "6 * 7 = 42"}
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert ("usage" in chunks[-1]) is usage


async def test_lists_its_model():
    async with chat() as http:
        answer = await http.get("/models")
    assert [entry["id"] for entry in answer.json()["data"]] == [MODEL_NAME]


@pytest.mark.parametrize("key", [None, "", "another", KEY + "x", "caf\u00e9"])
@pytest.mark.parametrize("path", ["/models", "/chat/completions", "/nothing"])
async def test_asks_for_the_key(key, path):
    async with chat(key=None) as http:
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        answer = await http.post(path, content=b"{", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def without(name):
    body = asking()
    del body[name]
    return body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"\xff", None),
        (b"[]", None),
        (b'{"model": NaN}', None),
        (b"[" * 100_000, None),
        (without("model"), "model"),
        (asking(model=7), "model"),
        (without("messages"), "messages"),
        (asking(messages=[]), "messages"),
        (asking(messages="6 * 7"), "messages"),
        (asking(messages=["6 * 7"]), "messages[0]"),
        (asking(messages=[{"content": "6 * 7"}]), "messages[0].role"),
        (asking(messages=[{"role": "robot", "content": "6 * 7"}]), "messages[0].role"),
        (asking(messages=[{"role": ["user"], "content": "6 * 7"}]), "messages[0].role"),
        (asking(messages=[{"role": "user"}]), "messages[0].content"),
        (asking(messages=[{"role": "user", "content": 7}]), "messages[0].content"),
        (asking([{"type": "image_url"}]), "messages[0].content"),
        (asking(["6 * 7"]), "messages[0].content"),
        (asking(messages=[{"role": "system", "content": "6 * 7"}]), "messages"),
        (asking(stream="yes"), "stream"),
        (asking(n=2), "n"),
        (asking(functions=[{"name": "f"}]), "functions"),
    ],
)
async def test_refuses_like_the_openai_api(body, param):
    async with chat() as http:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await http.post("/chat/completions", content=data)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


async def test_takes_any_model_name_and_says_which_model_answered():
    async with chat() as http:
        answer = await http.post("/chat/completions", json=asking(model="policy"))
    assert answer.json()["model"] == MODEL_NAME


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/chat/completions", 405), ("GET", "/nothing", 404), ("POST", "/models", 405)],
)
async def test_other_routes(method, path, status):
    async with chat() as http:
        answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
