"""Trials in Harbor's own OpenSandbox environment, with the real SDK."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.opensandbox import leftover_note
from rollout.backend.harbor.result.facts import facts_of
from rollout.backend.harbor.result.outcomes import outcome_of
from rollout.types import RolloutSample, RolloutStatus

# Harbor's own modules call what Harbor has deprecated.
pytestmark = [pytest.mark.harbor, pytest.mark.filterwarnings("ignore::DeprecationWarning:harbor")]

DOMAIN = "OPENSANDBOX_DOMAIN"
TIMEOUT = "OPENSANDBOX_REQUEST_TIMEOUT_SEC"
RUN_ID = "OPENSANDBOX_RUN_ID"


def spec_of(server, **kwargs):
    return EnvironmentSpec({"opensandbox": {"api_key": server.api_key} | kwargs})


def decide(ran):
    result, watch = ran
    facts = facts_of(result, watch.raised)
    return outcome_of(facts, RolloutSample(), grade=True, secrets=[]).result


def note(ran, spec, environ):
    result, watch = ran
    assert watch.has_no_sandbox
    (error,) = facts_of(result, watch.raised).errors
    return leftover_note("r1-0a1b", spec.domain(environ), [error.exception or error.type])


def daemon_calls(server):
    return [path for _, path, _ in server.seen if "/daemon/" in path or "/proxy/" in path]


def test_to_a_verified_reward(server, run_trial):
    result = run_trial(spec_of(server), {DOMAIN: f"http://{server.domain}"})
    outcome = decide(result)
    assert (outcome.status, outcome.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
    (sandbox,) = server.sandboxes.values()
    assert sandbox.request["image"] == {"uri": "example/image:1"}
    assert sandbox.metadata["session_id"] == "r1-0a1b__env"
    assert sandbox.killed
    assert daemon_calls(server)
    assert all(path.startswith("/daemon/") for path in daemon_calls(server))


def test_through_the_server(server, run_trial):
    environ = {DOMAIN: f"http://{server.domain}", RUN_ID: "run-7"}
    result = run_trial(spec_of(server), environ)
    assert decide(result).sample.reward == 1.0
    assert daemon_calls(server)
    assert all("/proxy/44772/" in path for path in daemon_calls(server))


def test_an_argument_wins_over_the_variable(server, run_trial):
    environ = {DOMAIN: "http://127.0.0.1:9", RUN_ID: "run-7"}
    spec = spec_of(server, domain=f"http://{server.domain}", use_server_proxy=False)
    assert decide(run_trial(spec, environ)).sample.reward == 1.0
    assert all(path.startswith("/daemon/") for path in daemon_calls(server))


def test_an_answer_that_is_wrong_is_no_reward(server, run_trial, task):
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\necho 41 > answer.txt\n")
    result = run_trial(spec_of(server), {DOMAIN: f"http://{server.domain}"})
    assert decide(result).sample.reward == 0.0


def test_a_create_that_outlives_the_timeout(server, run_trial):
    server.hold = threading.Event()
    environ = {DOMAIN: f"http://{server.domain}", TIMEOUT: "1"}
    spec = spec_of(server)
    result = run_trial(spec, environ)
    outcome = decide(result)
    assert outcome.status is RolloutStatus.FAILURE
    assert outcome.err_category in {"timeout", "http_error"}
    assert "SandboxTimeoutException" in outcome.err_message
    # Its answer was never read, so nobody has asked for its end: it is still there ...
    (sandbox,) = server.sandboxes.values()
    assert not sandbox.killed
    # ... and what the diagnostics say is enough to find it.
    found = note(result, spec, environ)["opensandbox"]
    assert found["domain"] == server.domain
    assert found["may_still_run"] is True
    assert server.find(found["metadata"]) == [sandbox]
    assert server.api_key not in json.dumps(found)


def test_the_sdk_finds_what_the_diagnostics_name(server, run_trial):
    from opensandbox import SandboxManager
    from opensandbox.config import ConnectionConfig
    from opensandbox.models.sandboxes import SandboxFilter

    server.hold = threading.Event()
    environ = {DOMAIN: f"http://{server.domain}", TIMEOUT: "1"}
    spec = spec_of(server)
    found = note(run_trial(spec, environ), spec, environ)["opensandbox"]

    async def clear():
        config = ConnectionConfig(
            domain=found["domain"], protocol="http", api_key=server.api_key, disable_metrics=True
        )
        manager = await SandboxManager.create(config)
        page = await manager.list_sandbox_infos(SandboxFilter(metadata=found["metadata"]))
        for each in page.sandbox_infos:
            await manager.kill_sandbox(each.id)
        await manager.close()

    asyncio.run(clear())
    assert [sandbox.killed for sandbox in server.sandboxes.values()] == [True]


STRUCTURED = b'{"code": "SOME::CODE", "message": "something is wrong"}'


@pytest.mark.parametrize(
    ("status", "category"),
    [(401, "http_error"), (403, "http_error"), (429, "http_error"), (500, "http_error"),
     (503, "http_error"), (400, "agent_error"), (404, "agent_error")],
)  # fmt: skip
def test_refusals(server, run_trial, no_waits, status, category):
    server.refusals = [(status, STRUCTURED)] * 3
    environ = {DOMAIN: f"http://{server.domain}"}
    spec = spec_of(server)
    result = run_trial(spec, environ)
    outcome = decide(result)
    assert (outcome.status, outcome.err_category) == (RolloutStatus.FAILURE, category)
    assert "something is wrong" in outcome.err_message
    assert server.sandboxes == {}
    assert note(result, spec, environ) is None


@pytest.mark.parametrize("status", [401, 403, 429, 500, 502, 503, 504])
def test_refusals_of_somebody_in_between(server, run_trial, no_waits, status):
    server.refusals = [(status, b"<html>no</html>")] * 3
    result = run_trial(spec_of(server), {DOMAIN: f"http://{server.domain}"})
    assert decide(result).err_category == "http_error"


def test_a_gateway_that_gives_up_leaves_a_question(server, run_trial, no_waits):
    server.refusals = [(504, STRUCTURED)] * 3
    environ = {DOMAIN: f"http://{server.domain}"}
    spec = spec_of(server)
    result = run_trial(spec, environ)
    assert decide(result).err_category == "http_error"
    assert note(result, spec, environ)["opensandbox"]["may_still_run"] is True


def test_a_wrong_key(server, run_trial, no_waits):
    spec = EnvironmentSpec({"opensandbox": {"api_key": "wrong-key-1"}})
    result = run_trial(spec, {DOMAIN: f"http://{server.domain}"})
    assert decide(result).err_category == "http_error"
    assert "wrong-key-1" not in decide(result).err_message


def test_a_server_that_is_not_there(server, run_trial):
    result = run_trial(spec_of(server, domain="http://127.0.0.1:9"), {})
    assert decide(result).err_category == "http_error"


def test_harbor_takes_the_defaults(server):
    from harbor.models.trial.config import EnvironmentConfig

    fields = spec_of(server).fields({DOMAIN: "http://a:1", TIMEOUT: "600", RUN_ID: "1"})
    config = EnvironmentConfig.model_validate(fields)
    assert config.type.value == "opensandbox"
    assert config.kwargs == {
        "api_key": server.api_key,
        "domain": "a:1",
        "protocol": "http",
        "request_timeout_sec": 600,
        "use_server_proxy": True,
    }
