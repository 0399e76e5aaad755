"""Every number, flag and choice of a public constructor or function is taken or refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support import Script, make_app

from rollout import ConcurrencyConfig, LocalBackend
from rollout.backend.harbor import HarborBackend
from rollout.client import RolloutClient
from rollout.demo import DemoPlan
from rollout.demo.arithmetic import ScriptedModel
from rollout.evaluation import compare_runs, compute_metrics, evaluate
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.server import ShutdownBudget, serve
from rollout.simulation import (
    Fate,
    FaultLevel,
    RolloutPlan,
    ServerOptions,
    SimulatedWorld,
    simulate,
    simulate_workload,
)

NAN, INF = float("nan"), float("inf")
NO_NUMBER: list[Any] = [True, "5", "", [], NAN, INF, -INF, 10**400, 1j]
NO_WHOLE: list[Any] = [True, "5", "", [], NAN, INF, -INF, 1j, 1.5, 5.0]
NO_FLAG: list[Any] = [0, 1, "false", "", None, []]


async def entered(manager: Any) -> None:
    async with manager:
        pass


def client(**settings: Any) -> RolloutClient:
    return RolloutClient(url="http://127.0.0.1:1", **settings)


def local(**settings: Any) -> LocalBackend:
    return LocalBackend(workflow=Script, **settings)


def run_rollouts(**settings: Any) -> Any:
    return entered(client().run_rollouts([], **{"max_in_flight": 1, **settings}))


def run_groups(**settings: Any) -> Any:
    return entered(client().run_groups([], **{"samples": 1, "max_in_flight": 1, **settings}))


def simulated(**settings: Any) -> Any:
    async def nothing(_: Any) -> None:
        raise AssertionError

    return simulate(nothing, **{"seed": 0, **settings})


harbor = partial(HarborBackend, agent="oracle", trials_dir="x", artifact_root=False)
plan = partial(RolloutPlan, rollout_id="r")

SETTINGS: list[tuple[Any, str, list[Any]]] = [
    *[(make_app, name, [*NO_WHOLE, -1, 0, None]) for name in ("max_request_bytes",)],
    (make_app, "watchdog_sec", [*NO_NUMBER, -1, 0]),
    (make_app, "result_wait_timeout_sec", [*NO_NUMBER, -1, 0, None]),
    (make_app, "polling_lease_timeout_sec", [*NO_NUMBER, -1, 0, 30, None]),
    (make_app, "result_retention_sec", [*NO_NUMBER, -1, None]),
    (make_app, "configure_logging", NO_FLAG),
    (make_app, "allowed_chat_hosts", ["host", [7], [""], ["http://host"], ["a/b"], ["a:b"]]),
    (partial(serve, None), "handle_signals", NO_FLAG),
    *[
        (ShutdownBudget, f"{stage}_sec", [*NO_NUMBER, -1, None])
        for stage in ("drain", "cleanup", "forced", "delivery", "backend")
    ],
    (client, "admission_timeout_sec", NO_NUMBER),
    (client, "feed", NO_FLAG),
    (run_rollouts, "max_in_flight", [*NO_WHOLE, 0, -1, None]),
    (partial(run_rollouts, key=id), "max_in_flight_per_key", [*NO_WHOLE, 0, -1]),
    (run_groups, "samples", [*NO_WHOLE, 0, -1, None]),
    (run_groups, "min_samples", [*NO_WHOLE, 0, -1]),
    (run_groups, "deadline_sec", [*NO_NUMBER, 0, -1]),
    (client().cancel_rollouts, "all", [1, "false", None]),
    (client().wait_idle, "timeout_sec", [*NO_NUMBER, 0, -1, None]),
    (client().wait_idle, "poll_interval_sec", [*NO_NUMBER, 0, -1, None]),
    (local, "max_queue_depth", [*NO_WHOLE, 0, -1]),
    (ConcurrencyConfig, "max_concurrent", [*NO_WHOLE, 0, -1]),
    (harbor, "task_mode", [None, 1, [], "Template", ""]),
    (harbor, "allow_any_path", NO_FLAG),
    (harbor, "allow_local_git", NO_FLAG),
    (harbor, "keep_failed_trials", NO_FLAG),
    (harbor, "max_kept_trials", [*NO_WHOLE, 0, -1]),
    (harbor, "cancel_grace_sec", [*NO_NUMBER, 0, -1, None]),
    (harbor, "stop_timeout_sec", [*NO_NUMBER, 0, -1, None]),
    (harbor, "max_queue_depth", [*NO_WHOLE, 0, -1]),
    (lambda **s: entered(open_asyncio_bridge(**s)), "grace_sec", [True, "5", NAN, 0, -1, None]),
    (lambda **s: entered(open_asyncio_bridge(**s)), "abandon_after_sec", [True, "5", NAN, -1]),
    (lambda **s: entered(open_asyncio_bridge(**s)), "close_timeout_sec", [*NO_NUMBER, -1, None]),
    (lambda **s: entered(evaluate(None, **s)), "fresh", NO_FLAG),
    (lambda **s: entered(evaluate(None, **s)), "retry_failed", NO_FLAG),
    (lambda **s: entered(evaluate(None, **s)), "check_model", NO_FLAG),
    (partial(compare_runs, None, None), "allow_different_datasets", NO_FLAG),
    (partial(compute_metrics, [], n=1), "rows", [*NO_WHOLE, -1, None]),
    (partial(compute_metrics, [], rows=1), "n", [*NO_WHOLE, 0, None]),
    (DemoPlan, "rollouts", [*NO_WHOLE, 0, None]),
    (DemoPlan, "max_in_flight", [*NO_WHOLE, 0, None]),
    (DemoPlan, "samples_per_question", [*NO_WHOLE, 0, None]),
    (ScriptedModel, "error_rate", [*NO_NUMBER, -0.1, 1.1, None]),
    (ScriptedModel, "think_sec", [*NO_NUMBER, -1, None]),
    (simulated, "seed", [*NO_WHOLE, None]),
    (simulated, "limit_sec", [*NO_NUMBER, 0, -1]),
    (simulate_workload, "seed", [*NO_WHOLE, None]),
    (partial(simulate_workload, 0), "rollouts", [*NO_WHOLE, -1, None]),
    (partial(simulate_workload, 0), "feed", NO_FLAG),
    *[(Fate, name, [*NO_NUMBER, -1, None]) for name in ("out_sec", "back_sec", "after_sec")],
    (Fate, "after_steps", [*NO_WHOLE, -1, None]),
    (Fate, "status", [*NO_WHOLE, 99, None]),
    (partial(FaultLevel, name="x"), "latency_sec", [*NO_NUMBER, -1, None]),
    (partial(FaultLevel, name="x"), "restarts", [*NO_NUMBER, -1, None]),
    (partial(FaultLevel, name="x"), "shutdowns", [*NO_NUMBER, -1, None]),
    (partial(FaultLevel, name="x"), "pauses", [*NO_WHOLE, -1, None]),
    *[
        (plan, f"{name}_sec", [*NO_NUMBER, -1, None])
        for name in ("arrival", "agent", "grader", "caller")
    ],
    (plan, "agent_timeout_sec", NO_NUMBER),
    (plan, "grader_timeout_sec", NO_NUMBER),
    (plan, "grade", NO_FLAG),
    (plan, "reward", [*NO_NUMBER, None]),
    *[
        (ServerOptions, f"max_{n}", [*NO_WHOLE, 0])
        for n in ("concurrent", "queue_depth", "graders")
    ],
    (ServerOptions, "result_wait_timeout_sec", [*NO_NUMBER, 0, None]),
    (ServerOptions, "polling_lease_timeout_sec", [*NO_NUMBER, 0, None]),
    (ServerOptions, "result_retention_sec", [*NO_NUMBER, -1, None]),
    (partial(SimulatedWorld.pause, None), "seconds", [*NO_NUMBER, -1, None]),
    (partial(SimulatedWorld.restart_server, None), "down_sec", [*NO_NUMBER, -1, None]),
]


@pytest.fixture(autouse=True)
def as_if_harbor_were_installed(monkeypatch):
    monkeypatch.setattr("rollout.backend.harbor.backend.require_harbor", lambda: None)


@pytest.mark.parametrize(
    ("function", "name", "values"),
    SETTINGS,
    ids=[f"{n}-{i}" for i, (_, n, _) in enumerate(SETTINGS)],
)
async def test_an_invalid_setting_is_refused_by_name(function, name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name} (must|is required)"):
            result = function(**{name: value})
            if hasattr(result, "__await__"):
                await result
            pytest.fail(f"{name}={value!r} was taken")
