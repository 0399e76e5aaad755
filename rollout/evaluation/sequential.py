"""Confidence sequences: intervals that stay valid however often one looks, and what they decide.

An interval for a fixed number of rows is too narrow for a run that stops as soon as it likes what
it sees. A confidence sequence holds the truth at all times at once with its level. Pure.

Theory of operation: a candidate for the true rate is refuted by betting against it. A bettor
starts with a capital of 1 and bets before each row, at odds that are fair if the candidate is
right, that the row does better. If the candidate is right, the capital ever reaches 2 / alpha with
a probability of alpha / 2 at most (Ville's inequality). The lower end is the largest candidate
that was ever refuted so; the upper end is the same for the share that does not pass. The capital
never grows with the candidate, so candidates are tried from the lowest up, on a grid, and an end
that has moved stays.

Rows of a dataset are drawn without replacement: what has been seen is gone, so the candidate for
what is left moves, and at the end of the dataset nothing is left to be unsure of. That needs rows
in a random order, and results in that order: rows that end first are not a random choice.

Source: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting",
Journal of the Royal Statistical Society Series B 86(1), arXiv:2010.09686: section 4 for the hedged
capital process, section 5 for sampling without replacement, and its appendix for bets that are the
mean of several.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from fractions import Fraction
from hashlib import sha256
from typing import Any

from attrs import define, field

from rollout._checks import is_finite_number, is_whole_from_one
from rollout.errors import EvaluationDamagedError, InvalidFieldError
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.intervals import LEVEL, Estimate, to_float
from rollout.evaluation.selection import Picker, parse_rows

__all__ = [
    "ConfidenceSequence",
    "Stopping",
    "drawn_order",
    "lockstep_order",
    "replay",
]

SEQUENTIAL = "sequential"
"""How `Estimate.method` names these intervals."""

LEAST_UNTIL = 0.001
"""The smallest half-width that a run can wait for; the grid is finer."""

_RESOLUTION = 2000
"""Candidates between 0 and 1."""
_DISTANCES = (0.32, 0.16, 0.08, 0.04, 0.02, 0.01, 0.005)
"""For which distance from the truth each of the bets is the best one."""
_MOST = 0.75
"""How much of the capital is bet at most."""


@define
class _End:
    """One end: how many candidates were refuted, and the capital against the next one.

    Attributes:
        at: Which candidate is the last that was refuted; 0 for none.
        rows: For each row: passed, counted, both sums before, and the bets on it.
        capital: Of each of the bets.
        seen: How many rows the capital has been bet on.
    """

    at: int = 0
    rows: list[tuple[float, float, float, float, tuple[float, ...]]] = field(factory=list)
    capital: list[float] = field(factory=lambda: [1.0] * len(_DISTANCES))
    seen: int = 0

    def move(self, resolution: int, other: int, population: int | None, target: float) -> None:
        """Refute what can be refuted, up to one step from the other end."""
        while self.at + other < resolution - 1 and self._refutes(
            (self.at + 1) / resolution, population, target
        ):
            self.at += 1
            self.capital = [1.0] * len(_DISTANCES)
            self.seen = 0

    def _refutes(self, m: float, population: int | None, target: float) -> bool:
        """Bet against a candidate on the rows that it has not met; ``True`` once it is refuted."""
        capital = self.capital
        passed, counted, passed_before, counted_before, _ = self.rows[-1]
        if population is not None:
            left = population - len(self.rows)
            if m * (left + counted_before + counted) < passed_before + passed:
                return True  # even if all that is left counts and fails
        for t in range(self.seen, len(self.rows)):
            passed, counted, passed_before, counted_before, bets = self.rows[t]
            expected = m
            if population is not None:
                expected += (m * counted_before - passed_before) / (population - t)
            if expected <= 0:
                continue  # no bet
            most = _MOST / expected
            gain = passed + m * (1 - counted) - expected
            capital = [
                held * (1 + (bet if bet < most else most) * gain)  # noqa: FURB136 - min takes longer
                for held, bet in zip(capital, bets, strict=True)
            ]
            if sum(capital) >= target:
                return True
        self.capital, self.seen = capital, len(self.rows)
        return False


@define
class ConfidenceSequence:
    """A confidence sequence for a rate, from its rows one by one in random order.

    Formula: with p_t the share of row t's attempts that passed and c_t the share that counts, of
    N rows, and P and C the sums of those before, the candidate m says of the next row::

        e_t = m + (m * C - P) / (N - t + 1)
        K_t = K_(t-1) * (1 + min(d / v_t, 0.75 / e_t) * (p_t + m * (1 - c_t) - e_t))

    v_t is the variance of the rows before; the capital is the mean of K over seven distances d,
    from 0.32 to 0.005. d / v is the bet that refutes a candidate at distance d fastest. If all
    attempts count, c_t is 1 and the row enters with its mean. For rows that are drawn from no
    finite dataset, e_t is m.

    The rate is that of all N rows: passed attempts out of those that count. An attempt that does
    not count (removed, without a reward) is left out of both.

    Attributes:
        population: N; ``None`` for rows that might go on for ever.
        level: Confidence level of the whole sequence.
        resolution: How many candidates there are between 0 and 1; ends are on these, on the
            wide side.
        rows: How many rows were added.
    """

    population: int | None = None
    level: float = LEVEL
    resolution: int = _RESOLUTION
    rows: int = 0
    _passed: Fraction = field(default=Fraction(), init=False)
    _counted: Fraction = field(default=Fraction(), init=False)
    _seen: int = field(default=0, init=False)
    _mean_sum: float = field(default=0.5, init=False)
    _spread: float = field(default=0.25, init=False)
    _lower: _End = field(factory=_End, init=False, repr=False)
    _upper: _End = field(factory=_End, init=False, repr=False)

    def add(self, passed: Fraction | int, counted: Fraction | int = 1) -> None:
        """Add the next row.

        Args:
            passed: The share of its attempts that passed.
            counted: The share that counts.
        """
        variance = self._spread / (self._seen + 1)
        bets = tuple(distance / variance for distance in _DISTANCES)
        before = float(self._passed), float(self._counted)
        share, weight = float(passed), float(counted)
        self._lower.rows.append((share, weight, *before, bets))
        self._upper.rows.append((weight - share, weight, before[1] - before[0], before[1], bets))
        self.rows += 1
        self._passed += passed
        self._counted += counted
        if counted:
            self._seen += 1
            value = float(Fraction(passed) / counted)
            self._mean_sum += value
            self._spread += (value - self._mean_sum / (self._seen + 1)) ** 2
        target = 2 / (1 - self.level) * len(_DISTANCES)
        for end, other in ((self._lower, self._upper), (self._upper, self._lower)):
            end.move(self.resolution, other.at, self.population, target)

    @property
    def value(self) -> float | None:
        """The rate so far; ``None`` if no attempt counts."""
        return to_float(self._passed / self._counted) if self._counted else None

    @property
    def counted(self) -> int:
        """How many rows have an attempt that counts."""
        return self._seen

    @property
    def low(self) -> float:
        """The lower end."""
        return self._lower.at / self.resolution

    @property
    def high(self) -> float:
        """The upper end."""
        return 1 - self._upper.at / self.resolution

    @property
    def half_width(self) -> float:
        """Half of what is between the ends."""
        return (self.resolution - self._lower.at - self._upper.at) / (2 * self.resolution)


def drawn_order(rows: Iterable[int], seed: int) -> list[int]:
    """The order in which rows are drawn: by the SHA-256 of seed and row.

    More rows get their places between the others, so a selection that grows keeps its order.
    """
    return sorted(rows, key=lambda row: (sha256(f"{seed}:{row}".encode()).digest(), row))


def selected_rows(manifest: Mapping[str, Any]) -> list[int]:
    """The rows that a run takes, in the order of the file.

    Raises:
        EvaluationDamagedError: The manifest does not say.
    """
    dataset = manifest["dataset"]
    rows, limit = dataset.get("rows"), dataset.get("limit")
    try:
        selection = parse_rows(dataset.get("selection") or "0-")
    except (InvalidFieldError, TypeError):
        selection = None
    if (
        selection is None
        or not is_whole_from_one(rows)
        or not (limit is None or is_whole_from_one(limit))
    ):
        raise EvaluationDamagedError("manifest.json is damaged: dataset.rows, selection or limit")
    picker = Picker(selection, limit)
    return [row for row in range(rows) if picker.takes(row)]


def seed_of(manifest: Mapping[str, Any]) -> int | None:
    """The seed of a run's order; ``None`` if its rows are in the order of the file.

    Raises:
        EvaluationDamagedError: It is something else.
    """
    seed = manifest["run"].get("seed")
    if seed is not None and not isinstance(seed, int):
        raise EvaluationDamagedError("manifest.json is damaged: run.seed is not a whole number")
    return seed


def lockstep_order(rows: Collection[int], a: int | None, b: int | None) -> list[int]:
    """The order in which rows are known in both of two runs that go on side by side.

    A row is known once it has been drawn in both; with the same seed, that is the order of both.
    Whatever the seeds, it is a random order that depends on no result.

    Args:
        rows: The rows that both runs take.
        a: The seed of run A; ``None`` if all of its rows are known from the start.
        b: The seed of run B, likewise.
    """
    shuffled = drawn_order(rows, 0)
    places = [
        {row: place for place, row in enumerate(drawn_order(rows, seed))}
        for seed in (a, b)
        if seed is not None
    ]
    return sorted(shuffled, key=lambda row: sorted((each[row] for each in places), reverse=True))


@define
class Stopping:
    """Decides when a run knows its pass rate well enough.

    Rows enter in the order in which they are drawn, each once all of its attempts have settled:
    a row that takes long holds up those behind it, since rows that end first are not a random
    choice.

    Attributes:
        order: The rows as they are drawn.
        n: Attempts for each row.
        until: The half-width of the interval at which the run stops.
        sequence: The confidence sequence of the rows that have entered.
        position: How many rows that are.
        attempts: How many of their attempts count.
    """

    order: list[int]
    n: int
    until: float
    sequence: ConfidenceSequence
    position: int = 0
    attempts: int = 0

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Stopping | None:
        """Make the rule of a run; ``None`` if it just runs all rows.

        Raises:
            EvaluationDamagedError: The manifest has values that this library does not write.
        """
        until, seed = manifest["run"].get("until"), seed_of(manifest)
        if until is None:
            return None
        if not is_finite_number(until) or seed is None:
            raise EvaluationDamagedError("manifest.json is damaged: run.until or run.seed")
        order = drawn_order(selected_rows(manifest), seed)
        return cls(order, manifest["run"]["n"], until, ConfidenceSequence(len(order)))

    @property
    def decided(self) -> bool:
        """Whether the interval is narrow enough."""
        return self.sequence.half_width <= self.until

    @property
    def early(self) -> bool:
        """Whether it was narrow enough before all rows had run."""
        return self.decided and self.position < len(self.order)

    @property
    def rows(self) -> int:
        """How many rows the run has: those that were enough, else all."""
        return self.position if self.decided else len(self.order)

    @property
    def estimate(self) -> Estimate | None:
        """The pass rate with its interval (method ``sequential``); ``None`` once all rows ran.

        Then nothing depends on when one looked.
        """
        if self.position == len(self.order):
            return None
        value = self.sequence.value
        return Estimate(
            value,
            None if value is None else self.sequence.low,
            None if value is None else self.sequence.high,
            None,
            LEVEL,
            "none" if value is None else SEQUENTIAL,
            self.attempts,
            self.sequence.counted,
        )

    def advance(self, index: AttemptIndex, open_again: Container[int] = ()) -> bool:
        """Let the rows enter that are whole; ``True`` once the interval is narrow enough.

        Args:
            index: The attempts of the run.
            open_again: Rows with attempts on record that are to be run again.
        """
        while not self.decided and self.position < len(self.order):
            row = self.order[self.position]
            score = None if row in open_again else index.whole_row(row, self.n)
            if score is None:
                break
            self.sequence.add(Fraction(score.passed, self.n), Fraction(score.counted, self.n))
            self.position += 1
            self.attempts += score.counted
        return self.decided

    def drop_rest(self, index: AttemptIndex) -> None:
        """Drop the rows from *index* that are behind those that were enough.

        Of those that ran at the same time, the ones that ended first say more about their length
        than about the model.
        """
        index.keep(set(self.order[: self.position]))


def replay(manifest: Mapping[str, Any], index: AttemptIndex) -> Stopping | None:
    """Work out where a run with this index stands; ``None`` if it just runs all rows.

    If it stopped early, *index* loses the rows behind, see `Stopping.drop_rest`.

    Raises:
        EvaluationDamagedError: The manifest has values that this library does not write.
    """
    stopping = Stopping.of(manifest)
    if stopping is not None:
        stopping.advance(index)
        if stopping.early:
            stopping.drop_rest(index)
    return stopping
