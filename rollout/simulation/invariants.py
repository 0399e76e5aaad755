"""The invariants of rollouts, as named checks over a trace.

A check reads what happened and answers what should not have. It knows the rules from the
protocol, not from the code that is under test, so the arithmetic here is written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import field, frozen

from rollout.simulation.admission_checks import (
    check_admission_keys,
    check_admissions_not_replayed,
    check_early_cancels,
)
from rollout.simulation.answer_checks import (
    check_cancel_requests,
    check_feeds,
    check_polls,
    check_tokens,
)
from rollout.simulation.client_checks import (
    check_bulk,
    check_cancels_not_replayed,
    check_local_cancel,
    check_retries,
    check_seen_statuses,
)
from rollout.simulation.crash_checks import check_durability
from rollout.simulation.execution_checks import (
    check_disconnects,
    check_executions,
    check_phases,
    check_published_statuses,
    check_slots,
)
from rollout.simulation.history import Checked, Finding, History
from rollout.simulation.lifetime_checks import check_leases, check_retention, check_shutdown
from rollout.simulation.pool_checks import (
    Pool,
    check_agents_start_once,
    check_ends,
    check_fairness,
    check_goes_elsewhere,
    check_lost_workers,
    check_places,
)
from rollout.simulation.trace import Event, Trace, story_of
from rollout.simulation.workload import RolloutPlan
from rollout.simulation.world import ServerOptions

__all__ = ["INVARIANTS", "Violation", "check_pool", "check_trace"]

INVARIANTS: Mapping[str, str] = {
    "one-execution": "at most one execution and one terminal result for an id in a process",
    "forward-only": "no observer sees a status go back, or a start time change",
    "lease-safety": "who polls within the lease keeps it; silence ends it at its deadline",
    "retry-in-lease": "polls, and admissions with a key, are repeated only within the lease",
    "admission-keys": "one admission key starts one execution and has one token",
    "early-cancel": "what was cancelled by its admission key before it came never starts",
    "slots": "slots never exceed the limit, and none leaks",
    "local-cancel": "cancelling a handle sends nothing; cancelling a rollout keeps it polling",
    "retention": "a result stays readable for its time, its id reserved until all is over",
    "shutdown": "every shutdown stage ends within its budget, and nothing outlives the server",
    "news": "polls and feeds are told at once what they have not seen",
    "tokens": "a poll or a feed with another token than its lease's is refused",
    "cancel": "a cancel request is answered by what it meets, and stops a rollout once",
    "bulk": "run_rollouts keeps its bounds, and cancels what it leaves and nothing else",
    "deadlines": "what is to end ends: at its deadline or the request to stop, the earlier",
    "durability": "with a state, what was answered outlives every death of the server",
    "disconnect": "a disconnect changes nothing but that client's own response",
    "agent-once": "with workers, an agent is started once at most, whatever dies",
    "one-end": "with workers, every rollout ends, and soon after its worker has ended it",
    "elsewhere": "what a worker has not started runs elsewhere, and does not fail for it",
    "worker-lost": "an agent that was lost with its worker ends as a failure that says so",
    "places": "neither a front nor a worker holds a place when all is over",
    "fairness": "no run waits while many rollouts of other runs are handed out",
}

_CHECKS: Sequence[tuple[str, Callable[[Checked], Iterator[Finding]]]] = (
    ("one-execution", check_executions),
    ("forward-only", check_published_statuses),
    ("forward-only", check_seen_statuses),
    ("lease-safety", check_leases),
    ("retry-in-lease", check_retries),
    ("retry-in-lease", check_admissions_not_replayed),
    ("retry-in-lease", check_cancels_not_replayed),
    ("admission-keys", check_admission_keys),
    ("early-cancel", check_early_cancels),
    ("slots", check_slots),
    ("local-cancel", check_local_cancel),
    ("retention", check_retention),
    ("shutdown", check_shutdown),
    ("news", check_polls),
    ("news", check_feeds),
    ("tokens", check_tokens),
    ("cancel", check_cancel_requests),
    ("bulk", check_bulk),
    ("deadlines", check_phases),
    ("durability", check_durability),
    ("disconnect", check_disconnects),
)

_OF_CALLERS = {"retry-in-lease", "local-cancel", "bulk"}
"""Invariants of callers, which a front is not for its workers: it asks again as it decides."""

_POOL_CHECKS: Sequence[tuple[str, Callable[[Pool], Iterator[Finding]]]] = (
    ("agent-once", check_agents_start_once),
    ("one-end", check_ends),
    ("elsewhere", check_goes_elsewhere),
    ("worker-lost", check_lost_workers),
    ("places", check_places),
    ("fairness", check_fairness),
)


@frozen
class Violation:
    """An invariant that did not hold.

    Attributes:
        invariant: Its name, a key of `INVARIANTS`.
        rollout_id: For which rollout; empty if it is about the server as a whole.
        message: What was wrong.
        story: The events that a person has to know, in order.
    """

    invariant: str
    rollout_id: str
    message: str
    story: list[Event] = field(factory=list, repr=False)

    def __str__(self) -> str:
        about = f" ({self.rollout_id})" if self.rollout_id else ""
        lines = [f"{self.invariant}{about}: {self.message}", *map(str, self.story)]
        return "\n  ".join(lines)


def check_trace(
    trace: Trace, options: ServerOptions, workload: Sequence[RolloutPlan] = ()
) -> list[Violation]:
    """Check every invariant over a trace.

    Args:
        trace: What happened.
        options: How the server was set up.
        workload: The rollouts' plans; with them, outcomes and slots are checked too.

    Returns:
        What did not hold, in the order of the invariants.
    """
    checked = Checked(History(trace), options, {plan.rollout_id: plan for plan in workload})
    return [
        Violation(
            name,
            finding.rollout_id,
            finding.message,
            story_of(trace, finding.rollout_id, finding.at),
        )
        for name, check in _CHECKS
        for finding in check(checked)
    ]


def check_pool(pool: Pool, whole: Trace) -> list[Violation]:
    """Check every invariant over a front, over each of its workers, and over the whole pool.

    Args:
        pool: What happened to the front and to the workers.
        whole: All of it in one trace, for the stories.

    Returns:
        What did not hold, first on the front, then on the workers.
    """
    violations = check_trace(pool.front, pool.options)
    for trace in pool.traces.values():
        found = check_trace(trace, pool.worker_options)
        violations += [each for each in found if each.invariant not in _OF_CALLERS]
    return violations + [
        Violation(
            name,
            finding.rollout_id,
            finding.message,
            story_of(whole, finding.rollout_id, finding.at),
        )
        for name, check in _POOL_CHECKS
        for finding in check(pool)
    ]
