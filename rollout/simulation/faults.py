"""Faults of the simulated network, and the plans that decide which request meets which fault.

A `Fate` says what happens to one request. A plan hands out fates in the order in which
requests are sent: `RandomFaults` draws them from a seed, `ScriptedFaults` reads them from a
list, which is what Hypothesis shrinks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from attrs import define, field, frozen

from rollout._checks import check_number, check_whole, setting
from rollout.errors import InvalidFieldError

__all__ = [
    "LEVELS",
    "Fate",
    "Fault",
    "FaultLevel",
    "FaultPlan",
    "RandomFaults",
    "Route",
    "ScriptedFaults",
]


class Route(StrEnum):
    """Which route a request goes to; the last four are of the extensions."""

    ADMIT = "admit"
    POLL = "poll"
    CANCEL = "cancel"
    HEALTH = "health"
    OTHER = "other"
    BATCH = "batch"
    FEED = "feed"
    RENEW = "renew"
    START = "start"


class Fault(StrEnum):
    """A fault that a request meets."""

    NONE = "none"
    REFUSED = "refused"
    """The connection is refused; the server sees nothing."""
    LOST_BEFORE = "lost-before"
    """The connection is lost before the server sees the request."""
    LOST_DURING = "lost-during"
    """The connection is lost while the server works on it; the server sees a disconnect."""
    LOST_AFTER = "lost-after"
    """The connection is lost after the server has answered."""
    SILENCE = "silence"
    """The server gets the request, its answer never arrives: the client's read times out."""
    GATEWAY = "gateway"
    """A gateway answers 502, 503 or 504; the server sees nothing."""
    BUSY = "busy"
    """A gateway answers 429."""
    TRUNCATED = "truncated"
    """The answer's body is cut short."""
    FOREIGN = "foreign"
    """The answer's body is about something else."""
    LATE = "late"
    """The answer is held back for a long time."""
    STALE = "stale"
    """A cache in between answers with what the first poll of that rollout was answered with."""
    TRICKLE = "trickle"
    """The answer comes in bit by bit for minutes; no single read of it times out."""


GATEWAY_BODIES = ("json", "html", "empty")


_from_zero = setting(check_number, least=0)


@frozen(kw_only=True)
class Fate:
    """What happens to one request.

    Attributes:
        fault: What goes wrong, if anything.
        out_sec: How long the request is on its way, in seconds.
        back_sec: How long the answer is on its way, in seconds.
        after_sec: For `LOST_DURING`, when the loss happens; for `LATE`, how long the answer is
            held back; for `TRICKLE`, a tenth of the time that it takes.
        after_steps: For `LOST_DURING`, for how many steps of the tasks the server works on
            after that time, before it learns of the loss.
        status: For `GATEWAY`, the status.
        body: For `GATEWAY`, what kind of body.
        retry_after: For `BUSY`, the header; ``None`` leaves it out.
    """

    fault: Fault = Fault.NONE
    out_sec: float = field(default=0.01, validator=_from_zero)
    back_sec: float = field(default=0.01, validator=_from_zero)
    after_sec: float = field(default=1.0, validator=_from_zero)
    after_steps: int = field(default=0, validator=setting(check_whole, least=0))
    status: int = field(default=503, validator=setting(check_whole, least=100))
    body: str = "json"
    retry_after: str | None = None


class FaultPlan(Protocol):
    """Decides what happens to requests."""

    def fate(self, route: Route) -> Fate:
        """Return the fate of the next request, which goes to *route*."""
        ...


@frozen(kw_only=True)
class FaultLevel:
    """How often things go wrong.

    Attributes:
        name: What the command line calls it.
        weights: How likely each fault is for one request; the rest is `NONE`.
        latency_sec: The longest usual latency in each direction.
        restarts: How likely a server restart is in one run.
        shutdowns: How likely it is that the server is shut down while callers still wait.
        pauses: How many pauses of all processes there are in one run, at most.
    """

    name: str
    weights: dict[Fault, float] = field(factory=dict)
    latency_sec: float = field(default=0.05, validator=_from_zero)
    restarts: float = field(default=0.0, validator=_from_zero)
    shutdowns: float = field(default=0.0, validator=_from_zero)
    pauses: int = field(default=0, validator=setting(check_whole, least=0))


