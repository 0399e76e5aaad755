"""Routes of the gateway, and errors in the form that the clients of an API read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from attrs import field, frozen

from rollout.codec import dump_json

__all__ = [
    "LIMIT_HEADER",
    "PREFIX",
    "RECORDED",
    "TRACE_HEADERS",
    "ModelReply",
    "Route",
    "answer_headers",
    "as_retry",
    "error_event",
    "error_reply",
    "expects_anthropic",
    "find_route",
    "forwarded",
]

PREFIX = "/model"
"""The first part of the path of every route of the gateway."""

LIMIT_HEADER = b"x-rollout-limit"
"""The header of a refusal that names the limit which the rollout has reached."""

RECORDED = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "messages",
}
"""The routes whose calls are recorded and counted, and what `Call.api` says of them."""

Headers = Iterable[tuple[bytes, bytes]]

TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
"""The headers of W3C that name the span of who sends a request."""

_FORWARDED = TRACE_HEADERS | frozenset(
    {
        b"accept",
        b"content-type",
        b"idempotency-key",
        b"user-agent",
    }
)
_FEW_DIGITS = 9
_RETRY_COUNT = b"x-stainless-retry-count"
_FORWARDED_PREFIXES = (b"anthropic-", b"openai-", b"x-stainless-")

_NOT_RETURNED = frozenset(
    {
        b"alt-svc",
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"server",
        b"set-cookie",
        b"strict-transport-security",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}


@frozen
class Route:
    """A route that endpoints have.

    Attributes:
        path: What is added to the endpoint's base URL.
        anthropic: Whether it is of Anthropic's API, not of OpenAI's.
    """

    path: str
    anthropic: bool = False

    @property
    def counts(self) -> bool:
        """Whether the model is called, which is recorded and limited."""
        return self.path in RECORDED


@frozen
class ModelReply:
    """A whole answer."""

    status: int
    body: bytes = field(repr=False)
    headers: list[tuple[bytes, bytes]] = field(factory=list, repr=False)


_POST = {
    "/v1/chat/completions": Route("/chat/completions"),
    "/v1/completions": Route("/completions"),
    "/v1/responses": Route("/responses"),
    "/v1/messages": Route("/messages", anthropic=True),
    "/v1/messages/count_tokens": Route("/messages/count_tokens", anthropic=True),
}
_MODELS = "/v1/models"


def find_route(method: str, path: str) -> Route | None:
    """Return the route of a request; ``None`` for what the gateway does not pass on.

    Args:
        method: The HTTP method.
        path: The decoded path without `PREFIX`.
    """
    if method == "POST":
        return _POST.get(path)
    if method == "GET" and (path == _MODELS or path.startswith(f"{_MODELS}/")):
        rest = path[len(_MODELS) :]
        parts = rest.split("/")[1:]
        if all(part not in {"", ".", ".."} and part.isprintable() for part in parts):
            return Route(f"/models{rest}")
    return None


def expects_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a client of Anthropic's API sends a request."""
    return path.startswith("/v1/messages") or b"anthropic-version" in headers


def forwarded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that its endpoint gets."""
    return [
        (name, value)
        for name, value in headers
        if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)
    ]


def as_retry(headers: list[tuple[bytes, bytes]], failures: int) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that has failed so often, which say so as SDKs do."""
    if not failures:
        return headers
    given = dict(headers).get(_RETRY_COUNT, b"0")
    count = failures + (int(given) if given.isdigit() and len(given) < _FEW_DIGITS else 0)
    others = [pair for pair in headers if pair[0] != _RETRY_COUNT]
    return [*others, (_RETRY_COUNT, b"%d" % count)]


def answer_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of an endpoint's answer that the agent gets."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {
        name.strip().lower()
        for key, value in lower
        if key == b"connection"
        for name in value.split(b",")
    }
    return [pair for pair in lower if pair[0] not in _NOT_RETURNED | named]


def error_reply(
    status: int, message: str, *, anthropic: bool, code: str | None = None
) -> ModelReply:
    """Return an error as the clients of an API read it."""
    body = dump_json(_error(status, message, anthropic, code))
    return ModelReply(status, body, [(b"content-type", b"application/json")])


def error_event(status: int, message: str, *, anthropic: bool) -> bytes:
    """Return an error as an event within a stream."""
    name = b"event: error\n" if anthropic else b""
    return name + b"data: " + dump_json(_error(status, message, anthropic)) + b"\n\n"


def _error(status: int, message: str, anthropic: bool, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status)
    if kind is None:
        server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "invalid_request_error"
        if server:
            kind = "api_error" if anthropic else "server_error"
    if anthropic:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
