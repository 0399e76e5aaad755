"""Tells failures of the model's endpoint from those of the code that calls it.

What fails on the wire is marked where it is seen: an exception of the transport, or the response
that refuses. User code, an SDK and a framework may wrap it in exceptions of their own, so the mark
is looked for in all that an exception came from. Code that calls the endpoint with httpx or httpx2
by hand leaves no mark; its exceptions name the URL that they were asking.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

__all__ = [
    "endpoint_failure",
    "is_refusal",
    "mark_error",
    "mark_response",
    "refuses_key",
    "status_of",
]

_MARK = "rollout_endpoint_failure"
_REFUSALS = frozenset({401, 402, 403, 404, 408, 429})
_OF_KEYS = frozenset({401, 403})
_SERVER_ERROR = 500
_LIMIT_HEADER = "x-rollout-limit"


def is_refusal(status_code: int) -> bool:
    """Whether a status says that the endpoint is not usable, whatever is asked of it."""
    return status_code in _REFUSALS or status_code >= _SERVER_ERROR


def refuses_key(status_code: int | None) -> bool:
    """Whether a status says that the endpoint does not take the key."""
    return status_code in _OF_KEYS


def status_of(error: BaseException) -> int | None:
    """Return the status of the answer that an exception is about, ``None`` without one."""
    with suppress(Exception):  # the attributes of foreign exceptions may do anything
        response = getattr(error, "response", None)
        status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
        return status if isinstance(status, int) else None
    return None


def mark_error(error: BaseException) -> None:
    """Mark an exception as a failure of the endpoint."""
    setattr(error, _MARK, True)


def _refuses(response: Any) -> bool:
    """Whether a response is a refusal of the endpoint, not of a gateway that keeps a limit."""
    return is_refusal(response.status_code) and _LIMIT_HEADER not in response.headers


def mark_response(response: httpx.Response) -> None:
    """Mark a response if it is a refusal."""
    if _refuses(response):
        response.extensions[_MARK] = True


def endpoint_failure(error: BaseException, chat_url: str = "") -> BaseException | None:
    """Return the failure of the endpoint among an exception and those that it came from or holds.

    Args:
        error: The exception.
        chat_url: The endpoint, for exceptions of httpx and httpx2 without a mark.
    """
    found = (each for each in _origins(error) if _is_marked(each) or _is_of(chat_url, each))
    return next(found, None)


def _origins(error: BaseException) -> Iterator[BaseException]:
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
        pending += [each for each in (current.__cause__, current.__context__) if each is not None]


def _is_marked(error: BaseException) -> bool:
    with suppress(Exception):  # the attributes of foreign exceptions may do anything
        extensions: Any = getattr(getattr(error, "response", None), "extensions", None)
        return getattr(error, _MARK, False) is True or (
            isinstance(extensions, dict) and _MARK in extensions
        )
    return False


def _is_of(chat_url: str, error: BaseException) -> bool:
    """Whether httpx or httpx2, used by hand, failed to reach an endpoint or was refused there."""
    # Whoever raises their exceptions has loaded them.
    loaded: list[Any] = [sys.modules.get(name) for name in ("httpx", "httpx2")]
    httpx = next((each for each in loaded if each and isinstance(error, each.HTTPError)), None)
    if httpx is None or not chat_url:
        return False
    met: Any = error
    if isinstance(met, httpx.HTTPStatusError):
        failed = _refuses(met.response)
    else:
        failed = isinstance(met, httpx.TransportError) and not isinstance(
            met, (httpx.PoolTimeout, httpx.LocalProtocolError, httpx.UnsupportedProtocol)
        )
    with suppress(Exception):  # an exception may have no request, a chat URL may be malformed
        asked, endpoint = met.request.url, httpx.URL(chat_url)
        same = (asked.scheme, asked.host, asked.port) == (
            endpoint.scheme,
            endpoint.host,
            endpoint.port,
        )
        base = endpoint.path.rstrip("/").removesuffix("/chat/completions")
        return failed and same and asked.path.startswith(base)
    return False