LEVELS = {
    level.name: level
    for level in (
        FaultLevel(name="none"),
        FaultLevel(
            name="mild",
            weights={
                Fault.REFUSED: 0.004,
                Fault.LOST_BEFORE: 0.008,
                Fault.LOST_DURING: 0.01,
                Fault.LOST_AFTER: 0.008,
                Fault.SILENCE: 0.004,
                Fault.GATEWAY: 0.015,
                Fault.BUSY: 0.02,
                Fault.TRUNCATED: 0.001,
                Fault.FOREIGN: 0.001,
                Fault.LATE: 0.02,
                Fault.STALE: 0.005,
                Fault.TRICKLE: 0.002,
            },
            latency_sec=0.1,
            restarts=0.05,
            shutdowns=0.03,
            pauses=1,
        ),
        FaultLevel(
            name="harsh",
            weights={
                Fault.REFUSED: 0.03,
                Fault.LOST_BEFORE: 0.05,
                Fault.LOST_DURING: 0.08,
                Fault.LOST_AFTER: 0.06,
                Fault.SILENCE: 0.03,
                Fault.GATEWAY: 0.12,
                Fault.BUSY: 0.08,
                Fault.TRUNCATED: 0.01,
                Fault.FOREIGN: 0.01,
                Fault.LATE: 0.06,
                Fault.STALE: 0.03,
                Fault.TRICKLE: 0.02,
            },
            latency_sec=1.0,
            restarts=0.3,
            shutdowns=0.15,
            pauses=3,
        ),
    )
}


def level_of(faults: str | FaultLevel) -> FaultLevel:
    """Return the level of that name.

    Raises:
        InvalidFieldError: There is none.
    """
    if not isinstance(faults, str):
        return faults
    if faults not in LEVELS:
        raise InvalidFieldError("faults", f"must be one of {', '.join(LEVELS)}, not {faults!r}")
    return LEVELS[faults]


_MOST_STEPS = 25
"""A request is answered within so many steps, if it need not wait."""

_RETRY_AFTERS = (None, "0", "1", "3", "0.2", "soon", "-5", "1e400", "nan", "120")


@define
class RandomFaults:
    """Draws fates from a seeded generator.

    Attributes:
        level: How often things go wrong.
        generator: Where the draws come from.
    """

    level: FaultLevel
    generator: random.Random

    def fate(self, route: Route) -> Fate:
        """Draw the fate of the next request."""
        draw = self.generator
        fault = Fault.NONE
        dice = draw.random()
        for kind, weight in self.level.weights.items():
            dice -= weight
            if dice < 0:
                fault = kind
                break
        if fault is Fault.BUSY and route not in {Route.ADMIT, Route.BATCH}:
            fault = Fault.NONE
        more = {} if fault is Fault.NONE else self._details(fault)
        return Fate(fault=fault, out_sec=self._latency(), back_sec=self._latency(), **more)

    def _details(self, fault: Fault) -> dict[str, Any]:
        draw = self.generator
        return {
            "after_sec": draw.choice((0.0, 0.001, 0.1, 5.0, 25.0, 35.0)) * draw.random(),
            "after_steps": draw.randrange(_MOST_STEPS) if fault is Fault.LOST_DURING else 0,
            "status": draw.choice((502, 503, 504)),
            "body": draw.choice(GATEWAY_BODIES),
            "retry_after": draw.choice(_RETRY_AFTERS),
        }

    def _latency(self) -> float:
        return round(self.level.latency_sec * self.generator.random() ** 3, 4)


@define
class ScriptedFaults:
    """Reads fates from a list; beyond its end everything goes well.

    Attributes:
        fates: The fates of the first requests, in order.
        used: How many of them have been handed out.
    """

    fates: Sequence[Fate]
    used: int = 0

    def fate(self, route: Route) -> Fate:
        """Return the next fate."""
        del route
        if self.used >= len(self.fates):
            return Fate()
        self.used += 1
        return self.fates[self.used - 1]
