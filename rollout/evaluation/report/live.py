"""The report of a run that goes on, for a page that follows it.

Theory of operation: the journal is read on from where the last update has ended, so an update
costs what is new, whoever wrote it. Each attempt becomes a row of the page's table, in a
temporary file: a page asks for the bytes that it does not have yet, and the last row of an
attempt counts. Headline and charts are drawn anew. Conversations stay in their files until one is
opened.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from rollout.errors import EvaluationError
from rollout.evaluation.folder.journal import open_journal, record_at, records_from
from rollout.evaluation.folder.layout import TRAJECTORIES
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.metrics import Tally
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.report.columns import category, figures, message
from rollout.evaluation.report.gather import Attempt, gather
from rollout.evaluation.report.page import entry_of, live_page
from rollout.evaluation.sequential import Stopping

__all__ = ["LiveReport"]

_MOST_ROWS_BYTES = 4 * 1024 * 1024


class LiveReport:
    """The report of a run, as far as that is.

    Methods block. One thread updates; others may read meanwhile.

    Args:
        folder: The folder of the run.
        manifest: Its manifest.

    Attributes:
        page: The page, without its rows; empty before the first update.
        version: Grows with each change.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.page = b""
        self.version = 0
        self._folder = folder
        self._rows_selected: int = manifest["dataset"]["selected"]
        self._index = AttemptIndex()
        # None once the figures cannot be continued: a record replaced one that counted, or rows
        # do not count after all.
        self._tally: Tally | None = Tally(manifest["run"]["n"])
        self._stopping = Stopping.of(manifest)
        self._read = 0
        self._rows: IO[bytes] = TemporaryFile()  # noqa: SIM115 - see `close`
        self._size = 0

    def close(self) -> None:
        """Remove the rows."""
        self._rows.close()

    def update(self) -> None:
        """Read what is new.

        Raises:
            EvaluationError: The journal cannot be read, or is damaged.
            OSError: The rows cannot be written.
        """
        before = self._read
        for place, end, record in records_from(self._folder, self._read):
            self._add(place, record)
            self._read = end
        self._rows.flush()
        if self.page and self._read == before:
            return
        if self._stopping is not None:
            self._stopping.advance(self._index)
            if self._stopping.early:
                self._stopping.drop_rest(self._index)
                self._tally = None
        metrics = None
        if self._tally is not None:
            metrics = self._tally.metrics(self._rows_selected, self._stopping)
        self.page = live_page(gather(self._folder, self._index, metrics, self._stopping))
        self._size = self._rows.tell()
        self.version += 1

    def rows(self, start: int) -> tuple[bytes, bool]:
        """Return rows that begin at *start*, a line of JSON each, and whether there are more."""
        wanted = max(0, min(self._size - start, _MOST_ROWS_BYTES))
        data = os.pread(self._rows.fileno(), wanted, start)
        data = data[: data.rfind(b"\n") + 1]
        return data, bool(data) and start + len(data) < self._size

    def entry(self, row: int, attempt: int) -> bytes | None:
        """Return an attempt with its conversation, as JSON; ``None`` if it has not ended."""
        found = self._index.find(row, attempt)
        if found is None:
            return None
        with open_journal(self._folder) as file:
            others = [record_at(self._folder, file, place) for place in found.others]
            whole = Attempt(record_at(self._folder, file, found.place), others)
        entry, _ = entry_of(self._folder / TRAJECTORIES, whole, room=True)
        return _json(entry)

    def _add(self, place: int, record: AttemptRecord) -> None:
        self._index.add(record, place)
        if self._tally is not None and record.counts:
            try:
                self._tally.add(record)
            except EvaluationError:
                self._tally = None
        found = self._index.find(*record.key)
        if found is None or found.place != place:
            return  # one that counts stands
        _, glance = entry_of(self._folder / TRAJECTORIES, Attempt(record, []), room=False)
        row: dict[str, Any] = figures(record, tries=len(found.others) + 1)
        row |= {
            "category": category(record),
            "message": message(record),
            "prompt": glance.prompt,
            "label": glance.label,
            "answer": glance.answer,
        }
        self._rows.write(_json(row) + b"\n")


def _json(value: Any) -> bytes:
    # ASCII alone, so that lone surrogates survive.
    return json.dumps(value, separators=(",", ":")).encode("ascii")
