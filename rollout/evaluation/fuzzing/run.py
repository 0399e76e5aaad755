"""Fuzz a grader, and replay what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from rollout.backend import LocalBackend
from rollout.errors import EvaluationError
from rollout.evaluation.datasets import DatasetRow
from rollout.evaluation.fuzzing.findings import Finding, FuzzSettings, read_findings
from rollout.evaluation.fuzzing.grading import AnswerGrading

__all__ = ["fuzz_grader", "replay_findings"]


def _ignore(_: object) -> None:
    pass


async def fuzz_grader(
    backend: LocalBackend,
    rows: Sequence[DatasetRow],
    settings: FuzzSettings | None = None,
    *,
    on_family: Callable[[str], object] = _ignore,
    on_finding: Callable[[Finding], object] = _ignore,
) -> list[Finding]:
    """Look for answers that the grader of *backend* judges wrongly; no agent runs.

    Each family of answers gives one finding at most of each kind, the smallest that was found,
    and the label itself one for each row. Families of right answers use the rows whose label
    passes as it is. A family ends with the first answer that takes too long.

    Args:
        backend: What has the grader.
        rows: Rows of a dataset. Those without label and metadata, which no server grades, are
            left out.
        settings: How to fuzz.
        on_family: Called with the name of each family before it is tried, in a worker thread.
        on_finding: Called with each finding, in a worker thread.

    Raises:
        EvaluationError: No row can be graded, or Hypothesis is not installed.

    After a cancellation *on_finding* has got what was found so far.
    """
    try:
        from rollout.evaluation.fuzzing.search import Search  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise EvaluationError(
            "fuzzing a grader needs Hypothesis; install it with "
            'pip install "trio-rollout[simulation]"'
        ) from None
    gradable = [each for each in rows if each.label is not None or each.metadata is not None]
    if not gradable:
        raise EvaluationError("no row has a label or metadata, without which nothing is graded")
    settings = settings or FuzzSettings()
    grading = AnswerGrading(backend, settings)
    search = Search(grading, settings, on_family, on_finding)
    with grading.unlogged():
        return await trio.to_thread.run_sync(search.run, gradable)


async def replay_findings(path: Path | str, backend: LocalBackend) -> list[Finding]:
    """Grade the answers of a file of findings again, and return what is still wrong.

    A test of a grader that was repaired::

        async def test_the_grader():
            assert await replay_findings("grader-findings.json", app.backend) == []

    Args:
        path: The file, as `save_findings` writes it.
        backend: What has the grader.

    Raises:
        EvaluationError: The file cannot be read, or is something else.
    """
    found = await trio.to_thread.run_sync(read_findings, path)
    grading = AnswerGrading(backend, found.settings)
    with grading.unlogged():
        again = [await grading.again(each) for each in found.findings]
    return [each for each in again if each is not None]
