"""Exceptions of user code: their category, message and log form."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

import trio

from rollout._endpoint_failures import endpoint_failure, refuses_key, status_of
from rollout._json.text import utf8
from rollout._logs import Lines
from rollout._redaction import redact
from rollout.types import MODEL_ENDPOINT, MODEL_KEY, RolloutErrorCategory

__all__ = [
    "categorize_exception",
    "describe_exception",
    "format_exception",
    "redact",
    "source_of",
    "summarized",
    "wants_tracebacks",
]

_PROVIDER_ERRORS = frozenset(
    {
        "SandboxConnectionException",
        "SandboxRateLimitException",
        "PoolStateStoreUnavailableException",
    }
)
_PROVIDER_API_ERRORS = frozenset({"SandboxApiException", "SandboxAPIError"})
_PROVIDER_STATUSES = frozenset({401, 402, 403, 429, 500, 502, 503, 504})

_LONGEST_MESSAGE = 8_000
_MOST_GROUP_MEMBERS = 100
_CUT = " [cut]"


def categorize_exception(error: BaseException) -> RolloutErrorCategory:
    """Map an exception to its category.

    Timeouts of Python and of trio are `timeout`; value, type and assertion errors are
    `validation_error`; what a sandbox provider says of itself is `http_error`, told by the
    names of its exceptions so that no SDK has to be installed; the rest is `agent_error`.
    A group has the category that all of its members share.
    """
    categories = {_categorize_plain(inner) for inner in _leaves(error)}
    return categories.pop() if len(categories) == 1 else RolloutErrorCategory.AGENT_ERROR


def source_of(error: BaseException, chat_url: str) -> str | None:
    """Return whose failure an exception is, where that is known.

    Args:
        error: The exception.
        chat_url: The rollout's endpoint, to recognise calls that were made with httpx by hand.
    """
    failed = endpoint_failure(error, chat_url)
    if failed is None:
        return None
    return MODEL_KEY if refuses_key(status_of(failed)) else MODEL_ENDPOINT


def _categorize_plain(error: BaseException) -> RolloutErrorCategory:
    if isinstance(error, (TimeoutError, trio.TooSlowError)):
        return RolloutErrorCategory.TIMEOUT
    if isinstance(error, (ValueError, TypeError, AssertionError)):
        return RolloutErrorCategory.VALIDATION_ERROR
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _PROVIDER_ERRORS or (
        names & _PROVIDER_API_ERRORS and _status_code(error) in _PROVIDER_STATUSES
    ):
        return RolloutErrorCategory.HTTP_ERROR
    return RolloutErrorCategory.AGENT_ERROR


def _status_code(error: BaseException) -> int | None:
    try:
        status = getattr(error, "status_code", None)
    except Exception:  # noqa: BLE001 - a property of a foreign class may do anything
        return None
    return status if isinstance(status, int) else None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the plain exceptions in a group of groups, however deep, in their order."""
    pending = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseExceptionGroup):
            pending.extend(reversed(current.exceptions))
        else:
            yield current


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - a user's __str__ may do anything
        return f"(its message cannot be shown: {type(broken).__name__})"


def describe_exception(error: BaseException, secrets: Iterable[str | None] = ()) -> str:
    """Describe an error in one text: its messages; a type's name in the place of an empty one.

    Secrets are blanked out before a long text is cut, so that no part of one is left.
    """
    if not isinstance(error, BaseExceptionGroup):
        return _cut(redact(_describe_plain(error), secrets))
    members = list(islice(_leaves(error), _MOST_GROUP_MEMBERS + 1))
    text = "; ".join(_describe_plain(inner) for inner in members[:_MOST_GROUP_MEMBERS])
    if len(members) > 1:
        text = f"{error.message}: {text}"
    if len(members) > _MOST_GROUP_MEMBERS:
        text += "; and more"
    return _cut(redact(utf8(text), secrets))


def _describe_plain(error: BaseException) -> str:
    text = utf8(_text(error))
    if not text or isinstance(error, KeyError) or not isinstance(error, Exception):
        # Their messages say nothing without the type: a bare key, an exit code.
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ValueError) and text.startswith("signal only works in main thread"):
        text += (
            "; a plain def runs in a worker thread: turn off timeouts that use signals, since "
            "agent_timeout_sec and grader_timeout_sec bound it, or run the code in a process"
        )
    origin = endpoint_failure(error)
    if origin is not None and (reason := utf8(_text(origin))) not in text:
        text = f"{text.removesuffix('.')}: {reason}"  # an SDK says "Connection error." alone
    return text


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_MESSAGE:
        return text
    return text[: _LONGEST_MESSAGE - len(_CUT)] + _CUT


Summary = Callable[[BaseException, Iterable[str | None]], str]
_summary: ContextVar[Summary | None] = ContextVar("summary_of_exceptions", default=None)


@contextmanager
def summarized(summary: Summary) -> Generator[None, None, None]:
    """Log a summary in place of each traceback of user code within the block."""
    token = _summary.set(summary)
    try:
        yield
    finally:
        _summary.reset(token)


def wants_tracebacks() -> bool:
    """Whether the log gets tracebacks of user code, and no summaries."""
    return _summary.get() is None


def format_exception(
    error: BaseException, secrets: Iterable[str | None], *, of_user: bool = False
) -> Lines:
    """Format a traceback for the server's own log, without secrets.

    Args:
        error: What was raised.
        secrets: What must not be in it.
        of_user: Whether an agent or a grader raised it; see `summarized`.
    """
    secrets = list(secrets)
    summary = _summary.get() if of_user else None
    try:
        if summary is None:
            text = "".join(traceback.format_exception(error))
        else:
            text = summary(error, secrets)
    except BaseException as broken:  # noqa: BLE001 - a user's __str__ or __repr__ may do anything
        text = f"{type(error).__name__} (no traceback: {type(broken).__name__})"
    return Lines(redact(utf8(text).rstrip(), secrets))
