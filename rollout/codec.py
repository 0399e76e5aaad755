"""Bytes to types and back: strict JSON, one strict cattrs converter.

Reading is strict where the default tools are lenient: UTF-8 only, no NaN and no infinity
(also not as ``1e400``), no duplicate keys, a bounded depth, and no coercion: ``"7"`` is not a
number, ``1`` not a boolean, ``true`` not a number. Unknown fields are ignored, so that newer
peers keep working. Everything that is wrong with a body is said at once, by field, and never
with the value, which may be a secret.

Writing escapes everything beyond ASCII, so lone surrogates that a model made survive.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
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
from rollout._threads import is_large
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


def _must(reason: str, fits: Callable[[Any], bool]) -> Callable[[Any, Any], Any]:
    """Make a hook that takes a value as it is, or refuses it for a reason."""

    def hook(value: Any, _: Any) -> Any:
        if not fits(value):
            raise _refusal(reason)
        return value

    return hook


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _structure_float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refusal("must be a number")
    if not is_finite(value):
        raise _refusal("must be finite", "finite_number")
    return value


def _structure_enum(value: Any, kind: type[StrEnum]) -> StrEnum:
    if isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            pass
    raise _refusal("must be one of " + ", ".join(kind), "enum")


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


_messages = _must("must be a list of objects", _list_of(dict))
for _plain, _hook in {
    str: _must("must be a string", lambda value: isinstance(value, str)),
    bool: _must("must be a boolean", lambda value: isinstance(value, bool)),
    int: _must("must be a whole number", lambda value: type(value) is int),
    float: _structure_float,
    datetime: _structure_timestamp,
    RolloutStatus: _structure_enum,
    RolloutErrorCategory: _structure_enum,
}.items():
    converter.register_structure_hook(_plain, _hook)
for _generic, _hook in (
    (list[dict[str, Any]], _messages),
    (Sequence[Mapping[str, Any]], _messages),
    (list[str], _must("must be a list of strings", _list_of(str))),
    (dict[str, Any], _must("must be an object", lambda value: isinstance(value, dict))),
    (
        dict[str, str],
        _must(
            "must be an object of strings",
            lambda value: isinstance(value, dict) and _list_of(str)(list(value.values())),
        ),
    ),
):
    converter.register_structure_hook_func(partial(operator.eq, _generic), _hook)
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
        RolloutResultResponse,
        converter,
        err_source=override(omit_if_default=True),
        err_phase=override(omit_if_default=True),
    ),
)
converter.register_unstructure_hook(
    CancelRolloutsRequest,
    make_dict_unstructure_fn(
        CancelRolloutsRequest, converter, admission_keys=override(omit_if_default=True)
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


_REQUEST_FIELDS = tuple(attrs.fields_dict(RolloutInitRequest))


def dump_request(request: RolloutInitRequest) -> bytes:
    """Write the body of an admission request.

    Raises:
        InvalidFieldError: A field holds something that has no JSON form, or is too large.
    """
    members = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    if not is_large(members):
        with suppress(TypeError, ValueError, RecursionError):  # the field has to be named
            return dump_json(members)
    texts: list[bytes] = []
    for name, value in members.items():
        try:
            # Written, a structure that shares its parts could be larger than any memory.
            text = dump_json(value) if weight_of(value) <= LARGEST_WEIGHT else None
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidFieldError(name, f"has no JSON form: {error}") from None
        if text is None:
            raise InvalidFieldError(name, "is too large to be sent")
        texts.append(dump_json(name) + b":" + text)
    return b"{" + b",".join(texts) + b"}"
