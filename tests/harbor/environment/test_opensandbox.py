"""Defaults for OpenSandbox, the statuses behind its errors, and what may still run."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollout.backend.harbor import opensandbox
from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.opensandbox import leftover_note, with_defaults
from rollout.backend.harbor.result.facts import TrialError
from rollout.backend.harbor.result.outcomes import categorize_trial_error

TIMEOUT = "OPENSANDBOX_REQUEST_TIMEOUT_SEC"
DOMAIN = "OPENSANDBOX_DOMAIN"
RUN_ID = "OPENSANDBOX_RUN_ID"
HTTPS = {"protocol": "https"}


@pytest.fixture(autouse=True)
def not_warned():
    opensandbox._request_timeout_sec.cache_clear()


@pytest.mark.parametrize(
    ("kwargs", "environ", "expected"),
    [
        ({}, {}, HTTPS),
        ({}, {TIMEOUT: "600"}, HTTPS | {"request_timeout_sec": 600}),
        ({}, {TIMEOUT: " 600\n"}, HTTPS | {"request_timeout_sec": 600}),
        ({"request_timeout_sec": 5}, {TIMEOUT: "600"}, HTTPS | {"request_timeout_sec": 5}),
        ({"request_timeout_sec": None}, {TIMEOUT: "600"}, HTTPS | {"request_timeout_sec": None}),
        ({}, {DOMAIN: "sandbox.example"}, HTTPS),
        ({}, {DOMAIN: "http://s.example:80"}, {"protocol": "http", "domain": "s.example:80"}),
        ({}, {DOMAIN: "HTTPS://s.example/"}, {"protocol": "https", "domain": "s.example"}),
        ({}, {DOMAIN: "http://s.example/pre/"}, {"protocol": "http", "domain": "s.example/pre"}),
        ({"domain": "a.example"}, {DOMAIN: "http://b.example"}, HTTPS | {"domain": "a.example"}),
        ({"domain": "http://a:1"}, {DOMAIN: "b"}, {"protocol": "http", "domain": "a:1"}),
        ({"domain": None}, {DOMAIN: "http://b"}, {"protocol": "http", "domain": "b"}),
        (
            {"domain": "http://a", "protocol": "https"},
            {},
            {"protocol": "https", "domain": "a"},
        ),
        ({"protocol": "http"}, {}, {"protocol": "http"}),
        ({}, {RUN_ID: "run-7"}, HTTPS | {"use_server_proxy": True}),
        ({}, {RUN_ID: ""}, HTTPS),
        (
            {"use_server_proxy": False},
            {RUN_ID: "run-7"},
            HTTPS | {"use_server_proxy": False},
        ),
        ({"api_key": "k"}, {}, HTTPS | {"api_key": "k"}),
    ],
)  # fmt: skip
def test_defaults(kwargs, environ, expected):
    before = dict(kwargs)
    assert with_defaults(kwargs, environ) == expected
    assert kwargs == before


@pytest.mark.parametrize(
    "value",
    ["", "0", "00", "-5", "+5", "1.5", "60.0", "1e3", "1_000", "sixty", "60s", "٦٠", "NaN",
     "inf", "0x10", "5 5", "9" * 40, "²"],
)  # fmt: skip
def test_what_is_no_timeout_is_ignored_with_one_warning(value, caplog):
    for _ in range(3):
        assert "request_timeout_sec" not in with_defaults({}, {TIMEOUT: value})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert TIMEOUT in record.getMessage()


def test_each_wrong_value_is_warned_of_once(caplog):
    for value in ("a", "b", "a", "b"):
        with_defaults({}, {TIMEOUT: value})
    assert len(caplog.records) == 2


def test_no_warning_where_the_variable_does_not_count(caplog):
    with_defaults({"request_timeout_sec": 5}, {TIMEOUT: "nonsense"})
    EnvironmentSpec("docker").fields({TIMEOUT: "nonsense"})
    EnvironmentSpec("my:OpenSandbox").fields({TIMEOUT: "nonsense"})
    assert caplog.records == []


@pytest.mark.parametrize(
    "spec",
    ["opensandbox", {"type": "opensandbox"}, {"opensandbox": {}},
     "harbor.environments.opensandbox:OpenSandboxEnvironment"],
)  # fmt: skip
def test_only_built_in_environments_get_them(spec):
    environment = EnvironmentSpec(spec)
    assert environment.is_opensandbox
    assert environment.fields({TIMEOUT: "60"})["kwargs"] == {
        "request_timeout_sec": 60,
        "protocol": "https",
    }
    assert "kwargs" not in EnvironmentSpec("docker").fields({TIMEOUT: "60", RUN_ID: "1"})


def test_the_domain():
    assert EnvironmentSpec("opensandbox").domain({}) is None
    assert EnvironmentSpec("opensandbox").domain({DOMAIN: "a.example"}) == "a.example"
    secret = EnvironmentSpec("opensandbox").domain({DOMAIN: "http://u:hunter2@a.example:8/"})
    assert secret == "a.example:8"


# --- statuses -------------------------------------------------------------------------------------


class SandboxApiException(Exception):
    def __init__(self, message, status_code):
        super().__init__(message)
        self.status_code = status_code


class InvalidArgumentException(Exception):
    pass


class Environment:
    _sandbox = None

    def __init__(self, error):
        self.error = error

    async def start(self, given, *_):
        if self.error is not None:
            raise self.error
        return given

    stop = exec = upload_file = upload_dir = download_file = download_dir = start


async def failed(error, call="start", sandbox=None):
    """What a trial records of an error of its environment, and the environment's watch."""
    environment, watch = Environment(error), EnvironmentWatch("r1-0a1b", 1.0)
    environment._sandbox = sandbox
    watch.watch(environment)
    with pytest.raises(type(error)):
        await getattr(environment, call)(True, True)
    (raised,) = watch.raised
    return TrialError(type=type(error).__name__, message=str(error), exception=raised), watch


