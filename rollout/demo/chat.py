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
from typing import Any, cast

import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from rollout.codec import dump_json, parse_json
from rollout.demo.arithmetic import MODEL_NAME, ScriptedModel
from rollout.errors import InvalidBodyError
from rollout.server.asgi import RolloutHTTPConnection, RolloutRequest, drain

__all__ = ["create_chat_app"]

_UNSUPPORTED = {"stream": False, "n": 1, "tools": None, "functions": None}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class _Refusal(Exception):  # noqa: N818 - it is an answer
    """A request that gets an error for an answer; it does not leave this module."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class _ChatApp(QuartTrio):
    """Reads a body to its end even where it is refused: the next request follows it."""

    asgi_http_class = RolloutHTTPConnection
    request_class = RolloutRequest


def create_chat_app(model: ScriptedModel, api_key: str | None, *, vary: bool = False) -> QuartTrio:
    """Build the endpoint.

    Args:
        model: What answers.
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
            raise _Refusal("missing or wrong API key", status=401, code="invalid_api_key")

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
        return _json(_completion(next(numbers), body["messages"], reply))

    @app.errorhandler(_Refusal)
    async def refuse(error: _Refusal) -> Response:
        await trio.lowlevel.checkpoint()
        return _error(str(error), error.status, error.param, error.code)

    @app.errorhandler(HTTPException)
    async def refuse_http(error: HTTPException) -> Response:
        await trio.lowlevel.checkpoint()
        return _error(error.name.lower(), error.code or 500)

    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(dump_json(value), status, mimetype="application/json")


def _error(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"  # noqa: PLR2004
    return _json(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}, status
    )


def _read(data: bytes) -> dict[str, Any]:
    """Check a request; what this script cannot do is refused rather than ignored."""
    try:
        body = parse_json(data)
    except InvalidBodyError as error:
        raise _Refusal(str(error)) from None
    if not isinstance(body, dict):
        raise _Refusal("the body must be a JSON object")
    if not isinstance(body.get("model"), str):
        raise _Refusal("model must be a string", param="model")
    for name, only in _UNSUPPORTED.items():
        if body.get(name) not in (None, only, []):
            raise _Refusal(f"{name} is not supported by this scripted model", param=name)
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise _Refusal("seed must be a whole number", param="seed")
    _check_messages(body.get("messages"))
    return body


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise _Refusal("messages must be a list that is not empty", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _Refusal(f"{where} must be an object", param=where)
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _Refusal(
                f"{where}.role must be one of {', '.join(sorted(_ROLES))}", param=f"{where}.role"
            )
        if _text(message.get("content")) is None and message["role"] != "assistant":
            raise _Refusal(
                f"{where}.content must be a string or a list of text parts",
                param=f"{where}.content",
            )


def _text(content: Any) -> str | None:
    """Return the text of a message's content, ``None`` if it is none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return " ".join(texts) if len(texts) == len(parts) else None


def _question(body: dict[str, Any]) -> str:
    for message in reversed(body["messages"]):
        if message["role"] == "user":
            return _text(message["content"]) or ""
    raise _Refusal("messages must have one of role user", param="messages")


def _completion(number: int, messages: list[dict[str, Any]], reply: str) -> dict[str, Any]:
    """Build the answer. A script has no tokens: the usage counts words."""
    asked = sum(len((_text(message.get("content")) or "").split()) for message in messages)
    said = len(reply.split())
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": reply},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": asked,
            "completion_tokens": said,
            "total_tokens": asked + said,
        },
    }
