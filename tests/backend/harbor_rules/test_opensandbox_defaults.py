"""Defaults for OpenSandbox, the statuses behind its errors, and what may still run."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import attrs
import pytest

from rollout.backend.harbor import opensandbox
from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.opensandbox import leftover_note, tell_statuses, with_defaults
from rollout.backend.harbor.result.facts import TrialError
from rollout.backend.harbor.result.outcomes import categorize_trial_error
from rollout.backend.harbor.trial.plan import ResolvedTask, TrialPlan
from rollout.context import RolloutContext
from rollout.types import ExecutionRequest

TIMEOUT = "OPENSANDBOX_REQUEST_TIMEOUT_SEC"
DOMAIN = "OPENSANDBOX_DOMAIN"
RUN_ID = "OPENSANDBOX_RUN_ID"
HTTPS = {"protocol": "https"}


@pytest.fixture(autouse=True)
def not_warned(monkeypatch):
    monkeypatch.setattr(opensandbox, "_warned", set())


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


class OpenSandboxEnvironment:
    def __init__(self, error):
        self.error = error

    async def start(self, force_build):
        if self.error is not None:
            raise self.error
        return force_build

    stop = exec = upload_file = upload_dir = download_file = download_dir = start


class OtherEnvironment(OpenSandboxEnvironment):
    pass


def recorded(error):
    return TrialError(
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )


async def failed(error, call="start", kind=OpenSandboxEnvironment):
    environment = kind(error)
    tell_statuses(environment)
    with pytest.raises(type(error)) as caught:
        await getattr(environment, call)(True)
    return recorded(caught.value)


@pytest.mark.parametrize(
    ("status", "category"),
    [(401, "http_error"), (402, "http_error"), (403, "http_error"), (429, "http_error"),
     (500, "http_error"), (502, "http_error"), (503, "http_error"), (504, "http_error"),
     (400, "agent_error"), (404, "agent_error"), (409, "agent_error"), (0, "agent_error")],
)  # fmt: skip
@pytest.mark.parametrize("call", ["start", "exec", "download_dir"])
async def test_a_status_is_told_where_the_text_does_not_have_it(status, category, call):
    error = SandboxApiException("Create sandbox failed: no | [CODE] no", status)
    assert categorize_trial_error(await failed(error, call)) == category


async def test_the_status_goes_before_a_number_in_the_text():
    error = SandboxApiException("Create sandbox failed: upstream said HTTP 503", 400)
    assert categorize_trial_error(await failed(error)) == "agent_error"


async def test_a_status_in_the_text_is_enough():
    error = SandboxApiException("Create sandbox failed: HTTP 503: <html>", 503)
    found = await failed(error, kind=OtherEnvironment)
    assert "OpenSandbox answered" not in found.traceback
    assert categorize_trial_error(found) == "http_error"


async def test_an_answer_that_is_no_json_is_the_servers_fault():
    # The SDK takes what its parser of JSON says for a wrong argument of its caller.
    try:
        json.loads("<html>")
    except ValueError as error:
        wrapped = InvalidArgumentException(str(error))
        wrapped.__cause__ = error
    found = await failed(wrapped)
    assert categorize_trial_error(found) == "http_error"
    assert leftover_note(PLAN, SPEC, attrs.evolve(found, traceback=found.traceback + CREATING))
    other = await failed(InvalidArgumentException("File path cannot be null"))
    assert categorize_trial_error(other) == "agent_error"


async def test_other_errors_and_results_are_left_alone():
    found = await failed(ValueError("HTTP 503"))
    assert "OpenSandbox answered" not in found.traceback
    environment = OpenSandboxEnvironment(None)
    tell_statuses(environment)
    assert await environment.start(7) == 7


# --- what may still run ---------------------------------------------------------------------------

PLAN = TrialPlan(
    request=ExecutionRequest(id="r1", prompt=[{"role": "user", "content": "hi"}]),
    context=RolloutContext(api_key="sk-hunter2"),
    workspace=Path("/nowhere"),
    name="r1-0a1b",
    task=ResolvedTask(name="add", source={}),
)
SPEC = EnvironmentSpec({"opensandbox": {"api_key": "operator-key"}})
ENVIRON = {DOMAIN: "http://u:pw@s.example:8080"}
NOTE = {
    "opensandbox": {
        "domain": "s.example:8080",
        "metadata": {"session_id": "r1-0a1b__env"},
        "may_still_run": True,
    }
}
CREATING = 'File "opensandbox.py", line 403, in _create_sandbox'
RUNNING = 'File "opensandbox.py", line 720, in exec'


@pytest.mark.parametrize(
    ("kind", "trace", "lost"),
    [
        ("SandboxTimeoutException", CREATING, True),
        ("SandboxTimeoutException", "", True),
        ("SandboxTimeoutException", RUNNING, False),
        ("SandboxConnectionException", CREATING, True),
        ("CancelledError", CREATING, True),
        ("EnvironmentStartTimeoutError", CREATING, True),
        ("SandboxApiException", CREATING + "\nOpenSandbox answered HTTP 504", True),
        ("SandboxApiException", CREATING + "\nOpenSandbox answered HTTP 502", True),
        ("SandboxApiException", CREATING + "\nOpenSandbox answered HTTP 401", False),
        ("SandboxApiException", RUNNING + "\nOpenSandbox answered HTTP 504", False),
        ("SandboxRateLimitException", CREATING, False),
        ("ValueError", CREATING, False),
    ],
)
def test_leftovers(kind, trace, lost):
    note = leftover_note(PLAN, SPEC, TrialError(type=kind, traceback=trace), ENVIRON)
    assert note == (NOTE if lost else None)


def test_no_leftovers_elsewhere():
    error = TrialError(type="SandboxTimeoutException")
    assert leftover_note(PLAN, EnvironmentSpec("docker"), error, ENVIRON) is None
    assert leftover_note(PLAN, SPEC, None, ENVIRON) is None
    verifier = TrialError(type="SandboxTimeoutException", in_verifier=True)
    assert leftover_note(PLAN, SPEC, verifier, ENVIRON) is None


def test_leftovers_of_what_was_raised():
    assert leftover_note(PLAN, SPEC, TimeoutError(), ENVIRON) == NOTE
    assert leftover_note(PLAN, SPEC, ValueError(), ENVIRON) is None
