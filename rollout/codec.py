"""Bytes to types and back: strict JSON, one strict cattrs converter.

Reading is strict where the default tools are lenient: UTF-8 only, no NaN and no infinity
(also not as ``1e400``), no duplicate keys, a bounded depth, and no coercion: ``"7"`` is not a
number, ``1`` not a boolean, ``true`` not a number. Unknown fields are ignored, so that newer
peers keep working. Everything that is wrong with a body is said at once, by field, and never
with the value, which may be a secret.

Writing escapes everything beyond ASCII, so lone surrogates that a model made survive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

import attrs
from cattrs import BaseValidationError, ClassValidationError, Converter, IterableValidationError
from cattrs.errors import IterableValidationNote
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from rollout._checks import is_finite
from rollout._json.text import (
    LARGEST_WEIGHT,
    MAX_JSON_DEPTH,
    TOO_MANY,
    dump_json,
    dump_large_json,
    nests_deeper,
    parse_json,
    weight_of,
)
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
        InvalidBodyError: The value is not an object, or a field breaks its rule.
    """
    if not isinstance(value, dict):
        raise InvalidBodyError([FieldProblem((), "the body must be a JSON object", "type_error")])
    try:
        return converter.structure(value, kind)
    except (BaseValidationError, InvalidFieldError) as error:
        raise InvalidBodyError(_problems(error, ())) from None


def unstructure(value: Any) -> Any:
    """Turn one of the protocol's types into plain JSON types, for `dump_json`."""
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
        if weight_of(fields) <= LARGEST_WEIGHT:
            body = dump_json(fields)
    except (TypeError, ValueError, RecursionError):
        for name, value in fields.items():
            try:
                dump_json(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidFieldError(name, f"has no JSON form: {error}") from None
        raise
    if body is None:
        heaviest = max(fields, key=lambda name: weight_of(fields[name]))
        raise InvalidFieldError(heaviest, "is too large to be sent")
    return body
