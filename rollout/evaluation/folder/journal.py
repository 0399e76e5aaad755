"""The record of a run: one line for each attempt that ended, on the disk before it counts.

Theory of operation: `events.jsonl` starts with a line that names the run; each line after it
is an `AttemptRecord`, and each has a checksum of its own. Lines are only ever appended. A
process that is killed while it appends can leave one line without its end, at the end of the
file: that one is cut off (or completed, if nothing but its line break is missing), since it
had not counted yet. Whatever else does not fit its checksum was changed by somebody, so it is
refused by its line number and left as it is. Another pass threshold replaces the whole file.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import trio
from attrs import define, evolve, field

from rollout._checks import is_finite_number
from rollout._files.atomic import sync_folder, writing_atomic
from rollout.codec import converter, dump_json
from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.records import FIELDS, AttemptRecord

__all__ = [
    "EVENTS",
    "Journal",
    "final_records",
    "indexed_records",
    "open_journal",
    "read_index",
    "read_records",
    "record_at",
    "recover",
    "score_again",
    "write_journal",
]

EVENTS = "events.jsonl"
_SCHEMA = "rollout-events/1"
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_LARGEST = 2**53
"""The largest row that the report can show: JavaScript counts no further."""
_MOST_RETRIES = 2**31


# --- lines ------------------------------------------------------------------------------------


def encode_line(value: dict[str, Any]) -> bytes:
    """Write one line: a JSON object whose last member is the checksum of what precedes it."""
    body = dump_json(value)[:-1]
    return body + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Read a line, with or without its line break; ``None`` if it is not whole."""
    line = line.removesuffix(b"\n")
    body, separator, rest = line.rpartition(b',"crc32":"')
    if not separator or rest != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        value = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_torn(line: bytes) -> bool:
    """Whether a line that is not whole may be the beginning of one that was being written."""
    return not line.endswith(b"\n") and decode_line(line[:-1]) is None


def record_line(record: AttemptRecord) -> bytes:
    """Write the line of a record."""
    return encode_line(converter.unstructure(record))


def record_of(value: dict[str, Any]) -> AttemptRecord:
    """Make a record of a line that fits its checksum.

    Raises:
        TypeError: A field is missing.
        ValueError: A field breaks its rule.
    """
    known = {name: value[name] for name in FIELDS if name in value}
    for name in ("submitted_at", "agent_started_at"):
        if isinstance(known.get(name), str):
            known[name] = datetime.fromisoformat(known[name])
    record = AttemptRecord(**known)
    if not is_finite_number(record.duration_sec):
        raise ValueError("duration_sec must be a finite number")
    if record.reward is not None and not is_finite_number(record.reward):
        raise ValueError("reward must be a finite number or null")
    if max(record.row, record.attempt) > _LARGEST or record.retry > _MOST_RETRIES:
        raise ValueError("row, attempt or retry is too large")
    return record


def _head(run_id: str) -> bytes:
    return encode_line({"schema": _SCHEMA, "run_id": run_id})


class _Lines:
    """Reads a journal line by line, and knows where it is.

    Attributes:
        offset: Where the last line that was read begins, in bytes.
        number: Its number, from 1.
        whole: Where the last line that is whole ends, in bytes.
    """

    def __init__(self, path: Path, file: IO[bytes], run_id: str | None) -> None:
        self._path = path
        self._file = file
        self._run_id = run_id
        self.offset = 0
        self.number = 0
        self.whole = 0

    def records(self) -> Iterator[AttemptRecord]:
        """Yield the records up to the end, or to a last line that is torn.

        Raises:
            EvaluationDamagedError: A line is damaged, or the file belongs to another run.
        """
        for line in self._file:
            self.offset, self.number = self.whole, self.number + 1
            value = decode_line(line)
            if value is None:
                if _is_torn(line):
                    return
                raise self.damaged("does not fit its checksum")
            record = None
            if self.number == 1:
                self._check_head(value)
            else:
                record = self._record(value)
            self.whole = self.offset + len(line)
            if record is not None:
                yield record

    def damaged(self, reason: str) -> EvaluationDamagedError:
        return EvaluationDamagedError(
            f"{self._path}, line {self.number}: {reason}; the file was changed or damaged, so "
            "it is left as it is. Restore it, or start anew (--fresh keeps it in archive/)"
        )

    def _check_head(self, value: dict[str, Any]) -> None:
        if value.get("schema") != _SCHEMA:
            raise self.damaged(f"is not the head of a journal ({_SCHEMA})")
        if self._run_id is not None and value.get("run_id") != self._run_id:
            raise self.damaged("belongs to another run than the manifest")

    def _record(self, value: dict[str, Any]) -> AttemptRecord:
        try:
            return record_of(value)
        except (TypeError, ValueError) as error:
            raise self.damaged(f"is not the record of an attempt: {error}") from None