@pytest.mark.parametrize(
    ("status", "category"),
    [(401, "http_error"), (402, "http_error"), (403, "http_error"), (429, "http_error"),
     (500, "http_error"), (502, "http_error"), (503, "http_error"), (504, "http_error"),
     (400, "agent_error"), (404, "agent_error"), (409, "agent_error"), (0, "agent_error")],
)  # fmt: skip
@pytest.mark.parametrize("call", ["start", "exec", "download_dir"])
async def test_a_status_is_told_where_the_text_does_not_have_it(status, category, call):
    error = SandboxApiException("Create sandbox failed: no | [CODE] no", status)
    assert categorize_trial_error((await failed(error, call))[0]) == category


async def test_the_status_goes_before_a_number_in_the_text():
    error = SandboxApiException("Create sandbox failed: upstream said HTTP 503", 400)
    assert categorize_trial_error((await failed(error))[0]) == "agent_error"


async def test_an_answer_that_is_no_json_is_the_servers_fault():
    # The SDK takes what its parser of JSON says for a wrong argument of its caller.
    try:
        json.loads("<html>")
    except ValueError as error:
        wrapped = InvalidArgumentException(str(error))
        wrapped.__cause__ = error
    found, _ = await failed(wrapped)
    assert categorize_trial_error(found) == "http_error"
    assert leftover_note(TRIAL, "s.example", [wrapped])
    other, _ = await failed(InvalidArgumentException("File path cannot be null"))
    assert categorize_trial_error(other) == "agent_error"


async def test_other_errors_and_results_are_left_alone():
    found, _ = await failed(ValueError("HTTP 503"))
    assert categorize_trial_error(found) == "validation_error"
    environment, watch = Environment(None), EnvironmentWatch("r1-0a1b", 1.0)
    watch.watch(environment)
    assert await environment.exec(7) == 7
    assert (list(watch.raised), watch.has_no_sandbox) == ([], False)


# --- what may still run ---------------------------------------------------------------------------

TRIAL = "r1-0a1b"
NOTE = {
    "opensandbox": {
        "domain": "s.example:8080",
        "metadata": {"session_id": "r1-0a1b__env"},
        "may_still_run": True,
    }
}


@pytest.mark.parametrize(
    ("call", "sandbox", "creating"),
    [("start", None, True), ("start", "one", False), ("exec", None, False)],
)
async def test_a_start_without_a_sandbox_is_noticed(call, sandbox, creating):
    _, watch = await failed(SandboxApiException("no", 504), call, sandbox)
    assert watch.has_no_sandbox is creating


async def test_so_is_one_that_is_cancelled():
    environment, watch = Environment(asyncio.CancelledError()), EnvironmentWatch("r1-0a1b", 1.0)
    watch.watch(environment)
    with pytest.raises(asyncio.CancelledError):
        await environment.start(False)
    assert watch.has_no_sandbox


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("SandboxTimeoutException", True),
        ("SandboxConnectionException", True),
        ("CancelledError", True),
        ("EnvironmentStartTimeoutError", True),
        (SandboxApiException("no", 504), True),
        (SandboxApiException("no", 502), True),
        (SandboxApiException("no", 401), False),
        (TimeoutError(), True),
        (ValueError(), False),
        ("SandboxRateLimitException", False),
        ("ValueError", False),
        (None, False),
    ],
)
def test_leftovers(error, lost):
    note = leftover_note(TRIAL, "s.example:8080", [None, error])
    assert note == (NOTE if lost else None)
