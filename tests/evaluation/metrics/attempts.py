"""Records of attempts as short as a test wants them, and strategies for whole runs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from rollout.evaluation import AttemptRecord

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def attempt(row: int, number: int = 0, reward: float | None = 1.0, **fields: Any) -> AttemptRecord:
    """A success with a reward that passes from 1 up, unless *fields* say otherwise."""
    return AttemptRecord(
        **{
            "row": row,
            "attempt": number,
            "rollout_id": f"r-{row}-{number}",
            "outcome": "success",
            "submitted_at": NOON,
            "duration_sec": 1.0,
            "reward": reward,
            "passed": reward is not None and reward >= 1,
            **fields,
        }
    )


def failed(row: int, number: int = 0, category: str | None = "agent_error", **fields: Any):
    """A failure."""
    return attempt(row, number, None, outcome="failure", err_category=category, **fields)


def table(*rows: str) -> list[AttemptRecord]:
    """A run as text: a word for each row, a letter for each attempt.

    ``P`` passes, ``w`` has a reward of 0, ``f`` failed, ``e`` got no result, ``c`` was
    cancelled, ``x`` is marked for removal, ``u`` has no reward, ``-`` has no record.
    """
    return [
        _of(letter, row, number)
        for row, word in enumerate(rows)
        for number, letter in enumerate(word)
        if letter != "-"
    ]


def _of(letter: str, row: int, number: int) -> AttemptRecord:
    match letter:
        case "P":
            return attempt(row, number)
        case "w":
            return attempt(row, number, 0.0)
        case "f":
            return failed(row, number)
        case "e":
            return attempt(row, number, None, outcome="error", err_category="unreachable")
        case "c":
            return attempt(row, number, None, outcome="cancelled")
        case "x":
            return attempt(row, number, None, removed=True)
        case "u":
            return attempt(row, number, None)
    raise ValueError(letter)


rewards = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, -0.0, -1.0]),
    st.floats(allow_nan=False, allow_infinity=False),
)


@st.composite
def runs(draw: Any, *, max_rows: int = 6, max_n: int = 5) -> tuple[list[AttemptRecord], int, int]:
    """Records in any order, how many rows there are, and n."""
    n = draw(st.integers(1, max_n))
    indices = draw(st.lists(st.integers(0, 10**6), max_size=max_rows, unique=True))
    records = [
        _drawn(draw, row, number)
        for row in indices
        for number in range(n)
        if draw(st.integers(0, 5))
    ]
    return draw(st.permutations(records)), len(indices), n


def _drawn(draw: Any, row: int, number: int) -> AttemptRecord:
    letter = draw(st.sampled_from("PwRRRfecxu"))
    if letter != "R":
        return _of(letter, row, number)
    return attempt(
        row,
        number,
        draw(rewards),
        duration_sec=draw(st.floats(0, 1e6)),
        prompt_tokens=draw(st.none() | st.integers(0, 10**9)),
        metrics=draw(st.dictionaries(st.sampled_from("abc"), rewards, max_size=2)),
    )