def read_records(folder: Path) -> Iterator[AttemptRecord]:
    """Yield all records of a run in the order in which they were written. Blocking.

    A torn last line is passed over. Without a journal there are none.

    Raises:
        EvaluationDamagedError: A line is damaged.
    """
    with open_journal(folder) as file:
        if file is not None:
            yield from _Lines(folder / EVENTS, file, None).records()


def records_from(folder: Path, start: int) -> Iterator[tuple[int, int, AttemptRecord]]:
    """Yield the records that were written since an earlier call, each with its begin and end.

    Args:
        folder: The folder of the run, which may be going on.
        start: The end of the last record of that call, in bytes; 0 reads all of them.

    Raises:
        EvaluationDamagedError: A line is damaged.
    """
    with open_journal(folder) as file:
        if file is None:
            return
        lines = _Lines(folder / EVENTS, file, None)
        if start:
            file.seek(start)
            lines.whole, lines.number = start, 1  # at least the head was read
        for record in lines.records():
            yield lines.offset, lines.whole, record


@contextmanager
def open_journal(folder: Path) -> Generator[IO[bytes] | None, None, None]:
    """Open the journal of a run for the length of the block; ``None`` if the run has no journal.

    Raises:
        EvaluationError: It cannot be opened.
    """
    path = folder / EVENTS
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise _unusable(path, error) from None
    with file:
        yield file


def _unusable(path: Path, error: OSError) -> EvaluationError:
    return EvaluationError(f"{path}: {error.strerror or error}")


def read_index(folder: Path, index: AttemptIndex | None = None) -> AttemptIndex:
    """Index the records of a run. Blocking.

    Args:
        folder: The folder of the run.
        index: An empty index to fill, which keeps what precedes a damaged line.

    Raises:
        EvaluationDamagedError: A line is damaged.
    """
    index = AttemptIndex() if index is None else index
    with open_journal(folder) as file:
        if file is not None:
            lines = _Lines(folder / EVENTS, file, None)
            for record in lines.records():
                index.add(record, lines.offset)
    return index


def final_records(folder: Path) -> Iterator[AttemptRecord]:
    """Yield the record that counts of each attempt, by row and attempt. Blocking.

    That is the last one that settles it; where there is none, the last one of all. Memory is
    a few bytes for each attempt.

    Raises:
        EvaluationDamagedError: A line is damaged.
    """
    yield from indexed_records(folder, read_index(folder))


def indexed_records(folder: Path, index: AttemptIndex) -> Iterator[AttemptRecord]:
    """Yield the records that count by an index of the run. Blocking.

    Raises:
        EvaluationDamagedError: The journal was changed since it was indexed.
    """
    with open_journal(folder) as file:
        for attempt in index:
            yield record_at(folder, file, attempt.place)


def record_at(folder: Path, file: IO[bytes] | None, place: int) -> AttemptRecord:
    """Read the record that begins at *place*. Blocking.

    Raises:
        EvaluationDamagedError: There is no such record any more.
    """
    value = None
    if file is not None:
        file.seek(place)
        value = decode_line(file.readline())
    if value is None:
        raise EvaluationDamagedError(f"{folder / EVENTS} was changed while it was read")
    return record_of(value)


def recover(folder: Path, run_id: str) -> Iterator[tuple[int, AttemptRecord]]:
    """Yield all records of a run that is to go on, then make the file fit to append to.

    Each comes with its place, the byte where it begins.

    A torn last line is cut off, or completed if only its line break is missing. A journal
    that does not exist, or that was torn before its first line was whole, is made. Blocking.

    Raises:
        EvaluationDamagedError: A line is damaged, or the journal is that of another run.
        EvaluationError: It cannot be read or written.
    """
    path = folder / EVENTS
    flags = os.O_RDWR | os.O_CREAT | _FLAGS
    try:
        with open(os.open(path, flags, 0o600), "r+b") as file:  # noqa: PTH123 - opened with flags
            lines = _Lines(path, file, run_id)
            for record in lines.records():
                yield lines.offset, record
            _cut(file, lines.whole, _head(run_id))
        sync_folder(folder)
    except OSError as error:
        raise _unusable(path, error) from error


