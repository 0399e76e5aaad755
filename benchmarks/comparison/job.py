"""One piece of work for a client, and the account of it. Standard library only.

Both systems' processes import this, so that they do the same work and count it in the same
way. Nothing in here knows which event loop it runs on.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

CHAT_URL = "http://127.0.0.1:9/v1"
ANSWER = "42"
WAIT_SEC = 30.0
LEASE_SEC = 120.0


@dataclass(frozen=True)
class Job:
    """Rollouts to run, so many at a time.

    Attributes:
        name: Distinguishes the rollout ids of this job from those of others.
        rollouts: How many to run at least.
        in_flight: How many at a time; each that ends makes room for the next.
        sleep_sec: What the workflow of each does.
        at_least_sec: Go on with more rollouts until so much time has passed.
        limit_sec: Give up, and count what was finished, after so much time.
    """

    name: str
    rollouts: int
    in_flight: int
    sleep_sec: float = 0.0
    at_least_sec: float = 0.0
    limit_sec: float = 60.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def request(self, rollout_id: str) -> dict[str, Any]:
        """Make the arguments of a rollout; its workflow sleeps, its grader compares."""
        message = {"role": "user", "content": "What is 6 * 7?", "sleep": self.sleep_sec}
        return {
            "initial_messages": [message],
            "chat_completions_url": CHAT_URL,
            "rollout_id": rollout_id,
            "label": ANSWER,
        }


@dataclass
class Tally:
    """What came of a job, kept by the client that runs it.

    Attributes:
        started: When each rollout that has not ended was begun, by its id.
    """

    job: Job
    begun: float = field(default_factory=time.perf_counter)
    last: float = 0.0
    count: int = 0
    started: dict[str, float] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def rollout_ids(self) -> Iterator[str]:
        """Give out ids until the job is done; any number of tasks may share the iterator."""
        job = self.job
        while self.count < job.rollouts or time.perf_counter() - self.begun < job.at_least_sec:
            rollout_id = f"{job.name}-{self.count}"
            self.count += 1
            self.started[rollout_id] = time.perf_counter()
            yield rollout_id

    def ended(self, rollout_id: str, outcome: str) -> None:
        """Count a rollout that has ended, one way or the other."""
        self.last = time.perf_counter()
        self.outcomes[outcome] += 1
        began = self.started.pop(rollout_id)
        if outcome == "success":
            self.latencies.append(self.last - began)

    def report(self) -> dict[str, Any]:
        """Sum up; the time is that until the last rollout ended, or until the limit."""
        cut = bool(self.started)
        wall = (time.perf_counter() if cut else self.last) - self.begun
        finished = self.outcomes["success"]
        ordered = sorted(self.latencies)
        return {
            "wall_sec": wall,
            "finished": finished,
            "unfinished": len(self.started),
            "cut": cut,
            "outcomes": dict(self.outcomes),
            "rollouts_per_sec": finished / wall,
            "latency_p50_sec": percentile(ordered, 0.50),
            "latency_p95_sec": percentile(ordered, 0.95),
            "latency_max_sec": percentile(ordered, 1.0),
        }


def percentile(ordered: list[float], part: float) -> float | None:
    """The value below which *part* of the sorted values lie."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def outcome_of(result: Any) -> str:
    """Name an outcome: a success counts only with the reward that it must have."""
    status = str(getattr(result.status, "value", result.status))
    if status != "success":
        return f"{status}: {result.err_message}"
    reward = result.sample.reward if result.sample else None
    return "success" if reward == 1.0 else f"success with reward {reward}"


def outcome_of_error(error: BaseException) -> str:
    """Name what a client raised."""
    return type(error).__name__


def say(message: str) -> None:
    """Send one line to the process that started this one."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def about() -> dict[str, Any]:
    """What to know about this process."""
    return {"pid": os.getpid(), "python": sys.version.split()[0]}
