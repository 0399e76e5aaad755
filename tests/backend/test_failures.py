"""What exceptions of user code become: category, message, log; and no key in any of them."""

from __future__ import annotations

import logging
from http import HTTPStatus
from urllib.parse import quote

import httpx
import pytest
import trio
from backend.helpers import (
    SECRET,
    assert_nothing_is_left,
    backend,
    echo,
    execute,
)
from hypothesis import given
from hypothesis import strategies as st

from rollout import RolloutStatus, get_rollout_context
from rollout._endpoint_failures import mark_error
from rollout.backend.failures import (
    categorize_exception,
    describe_exception,
    format_exception,
    redact,
)
from rollout.errors import InvalidFieldError, SampleSourceError
from rollout.types import RolloutErrorCategory

TIMEOUT, VALIDATION, HTTP, AGENT = (
    RolloutErrorCategory.TIMEOUT,
    RolloutErrorCategory.VALIDATION_ERROR,
    RolloutErrorCategory.HTTP_ERROR,
    RolloutErrorCategory.AGENT_ERROR,
)


class SandboxException(Exception):
    pass


class SandboxConnectionException(SandboxException):
    pass


class SandboxRateLimitException(SandboxException):
    pass


class PoolStateStoreUnavailableException(Exception):
    pass


class SandboxApiException(SandboxException):
    def __init__(self, status_code=None):
        super().__init__(f"HTTP {status_code}")
        self.status_code = status_code


class SandboxAPIError(Exception):
    """The same in another version of its SDK."""

    status_code = 503


class OfApi(SandboxApiException):
    pass


class BrokenStatus(SandboxApiException):
    def __init__(self):
        Exception.__init__(self, "broken")

    @property
    def status_code(self):
        raise ZeroDivisionError


class OtherHttpError(Exception):
    status_code = 503


def unicode_error():
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error


CATEGORIES = [
    (TimeoutError("x"), TIMEOUT),
    (trio.TooSlowError(), TIMEOUT),
    (type("OwnTimeout", (TimeoutError,), {})(), TIMEOUT),
    (ValueError("x"), VALIDATION),
    (TypeError("x"), VALIDATION),
    (AssertionError("x"), VALIDATION),
    (unicode_error(), VALIDATION),
    (InvalidFieldError("reward", "must be"), VALIDATION),
    (SampleSourceError("twice"), VALIDATION),
    (SandboxConnectionException("x"), HTTP),
    (type("Sub", (SandboxConnectionException,), {})("x"), HTTP),
    (SandboxRateLimitException("x"), HTTP),
    (PoolStateStoreUnavailableException("x"), HTTP),
    *[(SandboxApiException(code), HTTP) for code in (401, 402, 403, 429, 500, 502, 503, 504)],
    (SandboxApiException(HTTPStatus.BAD_GATEWAY), HTTP),
    (OfApi(503), HTTP),
    (SandboxAPIError("x"), HTTP),
    *[(SandboxApiException(code), AGENT) for code in (None, 200, 400, 404, 409, 422, 501, 505)],
    (SandboxApiException("503"), AGENT),
    (BrokenStatus(), AGENT),
    (SandboxException("x"), AGENT),
    (OtherHttpError("x"), AGENT),
    (RuntimeError("x"), AGENT),
    (KeyError("x"), AGENT),
    (OSError("x"), AGENT),
    (ConnectionError("x"), AGENT),
    (SystemExit(1), AGENT),
    (KeyboardInterrupt(), AGENT),
    (ExceptionGroup("g", [ValueError("a"), TypeError("b")]), VALIDATION),
    (ExceptionGroup("g", [TimeoutError(), ExceptionGroup("h", [trio.TooSlowError()])]), TIMEOUT),
    (ExceptionGroup("g", [SandboxApiException(503)]), HTTP),
    (ExceptionGroup("g", [ValueError("a"), TimeoutError("b")]), AGENT),
    (BaseExceptionGroup("g", [SystemExit(1), ValueError("a")]), AGENT),
]


@pytest.mark.parametrize(("error", "category"), CATEGORIES, ids=[repr(e) for e, _ in CATEGORIES])
def test_categories(error, category):
    assert categorize_exception(error) is category


@pytest.mark.parametrize(("error", "category"), CATEGORIES, ids=[repr(e) for e, _ in CATEGORIES])
async def test_a_rollout_has_the_category_of_what_its_code_raised(error, category):
    async def run(ctx):
        raise error

    async def grade(ctx):
        raise error

    for local in (backend(run, grade), backend(echo, grade)):
        outcome = await execute(local, grade=True, label="x")
        assert outcome.result.status is RolloutStatus.FAILURE
        assert outcome.result.err_category is category
        assert outcome.result.err_message == describe_exception(error)
        assert_nothing_is_left(local)


# --- messages -----------------------------------------------------------------------------------


class Speechless(Exception):
    def __str__(self):
        raise SystemExit


class Garbled(Exception):
    def __str__(self):
        return [42][0]


