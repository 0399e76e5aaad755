"""Routes of the gateway, and errors in the form that the clients of an API read. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from attrs import field, frozen

from rollout.codec import dump_json

__all__ = [
    "PREFIX",
    "ModelReply",
    "Route",
    "answer_headers",
    "error_event",
    "error_reply",
    "find_route",
    "forwarded",
]

PREFIX = "/model"
"""The first part of the path of every route of the gateway."""

Headers = Iterable[tuple[bytes, bytes]]

_FORWARDED = frozenset(
    {
        b"accept",
        b"content-type",
        b"idempotency-key",
        b"user-agent",
    }
)
_FORWARDED_PREFIXES = (b"openai-", b"x-stainless-")

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

_OPENAI_TYPES = {
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
        api: How calls of it are recorded; ``None`` if they are not.
    """

    path: str
    api: str | None = None


@frozen
class ModelReply:
    """A whole answer."""

    status: int
    body: bytes = field(repr=False)
    headers: list[tuple[bytes, bytes]] = field(factory=list, repr=False)


_POST = {
    "/v1/chat/completions": Route("/chat/completions", "chat"),
    "/v1/responses": Route("/responses", "responses"),
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


def forwarded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that its endpoint gets."""
    return [
        (name, value)
        for name, value in headers
        if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)
    ]


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


def error_reply(status: int, message: str, *, code: str | None = None) -> ModelReply:
    """Return an error as the clients of the API read it."""
    body = dump_json(_error(status, message, code))
    return ModelReply(status, body, [(b"content-type", b"application/json")])


def error_event(status: int, message: str) -> bytes:
    """Return an error as an event within a stream."""
    return b"data: " + dump_json(_error(status, message, None)) + b"\n\n"


def _error(status: int, message: str, code: str | None) -> dict[str, object]:
    kind = _OPENAI_TYPES.get(status)
    if kind is None:
        server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "server_error" if server else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
