"""Fit what a run left behind into text and numbers that a page can take.

Whatever a model, a tool or a dataset wrote arrives here. Nothing in it is trusted: text is
cut to a length, numbers that are none become ``None``, and JSON is written such that no part
of it can end the element that it stands in.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["clip", "embed", "line", "number", "parse", "pretty", "shown"]

_MARKUP = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
_LONGEST_INT = 300
_ODD = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufff9-\ufffb\ud800-\udfff"
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
"""The second line on is Unicode's Default_Ignorable_Code_Point but for what shapes letters and
emoji: joiners, and variation selectors 1 to 16."""


def embed(value: Any) -> str:
    """Write JSON that may stand in a script element: ASCII alone, and no markup.

    Raises:
        ValueError: There is NaN or an infinity in it, which no browser reads.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_MARKUP)


def clip(text: str, limit: int) -> str:
    """Cut *text* to *limit* characters, and say so where it was cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters in the trajectory file"


def line(text: str, limit: int) -> str:
    """Return *text* as one line of at most *limit* characters."""
    # What is far behind the end is not worth looking at.
    text = " ".join(text[: 4 * limit].split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(value: Any, limit: int = 2_000) -> str:
    """Return one line for a value that belongs into the page's own HTML.

    Characters that no page can hold, that hide, or that turn the direction of text become
    U+FFFD; the script shows such characters by their numbers instead.
    """
    return _ODD.sub("\ufffd", line(value if isinstance(value, str) else pretty(value), limit))


def number(value: Any) -> float | int | None:
    """Return *value* if it is a finite number of a size that JavaScript can take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def parse(data: bytes) -> Any:
    """Read JSON as it comes: duplicate keys, NaN and numbers of any length included.

    Raises:
        ValueError: It is not JSON, or nests too deep.
    """
    try:
        return json.loads(data, parse_int=_whole)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _whole(digits: str) -> int | str:
    return int(digits) if len(digits) <= _LONGEST_INT else digits


def pretty(value: Any) -> str:
    """Write a value for people to read: text as it is, everything else as indented JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, indent=2)
    except (RecursionError, ValueError):
        return "(nests too deep to be shown)"
