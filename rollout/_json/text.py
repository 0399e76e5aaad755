"""Strict JSON text: parsing bytes and writing them.

Reading is strict where `json` is lenient: UTF-8 only, no NaN and no infinity (also not as
``1e400``), no duplicate keys, a bounded depth.

Writing escapes everything beyond ASCII, so lone surrogates that a model made survive.
"""

from __future__ import annotations

import io
import json
import json.decoder
import json.scanner
import math
import re
from collections.abc import Callable
from typing import Any

from rollout.errors import FieldProblem, InvalidBodyError, InvalidFieldError

__all__ = [
    "LARGEST_WEIGHT",
    "MAX_JSON_DEPTH",
    "TOO_MANY",
    "VALUE_WEIGHT",
    "dump_json",
    "dump_large_json",
    "nests_deeper",
    "parse_json",
    "utf8",
]

MAX_JSON_DEPTH = 128
"""How deeply arrays and objects may nest in a body."""

TOO_MANY = "too_many_values"

_MOST_AT_ONCE = 64 * 1024
"""How many values are decoded in one go, which takes some 30 ms at most."""

LARGEST_WEIGHT = 256 * 1024 * 1024
"""How much a value may weigh that is to be written: the characters of all its strings and keys,
and `VALUE_WEIGHT` for each value in it. What stands in several places counts in each."""

VALUE_WEIGHT = 16

_SURROGATE = re.compile("[\ud800-\udfff]")


def utf8(text: str) -> str:
    """Replace lone surrogates by U+FFFD, for text that strict peers read."""
    return _SURROGATE.sub("\ufffd", text)


def nests_deeper(value: Any, levels: int) -> bool:
    """Whether parsed JSON nests deeper than so many levels of arrays and objects."""
    containers = [value] if isinstance(value, (dict, list)) else []
    while containers and levels:
        levels -= 1
        containers = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
    return bool(containers)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InvalidFieldError(
            _first_repeated(pairs), "stands more than once in an object", kind="duplicate_key"
        )
    return value


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return ""


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidFieldError("body", "holds a number beyond the range of floats")
    return value


def _refuse_constant(name: str) -> Any:
    raise InvalidFieldError("body", f"holds {name}, which is no JSON")


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _object,
    "parse_float": _finite_float,
    "parse_constant": _refuse_constant,
}
_decoder = json.JSONDecoder(**_STRICT)


def _ascii_int(text: str) -> int:
    if not text.isascii():  # which Python's own scanner lets pass before 3.12.8
        raise InvalidFieldError("body", "holds a number with digits beyond ASCII")
    return int(text)


class _CountingDecoder(json.JSONDecoder):
    """Decodes one document with Python's own scanner, and counts its values.

    It is ten times slower than the scanner in C, which holds the interpreter lock until it has
    read everything; this one lets other threads run between two values.
    """

    def __init__(self, most: int) -> None:
        super().__init__(**_STRICT, parse_int=_ascii_int)
        left = most

        def counted(text: str, at: int) -> tuple[Any, int]:
            nonlocal left
            left -= 1
            if left <= 0:
                raise InvalidFieldError("body", f"holds more than {most} values", kind=TOO_MANY)
            return scan(text, at)

        def array(start: Any, _: Any, *rest: Any) -> Any:
            return json.decoder.JSONArray(start, counted, *rest)  # type: ignore[attr-defined]

        def members(start: Any, strict: bool, _: Any, *rest: Any) -> Any:
            return json.decoder.JSONObject(start, strict, counted, *rest)  # type: ignore[attr-defined]

        self.parse_array = array
        self.parse_object = members
        scan: Callable[[str, int], tuple[Any, int]]
        scan = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]
        self.scan_once = scan


def parse_json(data: bytes, *, max_values: int | None = None) -> Any:
    """Parse strict JSON.

    Args:
        data: The text.
        max_values: How many values it may hold, counting those in arrays and objects. With a
            bound, no other thread waits long for the interpreter lock meanwhile.

    Raises:
        InvalidBodyError: The bytes are empty, no UTF-8, no JSON, nested deeper than
            `MAX_JSON_DEPTH`, hold NaN, an infinity, a key twice in one object, or too many
            values (`TOO_MANY` is the type of that problem).
    """
    if not data.strip():
        raise _refused("the body is empty; it must be a JSON object", "missing")
    decoder = _decoder
    if max_values is not None and _may_hold(data) > min(max_values, _MOST_AT_ONCE):
        decoder = _CountingDecoder(max_values)
    try:
        value = decoder.decode(data.decode("utf-8"))
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise _refused(f"the body is not UTF-8 (at byte {error.start})") from None
    except InvalidFieldError as error:
        if error.kind == "duplicate_key":
            raise _refused(error.reason, error.kind, error.field) from None
        kind = TOO_MANY if error.kind == TOO_MANY else "json_invalid"
        raise _refused(f"the body {error.reason}", kind) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _refused(f"the body is not JSON: {error.msg} at {where}") from None
    except ValueError:
        raise _refused("the body holds a number with too many digits") from None
    if nests_deeper(value, MAX_JSON_DEPTH):
        raise _too_deep()
    return value


def _too_deep() -> InvalidBodyError:
    return _refused(f"the body nests deeper than {MAX_JSON_DEPTH} levels")


def _refused(msg: str, kind: str = "json_invalid", *loc: str) -> InvalidBodyError:
    return InvalidBodyError([FieldProblem(loc, msg, kind)])


def _may_hold(data: bytes) -> int:
    """Return how many values JSON text may hold at most: what is within strings counts too."""
    return 1 + data.count(b",") + data.count(b"[") + data.count(b"{")


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` makes one for each call."""

_PIECE = 1024 * 1024
"""How many characters are written in one go, which takes some 3 ms."""


def dump_json(value: Any) -> bytes:
    """Write compact JSON in ASCII.

    Raises:
        TypeError: A value has no JSON form.
        ValueError: A float is not finite, or the value contains itself.
        RecursionError: It nests too deeply.
    """
    return _ENCODER.encode(value).encode("ascii")


def dump_large_json(value: Any) -> bytes:
    """Write the same as `dump_json`, in steps between which other threads can run.

    Args:
        value: Nothing but dicts with strings as keys, lists, and what has a JSON form.
    """
    out = io.BytesIO()

    def write(part: Any) -> None:
        if isinstance(part, dict):
            for number, (key, item) in enumerate(part.items()):
                out.write(b"," if number else b"{")
                write(key)
                out.write(b":")
                write(item)
            out.write(b"}" if part else b"{}")
        elif isinstance(part, list):
            for number, item in enumerate(part):
                out.write(b"," if number else b"[")
                write(item)
            out.write(b"]" if part else b"[]")
        elif isinstance(part, str) and len(part) > _PIECE:
            out.write(b'"')
            for start in range(0, len(part), _PIECE):
                out.write(dump_json(part[start : start + _PIECE])[1:-1])
            out.write(b'"')
        else:
            out.write(dump_json(part))

    write(value)
    return out.getvalue()