def score_again(folder: Path, run_id: str, threshold: float) -> None:
    """Decide of all records anew whether they passed, and replace the journal. Blocking.

    A process that is killed meanwhile leaves the old one.

    Raises:
        EvaluationDamagedError: A line is damaged, or the journal is that of another run.
        EvaluationError: It cannot be read or written.
    """
    path = folder / EVENTS
    try:
        with open_journal(folder) as file, writing_atomic(path) as anew:
            anew.write(_head(run_id))
            for record in () if file is None else _Lines(path, file, run_id).records():
                passed = record.reward is not None and record.reward >= threshold
                anew.write(record_line(evolve(record, passed=passed)))
    except OSError as error:
        raise _unusable(path, error) from error


def write_journal(folder: Path, run_id: str, records: Iterable[AttemptRecord]) -> None:
    """Write the journal of a run all of whose records are known. Blocking.

    Raises:
        EvaluationError: It cannot be written.
    """
    try:
        with writing_atomic(folder / EVENTS) as file:
            file.write(_head(run_id))
            file.writelines(map(record_line, records))
    except OSError as error:
        raise _unusable(folder / EVENTS, error) from error


def _cut(file: IO[bytes], whole: int, head: bytes) -> None:
    """Make the file end with a whole line, the one that ends at *whole*."""
    file.seek(max(whole - 1, 0))
    last = file.read(1)
    file.truncate(whole)
    file.seek(whole)
    if not whole:
        file.write(head)
    elif last != b"\n":
        file.write(b"\n")
    file.flush()
    os.fsync(file.fileno())


# --- writing ----------------------------------------------------------------------------------


@define(eq=False)
class _Batch:
    """Lines that go into the file with one sync.

    Attributes:
        lines: The lines.
        size: Their bytes in all.
        start: Where the first of them begins in the file, once they are written.
        done: Set once they are written, or writing has failed.
    """

    lines: list[bytes] = field(factory=list)
    size: int = 0
    start: int = 0
    done: trio.Event = field(factory=trio.Event)


class Journal:
    """Appends records, several of them with one sync where they come together.

    Args:
        folder: The folder of the run, whose journal was read by `recover` before.
        synced_first: A folder whose names are synced before each batch of records, since the
            records name its files.
    """

    def __init__(self, folder: Path, *, synced_first: Path | None = None) -> None:
        self._path = folder / EVENTS
        self._synced_first = synced_first
        self._batch = _Batch()
        self._wake = trio.Event()
        self._closed = False
        self._error: OSError | None = None
        self._size: int | None = None

    async def append(self, record: AttemptRecord) -> int:
        """Return once the record is on the disk.

        Cancelling this leaves the record to be written all the same.

        Returns:
            Where it begins in the file, in bytes.

        Raises:
            EvaluationError: The journal cannot be written (a full disk, say), or something
                else has changed it.
        """
        batch, line = self._batch, record_line(record)
        before = batch.size
        if self._error is None:
            batch.lines.append(line)
            batch.size += len(line)
            self._wake.set()
            await batch.done.wait()
        if self._error is not None:
            await trio.lowlevel.checkpoint()
            raise EvaluationError(
                f"{self._path}: {self._error.strerror or self._error}; the run stops, because "
                "its results could not be kept"
            ) from self._error
        return batch.start + before

    async def write(self) -> None:
        """Write what is appended until `close` is called, or writing fails.

        It cannot be cancelled: what has ended is kept even while everything is cancelled.
        """
        with trio.CancelScope(shield=True):
            while self._error is None and not (self._closed and not self._batch.lines):
                await self._wake.wait()
                await self._flush()
            await self._flush()

    def close(self) -> None:
        """Make `write` return once it has written what waits; nothing is appended later."""
        self._closed = True
        self._wake.set()

    async def _flush(self) -> None:
        """Write what waits. Lines that come meanwhile go with the next sync."""
        batch, self._batch = self._batch, _Batch()
        self._wake = trio.Event()
        if batch.lines and self._error is None:
            try:
                end = await trio.to_thread.run_sync(self._append, b"".join(batch.lines))
                self._size, batch.start = end, end - batch.size
            except OSError as error:
                self._error = error
        if self._closed:
            self._wake.set()
        batch.done.set()
        await trio.lowlevel.checkpoint()

    def _append(self, data: bytes) -> int:
        """Append and sync, or leave the file as it was; return its size.

        Raises:
            OSError: That failed, or the file does not have the size that it had before.
        """
        if self._synced_first is not None:
            sync_folder(self._synced_first)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | _FLAGS)
        try:
            before = os.fstat(descriptor).st_size
            if self._size not in {None, before}:
                # Behind a line that was cut, a record could not be read again.
                raise OSError(
                    errno.ESTALE,
                    f"was changed from outside: it has {before} bytes instead of {self._size}",
                )
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
            return before + len(data)
        finally:
            os.close(descriptor)
