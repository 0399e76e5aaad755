"""Rows of a Parquet file, by record batches. pyarrow comes with the extra ``parquet``."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from importlib import import_module
from typing import IO, Any

from rollout.codec import MAX_JSON_DEPTH
from rollout.evaluation.datasets._jsontext import parse_value
from rollout.evaluation.datasets._place import Place, shown
from rollout.evaluation.selection import Picker

__all__ = ["ParquetRecord", "import_pyarrow", "read_parquet"]

_BATCH_ROWS = 256
_BATCH_BYTES = 256 << 20
_LARGEST_TEXT = 64 << 20
"""A server takes no larger request, unless it is told to."""
_BUFFER_BYTES = 1 << 20
_SHORT_FLOATS = {"halffloat": "e", "float": "f"}


def import_pyarrow(place: Place) -> Any:
    """Import pyarrow with its Parquet reader.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise place.file_error(
            'Parquet needs pyarrow: pip install "trio-rollout[parquet]" '
            f"({type(error).__name__}: {error})"
        ) from None


class ParquetRecord:
    """A row as Parquet has it."""

    def __init__(self, columns: dict[str, Any], at: int, place: Place) -> None:
        self._columns = columns
        self._at = at
        self._place = place

    @property
    def names(self) -> Collection[str]:
        """The columns of the file."""
        return self._columns.keys()

    def _get(self, column: str) -> Any:
        value = self._columns[column][self._at]
        buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
        if buffer is not None and buffer.size > _LARGEST_TEXT:
            raise self._place.error(
                f"holds {buffer.size >> 20} MiB; the most is {_LARGEST_TEXT >> 20} MiB",
                column=column,
            )
        try:
            return value.as_py()
        except UnicodeDecodeError as error:
            raise self._place.error(
                f"is not UTF-8 (at byte {error.start} of the text)", column=column
            ) from None
        except (ValueError, OverflowError) as error:
            raise self._place.error(f"cannot be read: {error}", column=column) from None

    def text(self, column: str) -> str | None:
        """Read a string.

        Raises:
            DatasetError: It is something else.
        """
        value = self._get(column)
        if value is not None and not isinstance(value, str):
            raise self._place.error("must be a string or null", column=column)
        return value

    def label(self, column: str) -> str | None:
        """Read a string as it is, and any other value as it would be written in JSON.

        Raises:
            DatasetError: JSON has no such value.
        """
        value = self._get(column)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, Decimal):
            return f"{value:f}"
        self._check(value, column)
        if isinstance(value, float):
            code = _SHORT_FLOATS.get(str(self._columns[column].type))
            return repr(value) if code is None else _shortest(value, code)
        return json.dumps(value, ensure_ascii=False)

    def value(self, column: str) -> Any:
        """Read a value, or the JSON text of one.

        Raises:
            DatasetError: JSON has no such value, or the text is not strict JSON.
        """
        value = self._get(column)
        if isinstance(value, str):
            return parse_value(value, self._place, column) if value.strip() else None
        self._check(value, column)
        return value

    def _check(self, value: Any, column: str) -> None:
        """Refuse what has no JSON form; Arrow's types are more than those of JSON."""
        waiting = [(value, 1)]
        while waiting:
            each, depth = waiting.pop()
            if isinstance(each, float):
                if not math.isfinite(each):
                    raise self._place.error("holds NaN or an infinity", column=column)
            elif isinstance(each, (dict, list)):
                if depth >= MAX_JSON_DEPTH:
                    raise self._place.error(
                        f"nests deeper than {MAX_JSON_DEPTH - 1} levels", column=column
                    )
                inner = each.values() if isinstance(each, dict) else each
                waiting += [(item, depth + 1) for item in inner]
            elif each is not None and not isinstance(each, (str, bool, int)):
                raise self._place.error(
                    f"holds a {type(each).__name__}, which has no JSON form; store it as text",
                    column=column,
                )


def _shortest(value: float, code: str) -> str:
    """The shortest text of a number of 16 or 32 bits that gives the same number again."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.unpack(code, struct.pack(code, short))[0] == value:
                return repr(short)
        except OverflowError:
            # Rounded up beyond the largest one; more digits will do.
            continue
    return repr(value)


def read_parquet(
    file: IO[bytes],
    place: Place,
    picker: Picker,
    *,
    used: Collection[str],
    check_header: Callable[[Collection[str]], None],
) -> Iterator[ParquetRecord]:
    """Read the rows that *picker* takes; row groups in which there are none are left out.

    Args:
        file: The file.
        place: Moved along, row by row.
        picker: Asked for each row.
        used: The columns to read.
        check_header: Called with the names of the columns, before the first row.

    Raises:
        DatasetError: It is not a sound Parquet file.
    """
    arrow = import_pyarrow(place)
    # Names that are not UTF-8 are found late.
    faults = (arrow.ArrowException, OSError, UnicodeDecodeError)
    try:
        # Without a read-ahead, a row group larger than memory is no obstacle.
        reader = arrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        names: list[str] = reader.schema_arrow.names
        sizes = [reader.metadata.row_group(at).num_rows for at in range(reader.num_row_groups)]
        total: int = reader.metadata.num_rows
    except faults as error:
        raise place.file_error(f"cannot be read as Parquet: {error}") from None
    with reader:
        if len(set(names)) != len(names):
            name = next(name for at, name in enumerate(names) if name in names[:at])
            raise place.error(f"the file has the column {shown(name)} twice", column=name)
        if sum(sizes) != total or any(size < 0 for size in sizes):
            raise place.file_error("is damaged: its row groups do not make up its rows")
        check_header(names)
        wanted = [name for name in names if name in used]
        # A dot in a name is a step into a struct to pyarrow, so such names are not asked for.
        chosen = None if any("." in name for name in names) else wanted
        first = place.count
        for group, size in enumerate(sizes):
            if picker.takes_any(first, first + size - 1):
                place.row = first
                try:
                    batches = reader.iter_batches(
                        _batch_rows(reader.metadata.row_group(group)),
                        row_groups=[group],
                        columns=chosen,
                        use_threads=False,
                    )
                    yield from _rows(batches, wanted, place, picker)
                except faults as error:
                    raise place.error(f"is damaged here or in the rows after: {error}") from None
                # Of a damaged group, Arrow may give some of the rows and call it done.
                if place.row != first + size:
                    raise place.error(f"is damaged here: the row group has {size} rows")
            first += size
            place.row = place.count = first


def _batch_rows(group: Any) -> int:
    """How many rows to read at a time: a cell may be as large as its whole row group.

    A few bytes of a file can stand for many cells of hundreds of megabytes, since a value that
    repeats is kept once.
    """
    size: int = group.total_byte_size
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, size)))


def _rows(
    batches: Iterator[Any], wanted: list[str], place: Place, picker: Picker
) -> Iterator[ParquetRecord]:
    row = place.row or 0
    for batch in batches:
        columns = {name: batch.column(name) for name in wanted}
        for at in range(batch.num_rows):
            place.row = row
            if picker.takes(row):
                yield ParquetRecord(columns, at, place)
            row += 1
        place.row = row
