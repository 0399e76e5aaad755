"""``GET /metrics``: what a server has counted, in the text format of Prometheus.

Theory of operation: nothing is made for Prometheus until somebody asks. `read_metrics` reads what
is counted anyway, and `exposition` makes families of it with prometheus-client, in a registry that
has nothing else. No label is an id, or anything else that a caller or an agent chooses.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from attrs import frozen

from rollout._telemetry.counts import CALL_SEC, Histogram
from rollout.errors import InvalidFieldError
from rollout.server.registry import RolloutRegistry
from rollout.types import RolloutErrorCategory, RolloutStatus

__all__ = ["METRICS", "METRICS_PATH", "check_metrics", "exposition", "read_metrics"]

METRICS_PATH = "/metrics"

_EXTRA = 'prometheus-client is not installed: pip install "trio-rollout[metrics]"'

_ACTIVE = (RolloutStatus.QUEUED, RolloutStatus.RUNNING, RolloutStatus.GRADING)

Kind = Literal["gauge", "counter", "histogram"]
Values = Mapping[tuple[str, ...], float] | Histogram


class Metric(NamedTuple):
    """What is known of a metric beside its values."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "rollout_accepting_rollouts": Metric("gauge", "Whether admissions are open (1) or not (0)"),
    "rollout_active_rollouts": Metric(
        "gauge", "Rollouts that have not ended, by status", ("status",)
    ),
    "rollout_slots": Metric("gauge", "How many rollouts run at a time, if that is bounded"),
    "rollout_admissions_total": Metric(
        "counter", "Admissions, by the HTTP status of their answers", ("code",)
    ),
    "rollout_results_total": Metric(
        "counter",
        "Rollouts that have ended, by status and category of the error",
        ("status", "category"),
    ),
    "rollout_lease_expirations_total": Metric(
        "counter", "Rollouts that have ended because their callers were silent"
    ),
    "rollout_queue_duration_seconds": Metric(
        "histogram", "From admissions to the starts of agents"
    ),
    "rollout_run_duration_seconds": Metric(
        "histogram", "From the starts of agents to the ends of their rollouts"
    ),
    "rollout_event_loop_lag_seconds": Metric(
        "histogram", "By how much a timer of the server's event loop was late"
    ),
    "rollout_feed_connections": Metric("gauge", "Open result feeds, one for each client"),
    "rollout_state_commits_total": Metric(
        "counter", "Commits to the state, by outcome: kept or failed", ("outcome",)
    ),
    "rollout_file_writes_total": Metric(
        "counter", "Rollouts whose files were written, or not, by outcome", ("outcome",)
    ),
    "rollout_workers": Metric("gauge", "Workers of a pool, by status", ("status",)),
    "rollout_model_calls_total": Metric(
        "counter", "Calls through model gateways that have ended, by outcome", ("outcome",)
    ),
    "rollout_model_call_duration_seconds": Metric(
        "histogram", "From sending calls to model endpoints to the ends of the answers"
    ),
    "rollout_model_call_retries_total": Metric("counter", "How often calls were sent again"),
    "rollout_model_call_wait_seconds_total": Metric(
        "counter", "How long calls have waited for a place or a retry"
    ),
    "rollout_model_tokens_total": Metric(
        "counter", "Tokens that model endpoints have named, by type: input or output", ("type",)
    ),
    "rollout_model_calls_in_flight": Metric(
        "gauge", "Calls through model gateways that have not ended"
    ),
    "rollout_policy_paused": Metric("gauge", "Whether calls to the policy wait (1) or not (0)"),
    "rollout_policy_version": Metric("gauge", "The version of the policy, if somebody has said it"),
}
"""All metrics by name, in the order of the exposition."""


def check_metrics(wanted: bool | None) -> bool:
    """Return whether metrics can be served, and are wanted; ``None`` wants them where they can.

    Raises:
        InvalidFieldError: They are wanted, and prometheus-client is not installed.
    """
    installed = importlib.util.find_spec("prometheus_client") is not None
    if wanted and not installed:
        raise InvalidFieldError("metrics", f"cannot be served: {_EXTRA}")
    return installed if wanted is None else wanted


