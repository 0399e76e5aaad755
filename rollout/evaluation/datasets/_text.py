"""Bytes to text, chunk by chunk, and text to lines.

Neither `str.splitlines` nor text mode will do: they end lines at characters that may stand
within a string, such as U+2028.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

from rollout.evaluation.datasets._place import Place

__all__ = ["AUTO", "csv_lines", "decoded", "json_lines", "lookup_encoding"]

AUTO = "auto"

_MARK = "\ufeff"
# The mark of UTF-32 LE begins with that of UTF-16 LE, so it comes first.
_MARKED = ("utf-32-le", "utf-32-be", "utf-8", "utf-16-le", "utf-16-be")
_MARKS = {name: _MARK.encode(name) for name in _MARKED}
_NEEDS_MARK = ("utf-16", "utf-32")
# Encodings in name alone: they are made for single host names, or for source code.
_NOT_FOR_FILES = {"idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape"}
_LINE_END = re.compile(r"\r\n|\r|\n")


def lookup_encoding(name: str, place: Place) -> str:
    """Give the encoding's proper name.

    Raises:
        DatasetError: There is no such text encoding.
    """
    if name == AUTO:
        return AUTO
    try:
        proper = codecs.lookup(name).name
        codecs.getincrementaldecoder(name)
        # Some codecs are from text to text or from bytes to bytes. An empty one is no test.
        b"a".decode(name, "replace")
    except UnicodeError:
        proper = "undefined"
    except (LookupError, ValueError):
        raise place.file_error(f"encoding {name!r} is unknown") from None
    if proper.replace("_", "-") in _NOT_FOR_FILES:
        raise place.file_error(f"encoding {name!r} cannot be used for files")
    return "utf-8" if proper == "utf-8-sig" else proper


def _choose(head: bytes, encoding: str, place: Place) -> str:
    """Settle the encoding with what the file begins with."""
    if encoding in _MARKS and head.startswith(_MARKS[encoding]):
        return encoding
    marked = next((name for name in _MARKED if head.startswith(_MARKS[name])), None)
    if marked is not None:
        if encoding == AUTO or marked.startswith(f"{encoding}-"):
            return marked
        raise place.file_error(
            f"begins with the byte-order mark of {marked}, but encoding is {encoding}"
        )
    if encoding in _NEEDS_MARK:
        raise place.file_error(
            f"has no byte-order mark; set encoding to {encoding}-le or {encoding}-be"
        )
    if encoding == AUTO:
        if b"\0" in head:
            raise place.file_error(
                "seems to be UTF-16 or UTF-32 without a byte-order mark; set encoding, as in "
                "utf-16-le"
            )
        return "utf-8"
    return encoding


def decoded(chunks: Iterable[bytes], encoding: str, place: Place) -> Iterator[str]:
    """Decode the chunks of a file; a byte-order mark is taken off.

    An empty text comes right before an error about bytes, so that whoever waits for the
    second half of a line end knows that there is none.

    Args:
        chunks: The bytes.
        encoding: What `lookup_encoding` gave.
        place: Where the reader of the text is.

    Raises:
        DatasetError: Bytes do not fit the encoding; all text before them was given out.
    """
    source = iter(chunks)
    chunk = next(source, b"")
    encoding = _choose(chunk[:4], encoding, place)
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    read = 0
    fresh = True
    while True:
        before = decoder.getstate()
        held = len(before[0])
        try:
            text = decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as error:
            decoder.setstate(before)
            good = decoder.decode(chunk[: max(0, error.start - held)])
            if good := good.removeprefix(_MARK) if fresh else good:
                yield good
            yield ""
            raise place.error(f"is not {encoding} (at byte {read - held + error.start})") from None
        if fresh and text:
            text = text.removeprefix(_MARK)
            fresh = False
        if text:
            yield text
        if not chunk:
            return
        read += len(chunk)
        chunk = next(source, b"")


def json_lines(texts: Iterable[str]) -> Iterator[str]:
    r"""Split at ``\n`` alone, which is taken off. What is before it in ``\r\n`` is white space."""
    parts: list[str] = []
    for text in texts:
        first, *more = text.split("\n")
        parts.append(first)
        if more:
            yield "".join(parts)
            parts = [more.pop()]
            yield from more
    if any(parts):
        yield "".join(parts)


def csv_lines(texts: Iterable[str]) -> Iterator[str]:
    r"""Split at ``\n``, ``\r\n`` and ``\r``, which stay at the lines' ends."""
    parts: list[str] = []
    held = ""
    for text in texts:
        whole = held + text
        # The second half of this line end may be in the next text.
        held = "\r" if text and whole.endswith("\r") else ""
        start, stop = 0, len(whole) - len(held)
        for match in _LINE_END.finditer(whole, 0, stop):
            parts.append(whole[start : match.end()])
            yield "".join(parts)
            parts.clear()
            start = match.end()
        if start < stop:
            parts.append(whole[start:stop])
    parts.append(held)
    if any(parts):
        yield "".join(parts)