DESCRIPTIONS = [
    (RuntimeError("boom"), "boom"),
    (RuntimeError(), "RuntimeError"),
    (RuntimeError(""), "RuntimeError"),
    (KeyError("name"), "KeyError: 'name'"),
    (SystemExit(3), "SystemExit: 3"),
    (SystemExit(), "SystemExit"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (Speechless(), "(its message cannot be shown: SystemExit)"),
    (Garbled(), "(its message cannot be shown: TypeError)"),
    (RuntimeError("lone \ud800 surrogate"), "lone \ufffd surrogate"),
    (ExceptionGroup("one", [ValueError("inner")]), "inner"),
    (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "two: a; KeyError: 'b'"),
    (ExceptionGroup("o", [ExceptionGroup("i", [ValueError("a"), ValueError("b")])]), "o: a; b"),
    (ExceptionGroup("\ud800", [ValueError("a"), ValueError("b")]), "\ufffd: a; b"),
]


@pytest.mark.parametrize(
    ("error", "text"),
    DESCRIPTIONS,
    ids=[type(e).__name__ + str(i) for i, (e, _) in enumerate(DESCRIPTIONS)],
)
def test_descriptions(error, text):
    assert describe_exception(error) == text


def test_what_an_sdk_hides_of_a_broken_connection_is_said():
    refused = httpx.ConnectError("all attempts to connect to model:80 failed")
    error = RuntimeError("Connection error.")
    error.__cause__ = refused
    assert describe_exception(error) == "Connection error."
    mark_error(refused)
    assert describe_exception(error) == (
        "Connection error: all attempts to connect to model:80 failed"
    )
    assert describe_exception(refused) == "all attempts to connect to model:80 failed"


def test_a_long_message_is_cut():
    text = describe_exception(RuntimeError("x" * 1_000_000))
    assert len(text) == 8000
    assert text.endswith("x [cut]")
    assert describe_exception(RuntimeError("x" * 8000)) == "x" * 8000


def test_a_large_group_is_cut():
    text = describe_exception(ExceptionGroup("many", [ValueError(f"e{i}") for i in range(1000)]))
    assert "e99;" in text
    assert "e100" not in text
    assert text.endswith("; and more")
    text = describe_exception(ExceptionGroup("many", [ValueError("x" * 9000)] * 100))
    assert len(text) == 8000


def test_a_deep_group_is_read_to_its_end():
    group = ExceptionGroup("deep", [ValueError("bottom")])
    for _ in range(5000):
        group = ExceptionGroup("deep", [group])
    assert describe_exception(group) == "bottom"
    assert categorize_exception(group) is VALIDATION
    assert isinstance(format_exception(group, []), str)


@given(st.text(st.characters()), st.integers(0, 20_000))
def test_every_description_is_short_utf8(text, padding):
    description = describe_exception(RuntimeError("x" * padding + text))
    assert len(description.encode()) <= 4 * 8000
    assert len(description) <= 8000


# --- secrets ------------------------------------------------------------------------------------


def test_redaction():
    assert redact("key=abcdefgh.", ["abcdefgh"]) == "key=[redacted]."
    assert redact("key=abc.", ["abc", "", None]) == "key=abc."
    assert (
        redact("abcdefghabcdefgh wxyzwxyz", ["abcdefgh", "wxyzwxyz"])
        == "[redacted][redacted] [redacted]"
    )


def test_other_spellings_of_a_secret_are_redacted_too():
    secret = "a b/c'\n\\é"
    for form in (secret, repr(secret), quote(secret, safe=""), f"Bearer {secret}"):
        assert "b/c" not in redact(form, [secret])
        assert "[redacted]" in redact(form, [secret])


@given(before=st.integers(0, 9000), secret=st.text("abcdef/+", min_size=8, max_size=60))
def test_a_cut_leaves_no_part_of_a_secret(before, secret):
    text = describe_exception(RuntimeError("." * before + secret + "." * 9000), [secret])
    assert set(text.replace("[redacted]", "").removesuffix(" [cut]")) <= set(".[redacted")
    assert secret[:4] not in text.replace("[redacted]", "")


def leak(how):
    key = get_rollout_context().api_key
    if how == "message":
        raise RuntimeError(f"GET /v1?key={key} failed")
    if how == "repr":
        raise KeyError({"Authorization": f"Bearer {key}"})
    if how == "cause":
        try:
            raise ValueError(f"bad key {key}")
        except ValueError as error:
            raise RuntimeError("request failed") from error
    if how == "context":
        try:
            raise ValueError(f"bad key {key}")
        except ValueError:
            raise RuntimeError("request failed")  # noqa: B904
    if how == "note":
        error = RuntimeError("request failed")
        error.add_note(f"with {key}")
        raise error
    if how == "group":
        raise ExceptionGroup(f"of {key}", [ValueError(f"a {key}"), TypeError(f"b {key}")])
    if how == "long":
        raise RuntimeError("." * 7_990 + key + "." * 100)
    raise type(f"Error_{key}", (Exception,), {})


LEAKS = ["message", "repr", "cause", "context", "note", "group", "long", "type name"]


@pytest.mark.parametrize("phase", ["workflow", "grader"])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("how", LEAKS)
async def test_the_key_shows_up_nowhere(caplog, how, plain, phase):
    caplog.set_level(logging.DEBUG)

    def in_thread(ctx):
        leak(how)

    async def on_loop(ctx):
        leak(how)

    code = in_thread if plain else on_loop
    local = backend(code) if phase == "workflow" else backend(echo, code)
    outcome = await execute(local, grade=phase == "grader", label="x")
    assert outcome.result.status is RolloutStatus.FAILURE
    for text in (outcome.result.err_message, caplog.text, repr(outcome)):
        assert SECRET not in text
        assert "hunter2" not in text
    assert f"rollout r: the {phase} failed" in caplog.text
    assert "Traceback" in caplog.text
    assert "in leak" in caplog.text


async def test_failures_of_the_library_itself_are_not_logged_as_errors(caplog):
    async def run(ctx):
        await trio.sleep_forever()

    await execute(backend(run), grade=True)
    await execute(backend(run), agent_timeout_sec=0)
    assert caplog.records == []


async def test_an_error_that_cannot_be_formatted_is_still_a_failure(caplog):
    async def run(ctx):
        raise Speechless

    outcome = await execute(backend(run))
    assert outcome.result.err_category is AGENT
    assert "Speechless" in caplog.text
