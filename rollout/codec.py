"""Bytes to types and back: strict JSON, one strict cattrs converter.

Reading is strict where the default tools are lenient: UTF-8 only, no NaN and no infinity
(also not as ``1e400``), no duplicate keys, a bounded depth, and no coercion: ``"7"`` is no
number, ``1`` is no boolean, ``true`` is no number. Unknown fields are ignored, so that newer
peers keep working. Everything that is wrong with a body is said at once, by field, and never
with the value, which may be a secret.

Writing escapes everything beyond ASCII, so lone surrogates that a model made survive.
"""

from __future__ import annotations

import io
import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

import attrs
from cattrs import BaseValidationError, ClassValidationError, Converter, IterableValidationError
from cattrs.errors import IterableValidationNote
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from rollout.errors import FieldProblem, InvalidBodyError, InvalidFieldError
from rollout.types import (
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutLifecycle,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)
from rollout.types._fields import is_finite

__all__ = [
    "MAX_JSON_DEPTH",
    "TOO_MANY",
    "dump_json",
    "dump_large_json",
    "dump_request",
    "format_timestamp",
    "nests_deeper",
    "parse_json",
    "structure",
    "unstructure",
]

T = TypeVar("T")

MAX_JSON_DEPTH = 128
"""How deeply arrays and objects may nest in a body."""

TOO_MANY = "too_many_values"

_MOST_AT_ONCE = 64 * 1024
"""How many values are decoded in one go, which takes some 30 ms at most."""

LARGEST_WEIGHT = 256 * 1024 * 1024
"""How much a value may weigh that is to be written: the characters of all its strings and keys,
and `VALUE_WEIGHT` for each value in it. What stands in several places counts in each."""

VALUE_WEIGHT = 16


# --- JSON -------------------------------------------------------------------------------------


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
    if not is_finite(value):
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


# --- the converter ----------------------------------------------------------------------------

converter = Converter(detailed_validation=True, prefer_attrib_converters=False)


def _refusal(reason: str, kind: str = "type_error") -> InvalidFieldError:
    return InvalidFieldError("", reason, kind=kind)


def _strict(kind: type, reason: str) -> Any:
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, kind):
            raise _refusal(reason)
        return value

    return hook


def _structure_float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refusal("must be a number")
    if not is_finite(value):
        raise _refusal("must be finite", "finite_number")
    return value


