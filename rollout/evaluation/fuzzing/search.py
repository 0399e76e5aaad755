"""The search for answers that a grader judges wrongly.

Theory of operation: Hypothesis draws and shrinks in a worker thread, which has each answer graded
on the event loop. A verdict is kept for the length of a family, so that Hypothesis, which asks
for the same answer again, gets the same one, whatever the grader does. The label is tried on
every row; the other families draw the row as well, the first one being the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random

import trio
from hypothesis import Phase, find
from hypothesis import settings as HypothesisSettings  # noqa: N812 - there are others
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from rollout.evaluation.datasets import DatasetRow
from rollout.evaluation.fuzzing.families import RIGHT, WRONG, Case, Family, mixed
from rollout.evaluation.fuzzing.findings import Finding, FindingKind, FuzzSettings
from rollout.evaluation.fuzzing.grading import AnswerGrading, Verdict

__all__ = ["Search"]

_ABOUT_LABEL = frozenset({"near", "denial", "candidates", "digits"})
"""Families of answers that deserve nothing and are made of the label."""
_OTHERS = 4
"""So many labels of other rows are used as wrong answers."""


class Search:
    """A search in the families of answers, one after the other."""

    def __init__(
        self,
        grading: AnswerGrading,
        settings: FuzzSettings,
        on_family: Callable[[str], object],
        on_finding: Callable[[Finding], object],
    ) -> None:
        self._grading = grading
        self._settings = settings
        self._on_family = on_family
        self._on_finding = on_finding
        self._found: list[Finding] = []

    def run(self, rows: Sequence[DatasetRow]) -> list[Finding]:
        """Search in a worker thread, and return what was found."""
        labels = list(dict.fromkeys(row.label.strip() for row in rows if row.label))
        cases = [
            Case(
                row,
                self._settings.form,
                [each for each in labels[: _OTHERS + 1] if each not in {"", row.label}],
            )
            for row in rows
        ]
        labelled = [case for case in cases if case.label]
        passing = self._try_labels(labelled)
        for name, family in RIGHT.items():
            self._try(name, family, passing, deserving=True)
        # What one form alone is refused for says nothing new with another one.
        wrong = {each.family for each in self._found}
        sound = [name for name in RIGHT if name not in wrong and name not in self._settings.skip]
        self._try("mixed", mixed(sound), passing, deserving=True)
        for name, family in WRONG.items():
            used = labelled if name in _ABOUT_LABEL else cases
            self._try(name, family, used, deserving=False)
        return self._found

    def _try_labels(self, cases: Sequence[Case]) -> list[Case]:
        """Try the label of each row, and return the rows in which it passes."""
        passing: list[Case] = []
        trial = _Trial(self._grading, "label", deserving=True)
        self._on_family("label")
        for case in cases:
            found = trial.finding(case, case.formed(case.label)) or trial.timed_out
            if found is None:
                passing.append(case)
            elif "label" not in self._settings.skip:
                self._add(found)
            if trial.timed_out is not None:
                break
        return passing

    def _try(self, name: str, family: Family, cases: Sequence[Case], *, deserving: bool) -> None:
        """Look for the smallest answer of each kind of finding in a family."""
        tried = [(case, answers) for case in cases if (answers := family(case)) is not None]
        if name in self._settings.skip or not tried:
            return
        self._on_family(name)
        drawn = st.sampled_from(tried).flatmap(lambda each: st.tuples(st.just(each[0]), each[1]))
        trial = _Trial(self._grading, name, deserving=deserving)
        kinds = set(FindingKind)
        while (found := self._smallest(trial, drawn, kinds)) is not None:
            self._add(found)
            kinds.discard(found.kind)
        if trial.timed_out is not None and FindingKind.FAILED in kinds:
            self._add(trial.timed_out)

    def _smallest(
        self,
        trial: _Trial,
        drawn: st.SearchStrategy[tuple[Case, str]],
        kinds: set[FindingKind],
    ) -> Finding | None:
        def wrong(case_and_answer: tuple[Case, str]) -> bool:
            found = trial.finding(*case_and_answer)
            return found is not None and found.kind in kinds

        settings = HypothesisSettings(
            max_examples=self._settings.examples,
            phases=(Phase.generate, Phase.shrink),
            database=None,
            deadline=None,
            derandomize=False,
        )
        random = Random(self._settings.seed)  # noqa: S311 - the same answers for the same seed
        try:
            return trial.finding(*find(drawn, wrong, settings=settings, random=random))
        except NoSuchExample:
            return None

    def _add(self, finding: Finding) -> None:
        self._found.append(finding)
        self._on_finding(finding)


class _Trial:
    """Verdicts on the answers of one family.

    Attributes:
        timed_out: The first answer that took too long. None is graded after it, since shrinking
            would take that time again and again.
    """

    def __init__(self, grading: AnswerGrading, family: str, *, deserving: bool) -> None:
        self._grading = grading
        self._family = family
        self._deserving = deserving
        self._verdicts: dict[tuple[int, bytes], Verdict] = {}
        self.timed_out: Finding | None = None

    def finding(self, case: Case, answer: str) -> Finding | None:
        """Return what is wrong with the verdict on an answer, if anything is."""
        if self._may_be_right(case, answer):
            return None
        row = case.row
        key = row.index, blake2b(answer.encode("utf-8", "surrogatepass")).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            if self.timed_out is not None:
                return None
            verdict = trio.from_thread.run(
                self._grading.grade, answer, row.initial_messages, row.label, row.metadata
            )
            self._verdicts[key] = verdict
        kind = self._grading.problem(verdict, deserving=self._deserving)
        if kind is None:
            return None
        found = Finding(
            kind=kind,
            family=self._family,
            row=row.index,
            answer=answer,
            deserving=self._deserving,
            reward=verdict.reward,
            error=verdict.error,
            prompt=row.initial_messages,
            label=row.label,
            metadata=row.metadata,
        )
        if verdict.timed_out:
            self.timed_out = found
            return None
        return found

    def _may_be_right(self, case: Case, answer: str) -> bool:
        """Whether an answer that is to deserve nothing may be right by accident."""
        if self._deserving or self._family in _ABOUT_LABEL or not case.label:
            return False
        if self._family == "prompt":  # which may well name the label among other things
            return case.is_label(answer)
        return case.mentions_label(answer)
