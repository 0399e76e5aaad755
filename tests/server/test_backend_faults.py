"""Backends whose methods raise, or return what they should not."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import trio
from server.faults import (
    LLM_KEY,
    admission,
    admit,
    assert_no_secret,
    assert_refused,
    finished,
    in_process_http,
    poll,
    run,
)
from support import make_app, prompt

from rollout.backend import ExecutionBackend
from rollout.types import (
    EXTENSIONS,
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutSample,
    RolloutStatus,
)

pytestmark = pytest.mark.usefixtures("log_lines")

SUCCESS = ExecutionOutcome(
    workflow=ExecutionResult(
        status=RolloutStatus.SUCCESS, sample=RolloutSample(messages=[], reward=1.0)
    )
)


class Faulty(ExecutionBackend):
    """Does what each method is told to: raises an exception, calls a function, returns a value."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.calls: list[str] = []
        self.ids: set[str] = set()

    def _do(self, name: str, default: Any) -> Any:
        self.calls.append(name)
        fault = self.faults.get(name, default)
        if isinstance(fault, BaseException):
            raise fault
        return fault() if callable(fault) else fault

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        if "sleep" in request.prompt[0]:
            await trio.sleep(request.prompt[0]["sleep"])
        await trio.lowlevel.checkpoint()
        return self._do("execute", SUCCESS)

    def reserve(self, rollout_id: str) -> bool:
        self.ids.add(rollout_id)
        return self._do("reserve", True)

    def release(self, rollout_id: str) -> None:
        self.ids.add(rollout_id)
        return self._do("release", None)

    def rollout_status(self, rollout_id: str) -> Any:
        self.ids.add(rollout_id)
        return self._do("rollout_status", None)

    def cancel_rollouts(self, ids: Any = None, prefix: Any = None, all: bool = False) -> Any:
        self.ids.update(ids)
        return self._do("cancel_rollouts", {})

    def health(self) -> Any:
        return self._do("health", {"status": "ok"})


BOOM = RuntimeError(f"the key is {LLM_KEY}")


async def test_a_backend_whose_health_raises_is_reported_and_serves(log_lines):
    async with in_process_http(make_app(Faulty(health=RuntimeError("no health")))) as http:
        response = await http.get("/health")
        assert response.status_code == 200
        payload = response.json()
        assert payload["status"] == "error"
        assert payload["lifecycle"] == {"accepting_rollouts": True, "active_rollouts": 0}
        assert payload["process_id"]
        assert payload["instance_id"]
        assert (await run(http))["status"] == "success"
    assert any("health failed" in line for line in log_lines)


@pytest.mark.parametrize("garbage", [None, 7, "ok", [1], [("a",)], object(), {"a"}])
async def test_health_that_is_no_object_is_an_error(garbage: Any):
    async with in_process_http(make_app(Faulty(health=lambda: garbage))) as http:
        response = await http.get("/health")
        assert (response.status_code, response.json()["status"]) == (200, "error")


async def test_health_is_fitted_and_cannot_hide_what_the_server_says():
    loop: list[Any] = []
    loop.append(loop)
    health = {
        "loop": loop,
        "bad": float("nan"),
        "worse": object(),
        "good": [1, {"a": (2,)}],
        7: "seven",
        "process_id": "mine",
        "instance_id": None,
        "lifecycle": "none",
        "version": None,
        "application": "another",
        "counts": {"files.written": 3, "worse": "many", "bad": float("inf")},
    }
    app = make_app(Faulty(health=lambda: health))
    async with in_process_http(app) as http:
        payload = (await http.get("/health")).json()
    assert payload.pop("lifecycle") == {"accepting_rollouts": True, "active_rollouts": 0}
    assert payload.pop("process_id") == app.process_id
    assert payload.pop("instance_id") == app.instance_id
    assert payload.pop("extensions") == list(EXTENSIONS)
    assert payload.pop("polling_lease_timeout_sec") == 120.0
    assert payload.pop("version") == version("trio-rollout")
    assert payload.pop("application") is None
    assert payload.pop("counts") == {"files.written": 3}
    assert payload == {"status": "ok", "loop": [], "good": [1, {"a": [2]}], "7": "seven"}


async def test_a_reserve_that_raises_refuses_the_admission_and_keeps_nothing(log_lines):
    backend = Faulty(reserve=BOOM)
    async with in_process_http(make_app(backend)) as http:
        body = admission()
        assert_refused(await http.post("/rollout", json=body), 503)
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0
        assert "release" not in backend.calls
        backend.faults.clear()
        assert (await run(http, rollout_id=body["rollout_id"]))["status"] == "success"
    (line,) = (line for line in log_lines if "reserve failed" in line)
    assert line.startswith(
        f"rollout {body['rollout_id']}: the backend's reserve failed\nTraceback "
    )
    assert line.rstrip().endswith("RuntimeError: the key is [redacted]")


