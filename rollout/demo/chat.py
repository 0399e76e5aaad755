"""An OpenAI-compatible chat endpoint around the scripted model.

``POST /v1/chat/completions`` and ``GET /v1/models``, both for the one bearer key, if there is
one. A request may name any model; the scripted one answers. Refusals have the form of the OpenAI
API: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import hmac
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn, cast

import hypercorn.trio
import trio
from hypercorn.config import Config
from quart import Response, abort, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from rollout.codec import dump_json, parse_json
from rollout.demo.arithmetic import MODEL_NAME, ScriptedModel
from rollout.errors import InvalidBodyError
from rollout.integrations.recording.responses import text_of
from rollout.server.asgi import RolloutHTTPConnection, RolloutRequest, drain

__all__ = ["chat_server", "create_chat_app"]

_UNSUPPORTED = {"n": 1, "functions": None}
"""Tools may be offered; this model answers without them."""
_ROLES = ("assistant", "developer", "system", "tool", "user")
_GRACE_SEC = 0.5
_KEEP_ALIVE_SEC = 75.0
"""Longer than httpx keeps an idle connection, so that no request meets one that is closing."""


class _ChatApp(QuartTrio):
    """Reads a body to its end even where it is refused: the next request follows it."""

    asgi_http_class = RolloutHTTPConnection
    request_class = RolloutRequest


@asynccontextmanager
async def chat_server(app: QuartTrio, bind: str) -> AsyncGenerator[str, None]:
    """Serve the endpoint for the length of the block; yields its URL."""
    config = Config()
    config.bind = [bind]
    config.accesslog = None
    config.errorlog = None
    config.keep_alive_timeout = _KEEP_ALIVE_SEC
    config.graceful_timeout = _GRACE_SEC
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(
            partial(hypercorn.trio.serve, app, config, shutdown_trigger=stop.wait)
        )
        yield urls[0]
        stop.set()


def create_chat_app(model: ScriptedModel, api_key: str | None, *, vary: bool = False) -> QuartTrio:
    """Build the endpoint.

    Args:
        model: Gives the answers.
        api_key: The bearer key that every request must present; ``None`` asks for none.
        vary: Whether each repetition of a question without a seed is another draw.
    """
    app = _ChatApp("rollout.demo.chat", static_folder=None)
    numbers = itertools.count(1)
    asked: Counter[str] = Counter()
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    @app.before_request
    async def authenticate() -> None:
        await trio.lowlevel.checkpoint()
        given = request.headers.get("Authorization", "").encode("latin-1", errors="replace")
        if expected is not None and not hmac.compare_digest(given, expected):
            _refuse("missing or wrong API key", status=401, code="invalid_api_key")

    @app.after_request
    async def read_to_the_end(response: Response) -> Response:
        return await drain(cast("RolloutRequest", request), response)

    @app.get("/v1/models")
    async def models() -> Response:
        await trio.lowlevel.checkpoint()
        entry = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "rollout-demo"}
        return _json({"object": "list", "data": [entry]})

    @app.post("/v1/chat/completions")
    async def complete() -> Response:
        data = await request.get_data()
        body = _read(data if isinstance(data, bytes) else data.encode())
        question = _question(body)
        await trio.sleep(model.thinking_sec(question))
        seed = body.get("seed")
        if seed is None and vary:
            seed = -asked[question] or None  # the first time as ever
            asked[question] += 1
        reply = model.answer(question, seed)
        completion = _completion(next(numbers), body["messages"], reply)
        if not body.get("stream"):
            return _json(completion)
        events = _events(completion, body.get("stream_options"))
        return Response(events, mimetype="text/event-stream")

    @app.errorhandler(HTTPException)
    async def refuse_http(error: HTTPException) -> Response:
        await trio.lowlevel.checkpoint()
        return _error(error.name.lower(), status=error.code or 500)

    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(dump_json(value), status, mimetype="application/json")


def _error(
    message: str, *, param: str | None = None, status: int = 400, code: str | None = None
) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"  # noqa: PLR2004
    error = {"message": message, "type": kind, "param": param, "code": code}
    return _json({"error": error}, status)


def _refuse(message: str, **details: Any) -> NoReturn:
    """End a request with an error for an answer, see `_error`."""
    abort(_error(message, **details))


def _read(data: bytes) -> dict[str, Any]:
    """Check a request; what this script cannot do is refused rather than ignored."""
    try:
        body = parse_json(data)
    except InvalidBodyError as error:
        _refuse(str(error))
    if not isinstance(body, dict):
        _refuse("the body must be a JSON object")
    if not isinstance(body.get("model"), str):
        _refuse("model must be a string", param="model")
    for name, only in _UNSUPPORTED.items():
        if body.get(name) not in (None, only, []):
            _refuse(f"{name} is not supported by this scripted model", param=name)
    if type(body.get("stream")) not in (bool, type(None)):
        _refuse("stream must be a boolean", param="stream")
    if type(body.get("seed")) not in (int, type(None)):
        _refuse("seed must be a whole number", param="seed")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages must be a list that is not empty", param="messages")
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]")
    return body


def _check(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        _refuse(f"{where} must be an object", param=where)
    if message.get("role") not in _ROLES:
        _refuse(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if text_of(message.get("content")) is None and message["role"] != "assistant":
        _refuse(
            f"{where}.content must be a string or a list of text parts", param=f"{where}.content"
        )


def _question(body: dict[str, Any]) -> str:
    for message in reversed(body["messages"]):
        if message["role"] == "user":
            return text_of(message["content"]) or ""
    _refuse("messages must have one of role user", param="messages")


def _completion(number: int, messages: list[dict[str, Any]], reply: str) -> dict[str, Any]:
    """Build the answer. A script has no tokens: the usage counts words."""
    asked = sum(len((text_of(message.get("content")) or "").split()) for message in messages)
    said = len(reply.split())
    message = {"role": "assistant", "content": reply}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": asked,
            "completion_tokens": said,
            "total_tokens": asked + said,
        },
    }


def _events(completion: dict[str, Any], options: Any) -> bytes:
    """Return an answer as a stream of one piece, and of its usage if the options ask for that."""
    head = {**completion, "object": "chat.completion.chunk"}
    usage, (choice,) = head.pop("usage"), head.pop("choices")
    piece = {"index": 0, "delta": choice["message"], "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks: list[dict[str, Any]] = [{"choices": [piece]}, {"choices": [end]}]
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    events = [dump_json(head | chunk) for chunk in chunks]
    return b"".join(b"data: %s\n\n" % event for event in [*events, b"[DONE]"])
