"""Changes between two runs, row by row.

`compare` is pure and works on records; `compare_runs` reads two run folders for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from rollout._checks import check_flag
from rollout.errors import EvaluationError
from rollout.evaluation.folder.journal import read_index
from rollout.evaluation.folder.manifest import (
    differences,
    digest_change,
    file_change,
    read_manifest,
    sources_change,
)
from rollout.evaluation.index import AttemptIndex, RowScore
from rollout.evaluation.intervals import (
    PairedDifference,
    PairedSums,
    paired_difference,
    sign_test,
)
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.sequential import (
    ConfidenceSequence,
    lockstep_order,
    replay,
    seed_of,
    selected_rows,
)

__all__ = [
    "SCHEMA",
    "Comparison",
    "RowTable",
    "SequentialDifference",
    "compare",
    "compare_runs",
]

SCHEMA = "rollout-comparison/1"
"""What the ``schema`` of a comparison says."""


@frozen
class RowTable:
    """The paired rows by what became of them; a row passes if more than half its attempts do.

    Attributes:
        both_pass: Passes in both runs.
        only_a: Passes in A alone: the rows of `Comparison.pass_to_fail`.
        only_b: Passes in B alone: the rows of `Comparison.fail_to_pass`.
        neither: Passes in none.
        better: Rows whose own pass rate is higher in B, whether or not that flips them.
        worse: Rows whose own pass rate is lower in B.
        same: Rows whose own pass rate is the same.
    """

    both_pass: int
    only_a: int
    only_b: int
    neither: int
    better: int
    worse: int
    same: int


@frozen
class SequentialDifference:
    """The change of the pass rate from A to B as a confidence sequence.

    Formula: with d_t the pass rate of row t in B minus that in A, ``x_t = (d_t + 1) / 2`` enters
    the confidence sequence (`rollout.evaluation.sequential.ConfidenceSequence`) of rows that might
    go on for ever; its ends times 2, less 1, are those of the difference. B is ahead once the lower
    end is above 0, A once the upper one is below, and that stays so.

    Rows enter in the order in which they are known in both runs
    (`rollout.evaluation.sequential.lockstep_order`), up to the first one that is not whole in both.
    A row without an attempt that counts in both is left out.

    Attributes:
        difference: The mean over its rows of the row's pass rate in B minus that in A.
        low: Lower end of the confidence sequence.
        high: Upper end of it.
        level: Confidence level of the sequence, for all times at which one looks together.
        rows: How many rows it has.
        common: How many rows both runs take.
        ahead: ``a`` or ``b``, the run whose pass rate is higher; ``None`` while that is open.
    """

    difference: float | None
    low: float
    high: float
    level: float
    rows: int
    common: int
    ahead: str | None


@frozen
class Comparison:
    """Run B against run A, on the rows that have attempts that count in both.

    Attributes:
        pass_rate: Change of the pass rate, see
            `rollout.evaluation.intervals.paired_difference`. Each row weighs the same,
            however many of its attempts count.
        mean_reward: The same for the reward, over rows that have a reward in both.
        table: The paired rows by what became of them.
        pass_to_fail: Rows that passed in A and do not in B, in order.
        fail_to_pass: Rows that did not pass in A and do in B, in order.
        only_in_a: Rows with attempts that count in A alone, in order.
        only_in_b: Rows with attempts that count in B alone, in order.
        sign_test_p: How likely a split of the changed rows into better and worse at least
            this uneven is by chance, see `rollout.evaluation.intervals.sign_test`.
        differences: Inputs that differ between the runs, a line each; empty unless it was
            made by `compare_runs`.
        sequential: Which run is ahead, if `compare_runs` was asked for that.
    """

    pass_rate: PairedDifference
    mean_reward: PairedDifference
    table: RowTable
    pass_to_fail: tuple[int, ...]
    fail_to_pass: tuple[int, ...]
    only_in_a: tuple[int, ...]
    only_in_b: tuple[int, ...]
    sign_test_p: float
    differences: tuple[str, ...] = field(default=())
    sequential: SequentialDifference | None = None

    def to_dict(self) -> dict[str, Any]:
        """The comparison in plain JSON types."""
        return {"schema": SCHEMA, **attrs.asdict(self, value_serializer=_plain)}


def _plain(_: Any, __: Any, value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def compare(a: Iterable[AttemptRecord], b: Iterable[AttemptRecord]) -> Comparison:
    """Compare two runs by the records that count, each in any order.

    Rows are paired by their index. Memory grows by a few bytes for each attempt.

    Raises:
        EvaluationError: There are two records of one attempt, or a reward is not a finite number.
    """
    return _compare(AttemptIndex.of_final(a), AttemptIndex.of_final(b))


def _compare(a: AttemptIndex, b: AttemptIndex) -> Comparison:
    passes, rewards = PairedSums(), PairedSums()
    better = worse = both = neither = 0
    lost: list[int] = []
    won: list[int] = []
    only_a: list[int] = []
    only_b: list[int] = []
    for row, left, right in _by_row(a, b):
        if left is None or right is None:
            (only_b if left is None else only_a).append(row)
            continue
        rates = [Fraction(each.passed, each.counted) for each in (left, right)]
        passes.add(*rates)
        better += rates[1] > rates[0]
        worse += rates[1] < rates[0]
        if left.rewards and right.rewards:
            rewards.add(*(each.reward_sum / len(each.rewards) for each in (left, right)))
        match 2 * left.passed > left.counted, 2 * right.passed > right.counted:
            case True, True:
                both += 1
            case True, False:
                lost.append(row)
            case False, True:
                won.append(row)
            case _:
                neither += 1
    same = passes.rows - better - worse
    return Comparison(
        pass_rate=paired_difference(passes, (-1.0, 1.0)),
        mean_reward=paired_difference(rewards),
        table=RowTable(both, len(lost), len(won), neither, better, worse, same),
        pass_to_fail=tuple(lost),
        fail_to_pass=tuple(won),
        only_in_a=tuple(only_a),
        only_in_b=tuple(only_b),
        sign_test_p=sign_test(better, worse),
    )


def compare_runs(
    a: Path, b: Path, *, allow_different_datasets: bool = False, sequential: bool = False
) -> Comparison:
    """Compare two run folders. Blocking.

    The same bytes have the same rows, whatever selection and limit each run took of them.

    Args:
        a: Folder of run A, the one before.
        b: Folder of run B, the one after.
        allow_different_datasets: Whether to pair by row index, where both runs have the row,
            although the rows may not be the same.
        sequential: Whether to work out which run is ahead, see `SequentialDifference`.

    Raises:
        EvaluationError: A folder holds no run, the runs are not about the same rows, or a run
            that is not complete has its rows in no random order (*sequential*).
        EvaluationDamagedError: A file of a run is damaged.
    """
    check_flag("allow_different_datasets", allow_different_datasets)
    check_flag("sequential", sequential)
    before, after = read_manifest(a), read_manifest(b)
    old, new = (manifest["dataset"].get("digest") for manifest in (before, after))
    if old != new and not allow_different_datasets:
        raise EvaluationError(
            f"{a} and {b} are about different datasets "
            f"({file_change('dataset', before['dataset'], after['dataset'])}), "
            "so their rows may not be the same; allow_different_datasets "
            "(--allow-different-datasets) pairs them by number anyway"
        )
    indexes = [read_index(folder) for folder in (a, b)]
    for manifest, index in zip((before, after), indexes, strict=True):
        replay(manifest, index)
    comparison = _compare(*indexes)
    if sequential:
        runs = [
            _Run(str(folder), manifest, index)
            for folder, manifest, index in zip((a, b), (before, after), indexes, strict=True)
        ]
        comparison = attrs.evolve(comparison, sequential=_sequential(*runs))
    changed = [
        digest_change(name, before, after) or f"{name}: {_shown(left)} and {_shown(right)}"
        for name, left, right in differences(before, after)
        if not name.startswith("server.sources.")
    ]
    if (files := sources_change(before, after)) is not None:
        changed.append(files)
    return attrs.evolve(comparison, differences=tuple(changed))


@frozen
class _Run:
    """One of two runs, see `_sequential`.

    Attributes:
        name: What messages call it.
        manifest: Its manifest.
        index: Its attempts.
    """

    name: str
    manifest: Mapping[str, Any]
    index: AttemptIndex

    def whole_row(self, row: int) -> RowScore | None:
        """A row all of whose attempts have settled."""
        return self.index.whole_row(row, self.manifest["run"]["n"])

    def seed_for(self, rows: Iterable[int]) -> int | None:
        """The seed of the order in which *rows* become known; ``None`` if all of them are known.

        A run that has a seed keeps its order once it is complete, since one may have looked before.

        Raises:
            EvaluationError: They are not, and run in the order of the file.
        """
        seed = seed_of(self.manifest)
        if seed is None and not all(self.whole_row(row) is not None for row in rows):
            raise EvaluationError(
                f"{self.name} is not complete and runs its rows in the order of the file, so "
                "that those that have ended are no random choice; complete it, or resume it with "
                "run.until or run.seed (--until, --seed)"
            )
        return seed


def _sequential(a: _Run, b: _Run) -> SequentialDifference:
    """Say which of two runs is ahead, see `SequentialDifference`.

    Raises:
        EvaluationError: A run that is not complete has its rows in no random order.
        EvaluationDamagedError: A manifest has values that this library does not write.
    """
    common = sorted({*selected_rows(a.manifest)} & {*selected_rows(b.manifest)})
    sequence = ConfidenceSequence()
    for row in lockstep_order(common, a.seed_for(common), b.seed_for(common)):
        left, right = a.whole_row(row), b.whole_row(row)
        if left is None or right is None:
            break
        if left.counted and right.counted:
            change = Fraction(right.passed, right.counted) - Fraction(left.passed, left.counted)
            sequence.add((change + 1) / 2)
    low, high = 2 * sequence.low - 1, 2 * sequence.high - 1
    return SequentialDifference(
        difference=None if sequence.value is None else 2 * sequence.value - 1,
        low=low,
        high=high,
        level=sequence.level,
        rows=sequence.rows,
        common=len(common),
        ahead="b" if low > 0 else "a" if high < 0 else None,
    )


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _by_row(
    a: AttemptIndex, b: AttemptIndex
) -> Iterator[tuple[int, RowScore | None, RowScore | None]]:
    """Yield each row that counts in either, in order, with its scores."""
    scores = merge(
        ((score.row, 0, score) for score in a.rows() if score.counted),
        ((score.row, 1, score) for score in b.rows() if score.counted),
    )
    for row, group in groupby(scores, key=itemgetter(0)):
        found = {run: score for _, run, score in group}
        yield row, found.get(0), found.get(1)