def _structure_int(value: Any, _: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refusal("must be a whole number")
    return value


def _structure_enum(value: Any, kind: type[StrEnum]) -> StrEnum:
    if isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            pass
    raise _refusal("must be one of " + ", ".join(kind), "enum")


def _structure_messages(value: Any, _: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _refusal("must be a list of objects")
    return value


def _structure_object(value: Any, _: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal("must be an object")
    return value


def _structure_strings(value: Any, _: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refusal("must be a list of strings")
    return value


def _structure_string_map(value: Any, _: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise _refusal("must be an object of strings")
    return value


_RFC_3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)


def _structure_timestamp(value: Any, _: Any) -> datetime:
    if isinstance(value, str) and _RFC_3339.fullmatch(value):
        try:
            return datetime.fromisoformat(value.upper()).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise _refusal("must be an RFC 3339 time with an offset, or null", "datetime")


def format_timestamp(value: datetime) -> str:
    """Write an aware time as RFC 3339 in UTC."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


converter.register_structure_hook(str, _strict(str, "must be a string"))
converter.register_structure_hook(bool, _strict(bool, "must be a boolean"))
converter.register_structure_hook(float, _structure_float)
converter.register_structure_hook(int, _structure_int)
converter.register_structure_hook(RolloutStatus, _structure_enum)
converter.register_structure_hook(RolloutErrorCategory, _structure_enum)
converter.register_structure_hook(datetime, _structure_timestamp)
converter.register_structure_hook_func(lambda t: t == list[dict[str, Any]], _structure_messages)
converter.register_structure_hook_func(
    lambda t: t == Sequence[Mapping[str, Any]], _structure_messages
)
converter.register_structure_hook_func(lambda t: t == dict[str, Any], _structure_object)
converter.register_structure_hook_func(lambda t: t == list[str], _structure_strings)
converter.register_structure_hook_func(lambda t: t == dict[str, str], _structure_string_map)
converter.register_unstructure_hook(datetime, format_timestamp)

_sample_from_dict = make_dict_structure_fn(RolloutSample, converter)


def _structure_sample(value: Any, kind: Any) -> RolloutSample:
    if not isinstance(value, dict):
        raise _refusal("must be an object or null")
    return _sample_from_dict({**value, "trajectory_messages": None}, kind)


converter.register_structure_hook(RolloutSample, _structure_sample)
converter.register_unstructure_hook(
    RolloutSample,
    make_dict_unstructure_fn(
        RolloutSample,
        converter,
        trajectory_messages=override(omit=True),
        # User data goes out as it is; what has no JSON form was dealt with before.
        messages=override(unstruct_hook=lambda value: value),
        metrics=override(unstruct_hook=lambda value: value),
        extra_fields=override(unstruct_hook=lambda value: value),
    ),
)
converter.register_unstructure_hook(
    RolloutResultResponse,
    make_dict_unstructure_fn(
        RolloutResultResponse, converter, err_source=override(omit_if_default=True)
    ),
)
for _kind in (
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutResultResponse,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    RolloutLifecycle,
):
    converter.register_structure_hook(_kind, make_dict_structure_fn(_kind, converter))


def _problems(error: BaseException, loc: tuple[str | int, ...]) -> list[FieldProblem]:
    found: list[FieldProblem] = []
    if isinstance(error, (ClassValidationError, IterableValidationError)):
        noted, plain = error.group_exceptions()
        for inner, note in noted:
            step = note.index if isinstance(note, IterableValidationNote) else note.name
            found += _problems(inner, (*loc, step))
        for inner in plain:
            found += _problems(inner, loc)
        return found
    if isinstance(error, BaseValidationError):
        return [problem for inner in error.exceptions for problem in _problems(inner, loc)]
    if isinstance(error, InvalidFieldError):
        where = (*loc, error.field) if error.field else loc
        return [FieldProblem(where, error.reason, error.kind)]
    if isinstance(error, KeyError):
        return [FieldProblem(loc, "is required", "missing")]
    return [FieldProblem(loc, "is not valid", "value_error")]


def structure(value: Any, kind: type[T]) -> T:
    """Build a *kind* from parsed JSON.

    Raises:
        InvalidBodyError: The value is no object or a field breaks its rule.
    """
    if not isinstance(value, dict):
        raise InvalidBodyError([FieldProblem((), "the body must be a JSON object", "type_error")])
    try:
        return converter.structure(value, kind)
    except (BaseValidationError, InvalidFieldError) as error:
        raise InvalidBodyError(_problems(error, ())) from None


def unstructure(value: Any) -> Any:
    """Turn one of the protocol's types into what `dump_json` takes."""
    return converter.unstructure(value)


def dump_request(request: RolloutInitRequest) -> bytes:
    """Write the body of an admission request.

    Raises:
        InvalidFieldError: A field holds something that has no JSON form, or is too large.
    """
    fields = {item.name: getattr(request, item.name) for item in attrs.fields(type(request))}
    body: bytes | None = None
    try:
        # Written, a structure that shares its parts could be larger than any memory.
        if _weight(fields, {}) <= LARGEST_WEIGHT:
            body = dump_json(fields)
    except (TypeError, ValueError, RecursionError):
        for name, value in fields.items():
            try:
                dump_json(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidFieldError(name, f"has no JSON form: {error}") from None
        raise
    if body is None:
        heaviest = max(fields, key=lambda name: _weight(fields[name], {}))
        raise InvalidFieldError(heaviest, "is too large to be sent")
    return body


def _weight(value: Any, known: dict[int, int]) -> int:
    """Return what a value would weigh, without writing it; see `LARGEST_WEIGHT`.

    Args:
        value: Anything.
        known: The weights of the lists and objects that were met before, by their ids.
    """
    if isinstance(value, str):
        return VALUE_WEIGHT + len(value)
    if not isinstance(value, (dict, list, tuple)):
        return VALUE_WEIGHT
    if id(value) not in known:
        known[id(value)] = 0  # met within itself, it is for the encoder to refuse
        weight = VALUE_WEIGHT
        for item in value:
            weight += _weight(item, known)
        if isinstance(value, dict):
            for item in value.values():
                weight += _weight(item, known)
        known[id(value)] = weight
    return known[id(value)]
