"""What the figures need of every attempt, in nine bytes each, whatever the order they come in."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from attrs import define, field, frozen

from rollout._checks import is_finite_number
from rollout.errors import EvaluationError
from rollout.evaluation._exact import binary_places, to_steps
from rollout.evaluation.records import AttemptOutcome, AttemptRecord

__all__ = ["Ledger", "RowScore"]

_PAGE = 256
_ABSENT, _UNSETTLED, _LEFT_OUT, _FAILED, _PASSED = range(5)
_REWARDED = 8
"""Added to a state whose attempt has a reward."""


@frozen
class RowScore:
    """The attempts of one row.

    Attributes:
        row: The row.
        counted: Attempts that count in a rate: settled, and not left out.
        passed: Those that passed.
        rewarded: Those that have a reward.
        reward_steps: Their sum, in steps of 2**-places of the ledger.
    """

    row: int
    counted: int
    passed: int
    rewarded: int
    reward_steps: int


@define
class Ledger:
    """Verdict and reward of each attempt, by row and attempt.

    It is kept in pages of attempts next to each other, so that a selection of rows with gaps
    costs little and a whole dataset has no entry in a dictionary for each row.

    Attributes:
        stride: Attempts that a row has room for; it grows as needed.
        places: Every reward is a whole number of steps of 2**-`places`.
    """

    stride: int = 1
    places: int = 0
    _states: dict[int, bytearray] = field(factory=dict, repr=False)
    _rewards: dict[int, array[float]] = field(factory=dict, repr=False)

    def add(self, record: AttemptRecord) -> None:
        """Take the record that counts of an attempt.

        Raises:
            EvaluationError: The attempt has one already, or its reward is no finite number.
        """
        if record.attempt >= self.stride:
            self._widen(record.attempt + 1)
        state, reward = _state(record), reward_of(record)
        key, place = divmod(record.row * self.stride + record.attempt, _PAGE)
        states = self._states.setdefault(key, bytearray(_PAGE))
        if states[place]:
            raise EvaluationError(
                f"row {record.row}, attempt {record.attempt}: there are two records that count"
            )
        states[place] = state
        if reward is not None:
            states[place] += _REWARDED
            self._reward_page(key)[place] = reward
            self.places = max(self.places, binary_places(reward))

    def scores(self) -> Iterator[RowScore]:
        """The rows that have a record of any kind, in order."""
        row, counted, passed, rewarded, steps = -1, 0, 0, 0, 0
        for key in sorted(self._states):
            rewards = self._rewards.get(key)
            for place, code in enumerate(self._states[key], start=key * _PAGE):
                if not code:
                    continue
                if place // self.stride != row:
                    if row >= 0:
                        yield RowScore(row, counted, passed, rewarded, steps)
                    row, counted, passed, rewarded, steps = place // self.stride, 0, 0, 0, 0
                state = code % _REWARDED
                counted += state in {_FAILED, _PASSED}
                passed += state == _PASSED
                if code >= _REWARDED and rewards is not None:
                    rewarded += 1
                    steps += to_steps(rewards[place % _PAGE], self.places)
        if row >= 0:
            yield RowScore(row, counted, passed, rewarded, steps)

    def _reward_page(self, key: int) -> array[float]:
        page = self._rewards.get(key)
        if page is None:
            page = self._rewards[key] = array("d", bytes(8 * _PAGE))
        return page

    def _widen(self, needed: int) -> None:
        """Make room for *needed* attempts of a row; doubling keeps the copying linear."""
        old = Ledger(self.stride)
        old._states, old._rewards = self._states, self._rewards
        self._states, self._rewards = {}, {}
        self.stride = max(needed, 2 * self.stride)
        for key in sorted(old._states):
            states, rewards = old._states.pop(key), old._rewards.pop(key, None)
            for place, code in enumerate(states):
                if code:
                    row, attempt = divmod(key * _PAGE + place, old.stride)
                    to, at = divmod(row * self.stride + attempt, _PAGE)
                    self._states.setdefault(to, bytearray(_PAGE))[at] = code
                    if rewards is not None and code >= _REWARDED:
                        self._reward_page(to)[at] = rewards[place]


def reward_of(record: AttemptRecord) -> float | None:
    """The reward that enters the figures: that of a settled success that was not removed.

    Raises:
        EvaluationError: It is no finite number.
    """
    settled = record.outcome is AttemptOutcome.SUCCESS and record.counts
    if not settled or record.removed or record.reward is None:
        return None
    if not is_finite_number(record.reward):
        raise EvaluationError(
            f"row {record.row}, attempt {record.attempt}: the reward is no finite number"
        )
    return float(record.reward)


def _state(record: AttemptRecord) -> int:
    if not record.counts:
        return _UNSETTLED
    if record.failed:
        return _FAILED
    if record.removed:
        return _LEFT_OUT
    if record.passed:
        return _PASSED
    return _LEFT_OUT if record.reward is None else _FAILED