@pytest.mark.parametrize("garbage", [False, None, 0, "", []])
async def test_a_reserve_that_says_no_in_any_way_is_429(garbage: Any):
    backend = Faulty(reserve=lambda: garbage)
    async with in_process_http(make_app(backend)) as http:
        response = await http.post("/rollout", json=admission())
        assert_refused(response, 429)
        assert response.headers["retry-after"] in {"5", "6", "7", "8"}
        assert "release" not in backend.calls


async def test_a_release_that_raises_loses_no_result(log_lines):
    async with in_process_http(make_app(Faulty(release=BOOM))) as http:
        assert (await run(http))["sample"]["reward"] == 1.0
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0
        assert (await run(http))["sample"]["reward"] == 1.0
    assert any("the backend's release failed" in line for line in log_lines)


async def test_a_cancel_that_raises_is_logged_without_secrets(autojump_clock, log_lines):
    async with in_process_http(make_app(Faulty(cancel_rollouts=BOOM))) as http:
        await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        await http.post("/rollout/cancel", json={"ids": ["a"]})
    (said,) = [line for line in log_lines if "the backend's cancel_rollouts failed" in line]
    assert said.startswith("rollout a: ")
    assert "RuntimeError: the key is [redacted]" in said


@pytest.mark.parametrize(
    "fault",
    [
        BOOM,
        lambda: None,
        lambda: 7,
        list,
        lambda: {"another": "cancelled_running"},
        lambda: {"a": "garbage"},
        lambda: {"a": ["cancelled_running"]},
        lambda: {"a": None},
        lambda: {"a": "not_found"},
    ],
)
async def test_what_a_backend_fails_to_cancel_the_server_cancels(fault: Any, autojump_clock):
    async with in_process_http(make_app(Faulty(cancel_rollouts=fault))) as http:
        rollout_id, headers = await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        await poll(http, rollout_id, headers)
        response = await http.post("/rollout/cancel", json={"all": True})
        assert response.json() == {"dispositions": {"a": "cancelled_running"}}
        result = await finished(http, rollout_id, headers)
        assert (result["status"], result["err_category"]) == ("cancelled", None)
        assert result["err_message"] == "cancelled"
        assert result["agent_started_at"]
        assert trio.current_time() < 60
        assert (await run(http))["status"] == "success"


async def test_a_cancel_without_an_answer_tells_queued_from_running(autojump_clock):
    backend = Faulty()
    backend.reports_agent_start = True
    async with in_process_http(make_app(backend)) as http:
        await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        response = await http.post("/rollout/cancel", json={"ids": ["a"]})
        assert response.json() == {"dispositions": {"a": "cancelled_queued"}}


@pytest.mark.parametrize("status", [BOOM, lambda: 7, lambda: {"status": ["success"]}, dict])
async def test_a_rollout_status_that_fails_does_not_stop_a_cancel(status: Any, autojump_clock):
    backend = Faulty(cancel_rollouts={"a": "not_found"}, rollout_status=status)
    async with in_process_http(make_app(backend)) as http:
        rollout_id, headers = await admit(http, rollout_id="a", initial_messages=prompt(sleep=60))
        await poll(http, rollout_id, headers)
        response = await http.post("/rollout/cancel", json={"ids": ["a"]})
        assert response.json() == {"dispositions": {"a": "cancelled_running"}}
        assert (await finished(http, rollout_id, headers))["status"] == "cancelled"


async def test_what_has_ended_in_its_backend_is_left_to_deliver(autojump_clock):
    backend = Faulty(cancel_rollouts={"a": "not_found"}, rollout_status={"status": "success"})
    async with in_process_http(make_app(backend)) as http:
        rollout_id, headers = await admit(http, rollout_id="a", initial_messages=prompt(sleep=9))
        await poll(http, rollout_id, headers)
        for _ in range(2):
            response = await http.post("/rollout/cancel", json={"ids": ["a"]})
            assert response.json() == {"dispositions": {"a": "not_found"}}
        assert backend.calls.count("cancel_rollouts") == 1
        assert (await finished(http, rollout_id, headers))["status"] == "success"
    assert backend.ids == {"a"}


class Own(BaseException):
    """What no library has heard of."""


EXECUTE_RAISES = {
    "error": (RuntimeError("boom"), "agent_error"),
    "secret": (BOOM, "agent_error"),
    "timeout": (TimeoutError("late"), "timeout"),
    "value": (ValueError("bad"), "validation_error"),
    "exit": (SystemExit(3), "agent_error"),
    "interrupt": (KeyboardInterrupt(), "agent_error"),
    "generator exit": (GeneratorExit(), "agent_error"),
    "own": (Own(), "agent_error"),
    "group": (ExceptionGroup("", [ValueError(1), ValueError(2)]), "validation_error"),
}


