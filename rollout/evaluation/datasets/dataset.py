"""A dataset: files, a mapping of its columns, and a selection of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import fields_dict, frozen

from rollout.errors import DatasetError
from rollout.evaluation.datasets._csv import read_csv
from rollout.evaluation.datasets._files import expand
from rollout.evaluation.datasets._hub import fetch
from rollout.evaluation.datasets._jsonl import read_jsonl
from rollout.evaluation.datasets._parquet import import_pyarrow, read_parquet
from rollout.evaluation.datasets._place import Place
from rollout.evaluation.datasets._source import FileStamp, Source, import_zstd
from rollout.evaluation.datasets._text import decoded, lookup_encoding
from rollout.evaluation.datasets.rows import DatasetRow, Record, RowBuilder, label_columns
from rollout.evaluation.selection import Picker, RowSelection, parse_rows

if TYPE_CHECKING:
    from rollout.evaluation.config import DatasetConfig

__all__ = ["Dataset", "DatasetScan", "open_dataset"]

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}

_IN_ORDER_AT_A_TIME = 10_000
"""How many rows are held so that they can be given in another order."""
_PACKED = frozenset({".gz", ".zst"})


@frozen(kw_only=True)
class DatasetScan:
    """The result of one pass over all of a dataset.

    Attributes:
        digest: SHA-256 of the file's bytes, in hex; of several files, that of their digests.
        rows: How many rows the dataset has.
        selected: How many of them are selected, limit included.
        gradable: How many of these have a label or metadata, without which no server grades.
    """

    digest: str
    rows: int
    selected: int
    gradable: int


class Dataset:
    """Reads the rows of a dataset's files, one at a time. Blocking: use a thread.

    Each pass opens the files anew. After a `scan`, `rows` makes sure that it reads the files
    that were scanned.

    Attributes:
        config: What it was opened with.
        files: Its files, in order.
        revision: The commit that they are of, if they are from the Hub.
        format: ``jsonl``, ``csv`` or ``parquet``.
    """

    def __init__(
        self,
        config: DatasetConfig,
        *,
        files: tuple[Path, ...],
        revision: str | None,
        format: str,
        encoding: str,
        selection: RowSelection,
    ) -> None:
        self.config = config
        self.files = files
        self.revision = revision
        self.format = format
        self._encoding = encoding
        self._selection = selection
        self._scanned: dict[Path, tuple[FileStamp, str]] = {}

    def __repr__(self) -> str:
        return f"<Dataset {self.config.location!r} ({self.format})>"

    def scan(self) -> DatasetScan:
        """Read all files, and check all rows that are selected.

        Raises:
            DatasetError: A row cannot be taken faithfully, a column of the mapping is in none
                of them, the selection selects nothing, or a file changes meanwhile.
        """
        self._scanned.clear()
        scanned: dict[Path, tuple[FileStamp, str]] = {}
        place = self._place()
        builder, picker = RowBuilder(self.config.columns, place), self._picker()
        selected = gradable = 0
        for file in self.files:
            place.path = str(file)
            with Source(file, place) as source:
                # Parquet is not read from front to back, so its bytes are hashed before.
                digest = source.digest() if self.format == "parquet" else ""
                with self._change_first(source, place):
                    for record in self._records(source, place, builder, picker):
                        row = builder.build(record)
                        selected += 1
                        gradable += row.label is not None or row.metadata is not None
                    if file == self.files[-1]:
                        self._check_selection(place)
                        builder.check_mapped()
                digest = digest or source.digest()
                if source.stamp() != source.opened:
                    raise place.file_error("changed while it was read")
                scanned[file] = source.opened, digest
        self._scanned = scanned
        digests = [digest for _, digest in scanned.values()]
        return DatasetScan(
            digest=digests[0] if len(digests) == 1 else _combined(digests),
            rows=place.count,
            selected=selected,
            gradable=gradable,
        )

    def rows(self) -> Iterator[DatasetRow]:
        """Read the selected rows, in the order of the files, and no further than needed.

        Raises:
            DatasetError: As for `scan`, from the row on that it is about; or a file is not
                the one that was scanned. If its bytes alone tell, that is said at the end, or
                where a row fails.
        """
        place = self._place()
        builder, picker = RowBuilder(self.config.columns, place), self._picker()
        for file in self.files:
            place.path = str(file)
            with Source(file, place) as source:
                self._check_unchanged(source, place)
                whole = True
                with self._change_first(source, place):
                    for record in self._records(source, place, builder, picker):
                        row = builder.build(record)
                        yield row
                        if picker.is_done(row.index + 1):
                            whole = False
                            break
                    if whole and file == self.files[-1]:
                        self._check_selection(place)
                        builder.check_mapped()
                self._check_end(source, place, whole=whole)
            if not whole:
                return

    def rows_in(self, order: Sequence[int]) -> Iterator[DatasetRow]:
        """Read selected rows in another order. Each `_IN_ORDER_AT_A_TIME` take a pass of their own.

        Raises:
            DatasetError: As for `rows`.
        """
        for start in range(0, len(order), _IN_ORDER_AT_A_TIME):
            batch = order[start : start + _IN_ORDER_AT_A_TIME]
            wanted = set(batch)
            found = {row.index: row for row in self.rows() if row.index in wanted}
            for index in batch:
                yield found.pop(index)

    def _place(self) -> Place:
        return Place(self.config.location)

    def _picker(self) -> Picker:
        return Picker(self._selection, self.config.limit)

    def _records(
        self, source: Source, place: Place, builder: RowBuilder, picker: Picker
    ) -> Iterator[Record]:
        columns: Any = self.config.columns
        names = (getattr(columns, role) for role in fields_dict(type(columns)))
        labels = label_columns(self.config.columns)
        used = {*filter(None, names), *labels}
        if self.format == "parquet":
            source.file.seek(0)
            yield from read_parquet(
                source.file, place, picker, used=used, check_header=builder.check_header
            )
            return
        texts = decoded(source.chunks(), self._encoding, place)
        if self.format == "csv":
            yield from read_csv(
                texts,
                place,
                picker,
                delimiter=self.config.delimiter,
                check_header=builder.check_header,
            )
        else:
            yield from read_jsonl(texts, place, picker, labels=labels, used=used - {*labels})

    def _check_selection(self, place: Place) -> None:
        if len(self.files) > 1:
            place.path = self.config.location
        if not place.count:
            raise place.file_error("has no rows")
        missing = self._selection.without_rows(place.count)
        if missing is not None:
            raise place.file_error(
                f"has {place.count} rows, so that {missing} selects none of them (the first "
                "row is 0)"
            )

    def _check_unchanged(self, source: Source, place: Place) -> None:
        """Compare with what was scanned, by the bytes if anything else is not the same."""
        scanned = self._scanned.get(source.path)
        if scanned is None or source.opened == scanned[0]:
            return
        stamp, digest = scanned
        if source.opened.size == stamp.size:
            with Source(source.path, place) as other:
                if other.digest() == digest and other.opened == source.opened:
                    return
        raise self._changed(place)

    @contextmanager
    def _change_first(self, source: Source, place: Place) -> Generator[None, None, None]:
        """Where reading fails in a file that changed, say that: rows may be torn by it."""
        try:
            yield
        except DatasetError as error:
            if not self._has_changed(source):
                raise
            if source.path not in self._scanned:
                raise place.file_error("changed while it was read") from error
            raise self._changed(place) from error

    def _has_changed(self, source: Source) -> bool:
        try:
            if source.stamp() != source.opened:
                return True
            scanned = self._scanned.get(source.path)
            if scanned is None:
                return False
            if self.format == "parquet":
                source.file.seek(0)
            return source.digest() != scanned[1]
        except (OSError, DatasetError):
            # It cannot be read at all any more, which is what the first error is about.
            return False

    def _check_end(self, source: Source, place: Place, *, whole: bool) -> None:
        same = source.stamp() == source.opened
        scanned = self._scanned.get(source.path)
        if scanned is None or self.format == "parquet":
            if not same:
                raise place.file_error("changed while it was read")
        elif (whole or not same) and source.digest() != scanned[1]:
            raise self._changed(place)

    def _changed(self, place: Place) -> Exception:
        return place.file_error("changed after it was scanned")


def open_dataset(config: DatasetConfig) -> Dataset:
    """Open a dataset: settle its files, format, encoding and selection. No row is read yet.

    Raises:
        DatasetError: A file is missing or not a regular file, a pattern matches none, a dataset
            of the Hub cannot be downloaded or has no such config or split, the format cannot be
            told by the names, the encoding is unknown, or what reads the format is not installed.
        InvalidFieldError: The selection of rows is malformed.
    """
    place = Place(config.location)
    encoding = lookup_encoding(config.encoding, place)
    selection = RowSelection() if config.rows is None else parse_rows(config.rows)
    revision: str | None = None
    if isinstance(config.path, str):
        suffixes = [name + packed for name in _SUFFIXES for packed in ("", *_PACKED)]
        files, revision = fetch(config.path, config.config, config.split, suffixes)
    else:
        files = expand(config.path if isinstance(config.path, tuple) else (config.path,))
    format_ = config.format
    for file in files:
        place.path = str(file)
        found = _format_of(file, place) if config.format == "auto" else config.format
        if file != files[0] and found != format_:
            raise place.file_error(f"is {found}, but {files[0].name} is {format_}")
        format_ = found
        if format_ == "parquet":
            import_pyarrow(place)
        if file.suffix.lower() == ".zst":
            import_zstd(place)
        with Source(file, place):
            pass
    return Dataset(
        config,
        files=files,
        revision=revision,
        format=format_,
        encoding=encoding,
        selection=selection,
    )


def _combined(digests: Iterable[str]) -> str:
    """Hash the digests of several files, in order."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _format_of(path: Path, place: Place) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    known = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if known is None:
        raise place.file_error(
            'has a name that does not show its format; set format = "jsonl", "csv" (with its '
            'delimiter) or "parquet"'
        )
    return known
