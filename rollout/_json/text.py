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
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

from rollout.errors import FieldProblem, InvalidBodyError, InvalidFieldError

__all__ = [
    "LARGEST_WEIGHT",
    "MAX_JSON_DEPTH",
    "TOO_MANY",
    "dump_json",
    "dump_large_json",
    "nests_deeper",
    "parse_json",
    "utf8",
    "weight_of",
]

MAX_JSON_DEPTH = 128
"""How deeply arrays and objects may nest in a body."""

TOO_MANY = "too_many_values"

_MOST_AT_ONCE = 64 * 1024
"""How many values are decoded in one go, which takes some 30 ms at most."""

LARGEST_WEIGHT = 256 * 1024 * 1024
"""How much a value may weigh that is to be written; see `weight_of`."""

_VALUE_WEIGHT = 16

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
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, _ in pairs if counts[key] > 1)
        raise InvalidFieldError(
            repeated, "stands more than once in an object", kind="duplicate_key"
        )
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidFieldError("body", "holds a number beyond the range of floats")
    return value


def _refuse_constant(name: str) -> Any:
    raise InvalidFieldError("body", f"holds {name}, which JSON does not have")


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


def _counting_decoder(most: int) -> json.JSONDecoder:
    """Make a decoder that refuses a document of more than *most* values.

    It uses Python's own scanner, which is ten times slower than the one in C but lets other
    threads run between two values; that in C holds the interpreter lock to the end.
    """
    decoder: Any = json.JSONDecoder(**_STRICT, parse_int=_ascii_int)
    left = most

    def counted(text: str, at: int) -> Any:
        nonlocal left
        left -= 1
        if left <= 0:
            raise InvalidFieldError("body", f"holds more than {most} values", kind=TOO_MANY)
        return scan(text, at)

    def array(start: Any, _: Any, *rest: Any) -> Any:
        return json.decoder.JSONArray(start, counted, *rest)  # type: ignore[attr-defined]

    def members(start: Any, strict: bool, _: Any, *rest: Any) -> Any:
        return json.decoder.JSONObject(start, strict, counted, *rest)  # type: ignore[attr-defined]

    decoder.parse_array, decoder.parse_object = array, members
    decoder.scan_once = scan = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder  # type: ignore[no-any-return]


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
        decoder = _counting_decoder(max_values)
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
    may_be_deep = data.count(b"[") + data.count(b"{") > MAX_JSON_DEPTH
    if may_be_deep and nests_deeper(value, MAX_JSON_DEPTH):
        raise _too_deep()
    return value


def _too_deep() -> InvalidBodyError:
    return _refused(f"the body nests deeper than {MAX_JSON_DEPTH} levels")


def _refused(msg: str, kind: str = "json_invalid", *loc: str) -> InvalidBodyError:
    return InvalidBodyError([FieldProblem(loc, msg, kind)])


def _may_hold(data: bytes) -> int:
    """Return an upper bound of the values in JSON text; commas within strings count too."""
    return 1 + data.count(b",") + data.count(b"[") + data.count(b"{")


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` makes one for each call."""


def weight_of(value: Any, levels: float = math.inf, scale: _Scale | None = None) -> int:
    """Weigh a value that is to be written: its characters, and a constant for each value in it.

    JSON cannot share: what stands in several places is written, and weighs, in each. Sixty lists
    that each hold the one before twice would fill any disk, but are quickly weighed.

    Args:
        value: Anything.
        levels: How many levels of lists and objects count; what is deeper weighs nothing.
        scale: The state of weighing the value that this one is in.

    Returns:
        The weight; any larger number where it exceeds `LARGEST_WEIGHT`.
    """
    if isinstance(value, str):
        return _VALUE_WEIGHT + len(value)
    plain = value is None or isinstance(value, (int, float))  # a Mapping is asked for slowly
    if plain or not levels or not isinstance(value, (dict, list, tuple, Mapping)):
        return _VALUE_WEIGHT
    return (scale or _Scale()).weigh(value, levels)


class _Scale:
    """The state of weighing one value.

    Attributes:
        known: Values with their weights, by id and levels; while they are here, so that no other
            value gets the id.
        above: The ids of the lists and objects that the current value is in.
        has_loop: Whether what was weighed last holds something that it is in.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, float], tuple[Any, int]] = {}
        self.above: set[int] = set()
        self.has_loop = False

    def weigh(self, value: Any, levels: float) -> int:
        """Weigh a list or an object."""
        place = id(value), levels
        if place in self.known:
            return self.known[place][1]
        if id(value) in self.above:
            self.has_loop = True
            return _VALUE_WEIGHT
        self.above.add(id(value))
        had_loop, self.has_loop = self.has_loop, False
        weight = _VALUE_WEIGHT
        is_mapping = isinstance(value, (dict, Mapping))
        for item in chain(value, value.values()) if is_mapping else value:
            weight += weight_of(item, levels - 1, self)
            if weight > LARGEST_WEIGHT:
                break
        self.above.remove(id(value))
        if not self.has_loop:  # else it weighs more in another place
            self.known[place] = value, weight
        self.has_loop = self.has_loop or had_loop
        return weight


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