@pytest.mark.parametrize("kind", EXECUTE_RAISES)
async def test_an_execute_that_raises_ends_its_own_rollout(kind: str):
    error, category = EXECUTE_RAISES[kind]
    backend = Faulty(execute=error)
    async with in_process_http(make_app(backend)) as http:
        result = await run(http)
        assert (result["status"], result["err_category"]) == ("failure", category)
        assert result["agent_started_at"]
        assert_no_secret(result["err_message"])
        backend.faults.clear()
        assert (await run(http))["status"] == "success"


def _outcome(**fields: Any) -> ExecutionOutcome:
    """An outcome whose fields are set behind the back of their validators."""
    result = ExecutionResult(status=RolloutStatus.SUCCESS)
    for name, value in fields.items():
        object.__setattr__(result, name, value)
    return ExecutionOutcome(workflow=result)


def _phases(**phases: Any) -> ExecutionOutcome:
    outcome = ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))
    for name, value in phases.items():
        object.__setattr__(outcome, name, value)
    return outcome


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        7,
        "success",
        {"status": "success"},
        SUCCESS.workflow,
        _phases(workflow=None),
        _phases(workflow=7),
        _phases(grader=7),
        _outcome(status=RolloutStatus.RUNNING),
        _outcome(status=RolloutStatus.UNKNOWN),
        _outcome(status="done"),
        _outcome(status=None),
        _outcome(status=["success"]),
    ],
    ids=range(13),
)
async def test_an_execute_that_returns_garbage_is_an_internal_error(garbage: Any):
    backend = Faulty(execute=lambda: garbage)
    async with in_process_http(make_app(backend)) as http:
        result = await run(http)
        assert (result["status"], result["err_category"]) == ("failure", "internal_error")
        assert result["err_message"]
        assert result["agent_started_at"]
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0
        backend.faults.clear()
        assert (await run(http))["status"] == "success"


async def test_plain_strings_for_status_and_category_are_understood():
    outcome = _outcome(status="failure", err_category="http_error", err_message=ValueError("x"))
    async with in_process_http(make_app(Faulty(execute=lambda: outcome))) as http:
        result = await run(http)
    assert (result["status"], result["err_category"]) == ("failure", "http_error")
    assert result["err_message"] == "x"
    good = _outcome(status="success", sample=RolloutSample(messages=[], reward=1.0))
    async with in_process_http(make_app(Faulty(execute=lambda: good))) as http:
        assert (await run(http))["sample"]["reward"] == 1.0


@pytest.mark.parametrize("category", ["no such thing", 7, ["timeout"], object()])
async def test_a_category_that_the_protocol_lacks_is_an_internal_error(category: Any):
    outcome = _outcome(status=RolloutStatus.FAILURE, err_category=category)
    async with in_process_http(make_app(Faulty(execute=lambda: outcome))) as http:
        result = await run(http)
        assert (result["status"], result["err_category"]) == ("failure", "internal_error")


async def test_a_reward_beside_a_failure_is_not_reported():
    outcome = _outcome(
        status=RolloutStatus.FAILURE, sample=RolloutSample(messages=[{"a": 1}], reward=1.0)
    )
    async with in_process_http(make_app(Faulty(execute=lambda: outcome))) as http:
        result = await run(http)
    assert result["sample"]["reward"] is None
    assert result["sample"]["messages"] == [{"a": 1}]
    assert "trajectory_messages" not in result["sample"]


async def test_a_large_result_is_not_encoded_in_the_event_loop(monkeypatch):
    def never(response: Any) -> bytes:
        raise AssertionError

    monkeypatch.setattr("rollout.server.registry.encode", never)
    sample = RolloutSample(messages=[{"role": "assistant", "content": "x" * 500_000}])
    outcome = _outcome(status=RolloutStatus.SUCCESS, sample=sample)
    async with in_process_http(make_app(Faulty(execute=lambda: outcome))) as http:
        assert (await run(http))["sample"]["messages"] == sample.messages


async def test_a_sample_of_another_type_is_left_out():
    outcome = _outcome(status=RolloutStatus.SUCCESS, sample={"messages": []})
    async with in_process_http(make_app(Faulty(execute=lambda: outcome))) as http:
        result = await run(http)
    assert (result["status"], result["sample"]) == ("success", None)


async def test_every_reservation_is_released_exactly_once(autojump_clock):
    backend = Faulty()
    async with in_process_http(make_app(backend)) as http:
        for seconds in (0, 1, 500):  # the last one outlives its lease
            await admit(http, initial_messages=prompt(sleep=seconds))
        await trio.sleep(400)
        await admit(http, initial_messages=prompt(sleep=60))
        await http.post("/rollout/cancel", json={"all": True})
        await trio.sleep(1)
        assert backend.calls.count("reserve") == backend.calls.count("release") == 4
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0
