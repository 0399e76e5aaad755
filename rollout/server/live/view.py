"""The rollouts of a server as those who look on see them: counters, rows, and what has changed.

Theory of operation: a `LiveView` observes the registry. While nobody looks on it only counts, and
keeps the rows of what has just ended. Whoever looks on has a `Watch`, in which each change marks
a rollout; a row is made when it is sent, of the state at that moment. So a slow reader costs the
marks and nothing else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import trio
from attrs import define, field

from rollout._checks import is_finite
from rollout._json.fit import fit
from rollout._logs import get_logger
from rollout._telemetry.counts import ROLLOUT_SEC, Histogram, numbers
from rollout._version import package_version
from rollout.gateway.counts import ModelCounts
from rollout.server.entry import Entry
from rollout.server.live.history import History, Recent
from rollout.server.registry import RolloutRegistry
from rollout.types import RolloutStatus

__all__ = ["LiveView", "Watch"]

logger = get_logger(__name__)

MOST_ENDED = 1000
"""How many rollouts that have ended are shown."""

_MESSAGE = 300


@define(eq=False)
class _Active:
    """What is noted of a rollout that has not ended; times are those of trio."""

    entry: Entry
    run: str | None
    admitted_at: float
    status: RolloutStatus = RolloutStatus.QUEUED
    running_at: float | None = None
    grading_at: float | None = None
    worker: str | None = None


@define(eq=False)
class Watch:
    """What somebody who looks on has not been sent yet.

    Attributes:
        changed: The rollouts whose rows have changed.
        gone: The rollouts that are shown no longer.
    """

    changed: dict[str, None] = field(factory=dict)
    gone: dict[str, None] = field(factory=dict)

    def change(self, rollout_id: str) -> None:
        """Mark a row."""
        self.changed[rollout_id] = None
        self.gone.pop(rollout_id, None)

    def drop(self, rollout_id: str) -> None:
        """Mark a row that is shown no longer."""
        self.gone[rollout_id] = None
        self.changed.pop(rollout_id, None)


class LiveView:
    """What a server shows of itself while it runs.

    Args:
        registry: Its rollouts.
        instance: What names the server and its process.

    Attributes:
        closed: Set when the streams are to end.
    """

    def __init__(self, registry: RolloutRegistry, instance: dict[str, Any]) -> None:
        self.closed = trio.Event()
        self._registry = registry
        self._instance = instance
        self._active: dict[str, _Active] = {}
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._watches: set[Watch] = set()
        self._admitted = 0
        self._admissions, self._ends = Recent(), Recent()
        self._since = 0.0
        self._wall = 0.0
        self._history = History(0.0)

    def open(self) -> None:
        """Begin to observe; called when the server starts."""
        hooks = self._registry.hooks
        self._since = trio.current_time()
        self._wall = hooks.wall_clock().timestamp() - self._since
        self._history = History(self._since)
        hooks.observers.append(self._observe)
        self._registry.on_release.append(self.closed.set)

    def watch(self) -> Watch:
        """Return a new watch, in which all rollouts are marked; `unwatch` ends it."""
        watch = Watch(dict.fromkeys([*self._ended, *self._active]))
        self._watches.add(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """End a watch."""
        self._watches.discard(watch)

    def time(self, at: float | None = None) -> float:
        """Return a moment of trio's, or now, as seconds since 1970."""
        return round(self._wall + (trio.current_time() if at is None else at), 3)

    # --- what is shown ----------------------------------------------------------------------------

    def sections(self) -> dict[str, Any]:
        """Return all but the rows, by name."""
        now, registry = trio.current_time(), self._registry
        health = self._health()
        history = self._history.state()
        counts = registry.hooks.counts
        statuses, outcomes, failures = counts.active, Counter[str](), Counter[str]()
        for (status, category), count in counts.results.items():
            outcomes[str(status)] += count
            if category is not None:
                failures[str(category)] += count
        return {
            "server": {
                **self._instance,
                "version": package_version(),
                "application": registry.backend.application,
                "started_at": self.time(self._since),
                "accepting": registry.lifecycle.accepting_rollouts,
                "status": health.get("status"),
                "state": registry.trouble,
            },
            "rollouts": {
                "active": len(self._active),
                "queued": statuses[RolloutStatus.QUEUED],
                "running": statuses[RolloutStatus.RUNNING],
                "grading": statuses[RolloutStatus.GRADING],
                "admitted": self._admitted,
                "ended": outcomes.total(),
            },
            "rates": {
                "admitted": self._admissions.rate(now, self._since),
                "ended": self._ends.rate(now, self._since),
            },
            "outcomes": dict(outcomes),
            "failures": dict(failures),
            "durations": {
                "bounds_sec": ROLLOUT_SEC,
                "queued": _durations(counts.queue_sec),
                "ran": _durations(counts.run_sec),
            },
            "history": {"since": self.time(self._since), **history},
            "slots": health.get("concurrency"),
            "workers": health.get("workers"),
            "gateway": _model_calls(registry, health),
        }

    def _health(self) -> dict[str, Any]:
        try:
            fitted, _ = fit(self._registry.backend.health())
        except Exception:
            logger.exception("the backend's health failed")
            return {"status": "error"}
        return fitted if isinstance(fitted, dict) else {}

    def row(self, rollout_id: str) -> dict[str, Any] | None:
        """Return the row of a rollout as it stands; ``None`` if it is not shown."""
        active = self._active.get(rollout_id)
        return self._ended.get(rollout_id) if active is None else self._row(active)

    def _row(self, active: _Active) -> dict[str, Any]:
        started = active.entry.record.told_start
        row = {
            "id": active.entry.rollout_id,
            "status": active.status,
            "run": active.run,
            "worker": active.worker,
            "admitted_at": self.time(active.admitted_at),
            "agent_started_at": None if started is None else round(started.timestamp(), 3),
            "grading_at": None if active.grading_at is None else self.time(active.grading_at),
        }
        if active.entry.disposition is not None:
            row["cancelling"] = True
        return {name: value for name, value in row.items() if value is not None}

    # --- what happens -----------------------------------------------------------------------------

    def _observe(self, what: str, entry: Entry) -> None:
        if what == "admitted":
            self._admit(entry)
            return
        active = self._active.get(entry.rollout_id)
        if active is None or active.entry is not entry:
            return
        if what in {"status", "agent-started"}:
            self._advance(active)
        elif what == "finished":
            self._end(active)
        elif what != "stop-requested":
            return
        self._mark(entry.rollout_id)

    def _mark(self, rollout_id: str) -> None:
        for watch in self._watches:
            watch.change(rollout_id)

    def _admit(self, entry: Entry) -> None:
        now = trio.current_time()
        run = None if entry.request is None else entry.request.run
        self._ended.pop(entry.rollout_id, None)
        self._active[entry.rollout_id] = _Active(entry, run, now)
        self._admitted += 1
        self._admissions.add(now)
        self._history.at(now).admitted += 1
        self._mark(entry.rollout_id)

    def _advance(self, active: _Active) -> None:
        before, after = active.status, active.entry.record.status
        now = trio.current_time()
        if before is not after:
            active.status = after
        if after is not RolloutStatus.QUEUED and active.running_at is None:
            active.running_at = now
            active.worker = self._registry.backend.worker_of(active.entry.rollout_id)
        if after is RolloutStatus.GRADING:
            active.grading_at = now

    def _end(self, active: _Active) -> None:
        result = active.entry.record.result
        if result is None:
            return
        now = trio.current_time()
        del self._active[active.entry.rollout_id]
        active.status = result.status
        self._ends.add(now)
        into = self._history.at(now)
        setattr(into, result.status, getattr(into, result.status) + 1)
        row = self._row(active) | {"ended_at": self.time(now)}
        row.pop("cancelling", None)
        if result.err_category is not None:
            row["err_category"] = result.err_category
        if result.err_source is not None:
            row["err_source"] = result.err_source
        if result.err_message is not None:
            row["err_message"] = result.err_message[:_MESSAGE]
        reward = None if result.sample is None else result.sample.reward
        if reward is not None and is_finite(reward):
            into.rewards += 1
            into.reward_sum += reward
            row["reward"] = reward
        self._ended[active.entry.rollout_id] = row
        if len(self._ended) > MOST_ENDED:
            dropped, _ = self._ended.popitem(last=False)
            for watch in self._watches:
                watch.drop(dropped)


def _model_calls(registry: RolloutRegistry, health: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state of the gateway, or what those of the workers have counted."""
    if registry.gateway is not None:
        return registry.gateway.state()
    counts = ModelCounts.of_flat(numbers(health.get("counts")))
    return None if counts is None else counts.state()


def _durations(counted: Histogram) -> dict[str, Any]:
    return {"counts": list(counted.counts), "total_sec": round(counted.total, 3)}
