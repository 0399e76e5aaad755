"""Which calls are sent to the endpoint again, and when. Pure."""

from __future__ import annotations

from attrs import define, field, frozen

from rollout.rules.retry import admission_retry_delay_sec, lengthened

__all__ = ["Outcome", "Retries"]

_OVERLOADED = frozenset({429, 503, 529})
_BROKEN = frozenset({502, 503, 504})
_OK = range(200, 300)


@frozen(kw_only=True)
class Outcome:
    """What became of a call that was sent.

    Attributes:
        overloaded: The endpoint refused it for having too many.
        broken: The endpoint, or what stands before it, failed.
        answered: It was answered as asked.
        retry_after_sec: How long the endpoint wants to be left alone, if it said so.
        latency_sec: How long an answer took, to its end.
        tokens: How many tokens an answer has, if that is known.
    """

    overloaded: bool = False
    broken: bool = False
    answered: bool = False
    retry_after_sec: float | None = None
    latency_sec: float = 0.0
    tokens: int | None = None

    @classmethod
    def of_status(cls, status: int, retry_after_sec: float | None = None) -> Outcome:
        """Read the status of an answer."""
        return cls(
            overloaded=status in _OVERLOADED,
            broken=status in _BROKEN,
            answered=status in _OK,
            retry_after_sec=retry_after_sec,
        )

    @property
    def may_retry(self) -> bool:
        """Whether another attempt may do better."""
        return self.overloaded or self.broken


@define
class Retries:
    """The retries of one call; make a new one for each.

    Attributes:
        most: How many there may be.
        within_sec: How long after the first failure the last one may start, in seconds.
        failures: How many attempts have failed.
    """

    most: int
    within_sec: float
    failures: int = field(default=0, init=False)
    _until: float | None = field(default=None, init=False)

    def delay_sec(self, outcome: Outcome, now: float, *, moves: bool, draw: float) -> float | None:
        """Count a failure; return how long to wait before the next attempt, ``None`` to give up.

        Args:
            outcome: The failure.
            now: The time.
            moves: Whether the next attempt goes to another endpoint, which need not wait.
            draw: A random number from 0 to 1.
        """
        if self._until is None:
            self._until = now + self.within_sec
        self.failures += 1
        if self.failures > self.most or not outcome.may_retry:
            return None
        if moves:
            return 0.0
        asked = outcome.retry_after_sec
        delay = lengthened(
            admission_retry_delay_sec(self.failures) if asked is None else asked, draw
        )
        return delay if now + delay <= self._until else None

    def waited(self, seconds: float) -> None:
        """Note a wait for others, which does not count."""
        if self._until is not None:
            self._until += seconds
