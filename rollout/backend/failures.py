"""What an exception out of user code means for the rollout that it ended."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import trio

from rollout.jsonfit import utf8
from rollout.types import RolloutErrorCategory

__all__ = ["categorize_exception", "describe_exception", "format_exception", "redact"]

_PROVIDER_ERRORS = frozenset(
    {
        "SandboxConnectionException",
        "SandboxRateLimitException",
        "PoolStateStoreUnavailableException",
    }
)
_PROVIDER_API_ERRORS = frozenset({"SandboxApiException", "SandboxAPIError"})
_PROVIDER_STATUSES = frozenset({401, 402, 403, 429, 500, 502, 503, 504})

_SHORTEST_SECRET = 4
_LONGEST_MESSAGE = 8_000


def categorize_exception(error: BaseException) -> RolloutErrorCategory:
    """Map an exception to its category.

    Timeouts of Python and of trio are `timeout`; value, type and assertion errors are
    `validation_error`; what a sandbox provider says of itself is `http_error`, told by the
    names of its exceptions so that no SDK has to be installed; the rest is `agent_error`.
    A group has the category that all of its members share.
    """
    if isinstance(error, BaseExceptionGroup):
        categories = {categorize_exception(inner) for inner in error.exceptions}
        return categories.pop() if len(categories) == 1 else RolloutErrorCategory.AGENT_ERROR
    if isinstance(error, (TimeoutError, trio.TooSlowError)):
        return RolloutErrorCategory.TIMEOUT
    if isinstance(error, (ValueError, TypeError, AssertionError)):
        return RolloutErrorCategory.VALIDATION_ERROR
    names = {cls.__name__ for cls in type(error).__mro__}
    status = getattr(error, "status_code", None)
    if names & _PROVIDER_ERRORS or (
        names & _PROVIDER_API_ERRORS and isinstance(status, int) and status in _PROVIDER_STATUSES
    ):
        return RolloutErrorCategory.HTTP_ERROR
    return RolloutErrorCategory.AGENT_ERROR


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - a user's __str__ may do anything
        return f"(its message cannot be shown: {type(broken).__name__})"


def describe_exception(error: BaseException) -> str:
    """Say in one text what went wrong: messages, or type names where there are none."""
    if isinstance(error, BaseExceptionGroup):
        members = "; ".join(describe_exception(inner) for inner in error.exceptions)
        return members if len(error.exceptions) == 1 else f"{error.message}: {members}"
    text = utf8(_text(error))[:_LONGEST_MESSAGE]
    if not text or isinstance(error, KeyError) or not isinstance(error, Exception):
        # Their messages say nothing without the type: a bare key, an exit code.
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text


def redact(text: str, secrets: Iterable[str | None]) -> str:
    """Blank out secrets in *text*. Very short ones are left: they would shred it."""
    for secret in secrets:
        if secret and len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "[redacted]")
    return text


def format_exception(error: BaseException, secrets: Iterable[str | None]) -> str:
    """Format a traceback for the server's own log, without secrets."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001 - a user's __str__ or __repr__ may do anything
        text = f"{type(error).__name__} (no traceback: {type(broken).__name__})"
    return redact(utf8(text).rstrip(), secrets)