def read_metrics(
    registry: RolloutRegistry,
    *,
    health: Mapping[str, Any],
    counts: Mapping[str, float],
    feeds: int,
    lag_sec: Histogram | None,
    policy: Mapping[str, Any] | None,
) -> dict[str, Values]:
    """Return the values of all metrics that the server has, by name.

    Args:
        registry: Its rollouts.
        health: What its backend says.
        counts: What it and its workers have counted, see ``counts`` of the health.
        feeds: How many feeds are open.
        lag_sec: By how much its event loop was late, if that is known.
        policy: The state of the policy behind its gateway, or those of its workers.
    """
    counted = registry.hooks.counts
    values: dict[str, Values] = {
        "rollout_accepting_rollouts": {(): float(registry.lifecycle.accepting_rollouts)},
        "rollout_active_rollouts": {(str(status),): counted.active[status] for status in _ACTIVE},
        "rollout_admissions_total": _labelled(counted.admissions),
        "rollout_results_total": {
            (str(status), str(category or "")): count
            for (status, category), count in counted.results.items()
        },
        "rollout_lease_expirations_total": {
            (): counted.results[RolloutStatus.FAILURE, RolloutErrorCategory.LEASE_EXPIRED]
        },
        "rollout_queue_duration_seconds": counted.queue_sec,
        "rollout_run_duration_seconds": counted.run_sec,
        "rollout_feed_connections": {(): feeds},
        "rollout_file_writes_total": _part(counts, "files."),
    }
    concurrency = health.get("concurrency")
    slots = concurrency.get("max_concurrent") if isinstance(concurrency, dict) else None
    if isinstance(slots, int):
        values["rollout_slots"] = {(): slots}
    if lag_sec is not None:
        values["rollout_event_loop_lag_seconds"] = lag_sec
    if registry.store is not None:
        values["rollout_state_commits_total"] = _labelled(registry.commits)
    workers = health.get("workers")
    if isinstance(workers, list):
        statuses = Counter(str(each.get("status")) for each in workers if isinstance(each, dict))
        values["rollout_workers"] = _labelled({"up": 0, **statuses})
    if any(name.startswith("model_") for name in counts):
        values["rollout_model_calls_total"] = _part(counts, "model_calls.")
        values["rollout_model_call_retries_total"] = {(): counts.get("model_retries", 0)}
        values["rollout_model_call_wait_seconds_total"] = {(): counts.get("model_wait_sec", 0)}
        values["rollout_model_tokens_total"] = _part(counts, "model_tokens.")
        values["rollout_model_call_duration_seconds"] = Histogram.of_flat(
            CALL_SEC, "model_call_sec", counts
        )
    if policy is not None:
        values["rollout_model_calls_in_flight"] = {(): policy["calls_in_flight"]}
        values["rollout_policy_paused"] = {(): float(policy["paused"])}
        if policy["version"] is not None:
            values["rollout_policy_version"] = {(): policy["version"]}
    return values


def _labelled(counts: Mapping[Any, float]) -> dict[tuple[str, ...], float]:
    return {(str(label),): count for label, count in counts.items()}


def _part(counts: Mapping[str, float], prefix: str) -> dict[tuple[str, ...], float]:
    return {
        (name.removeprefix(prefix),): count
        for name, count in counts.items()
        if name.startswith(prefix)
    }


def exposition(values: Mapping[str, Values]) -> tuple[bytes, str]:
    """Return values in the text format of Prometheus, and its media type."""
    prometheus: Any = importlib.import_module("prometheus_client")
    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(values))
    return prometheus.generate_latest(registry), prometheus.CONTENT_TYPE_LATEST


@frozen(eq=False)
class _Collector:
    """Values as a collector of prometheus-client."""

    _values: Mapping[str, Values]

    def collect(self) -> Iterator[Any]:
        """Yield a family for each metric that has values."""
        core: Any = importlib.import_module("prometheus_client.core")
        kinds = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
        for name, metric in METRICS.items():
            values = self._values.get(name)
            if isinstance(values, Histogram):
                sums = accumulate(values.counts)
                bounds = [*map(str, values.bounds), "+Inf"]
                family = core.HistogramMetricFamily(name, metric.text)
                family.add_metric([], [*zip(bounds, sums, strict=True)], values.total)
                yield family
            elif values is not None:
                family = kinds[metric.kind](name, metric.text, labels=metric.labels)
                for labels, value in values.items():
                    family.add_metric(labels, value)
                yield family
