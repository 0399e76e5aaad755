"""Tool calls, in the forms in which messages carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from rollout._json.fit import fit
from rollout._json.text import utf8
from rollout.codec import MAX_JSON_DEPTH, parse_json
from rollout.errors import InvalidBodyError
from rollout.trajectory.content import put

__all__ = ["Call", "raw_arguments", "read_call", "take_id"]

_ARGUMENTS_DEPTH = MAX_JSON_DEPTH - 10
_ARGUMENT_KEYS = ("arguments", "input", "args", "parameters")
_ID_KEYS = ("call_id", "id", "tool_call_id")
_RAW = "_raw"
"""The argument that stands for a text that is not an object, as in the official package."""

_PLAIN_TYPES = frozenset({"function", "function_call", "custom", "tool_use", "tool_call"})


@frozen
class Call:
    """A tool call.

    Attributes:
        call_id: Its id, as results name it; ``None`` if it has none.
        call: As ATIF has it, without an id.
    """

    call_id: str | None
    call: dict[str, Any]


def read_call(raw: dict[str, Any]) -> Call:
    """Read a call of any form; what ATIF has no place for goes into its ``extra``.

    Args:
        raw: The call, in JSON types.
    """
    rest = dict(raw)
    extra: dict[str, Any] = {}
    call_id = take_id(_ID_KEYS, rest, extra)
    inner = rest
    for key in ("function", "custom"):
        if isinstance(rest.get(key), dict):
            inner = dict(rest.pop(key))
            break
    name = inner.pop("name", None)
    if not isinstance(name, str) or not name:
        if name is not None:
            put(extra, "name", name)
        kind = raw.get("type")
        name = kind if isinstance(kind, str) and kind not in _PLAIN_TYPES else "unknown"
    given = next((each for each in _ARGUMENT_KEYS if each in inner), None)
    arguments = _arguments(inner.pop(given) if given else None, extra)
    if isinstance(rest.get("type"), str) and rest["type"] in _PLAIN_TYPES - {"custom"}:
        del rest["type"]
    for left in (rest, inner) if inner is not rest else (rest,):
        for name_left, value in left.items():
            put(extra, name_left, value)
    call: dict[str, Any] = {"function_name": name, "arguments": arguments}
    if extra:
        call["extra"] = extra
    return Call(call_id, call)


def raw_arguments(arguments: Mapping[str, Any]) -> str | None:
    """Return the text that a call of ATIF has for arguments; ``None`` if they are an object."""
    raw = arguments.get(_RAW)
    return raw if isinstance(raw, str) and len(arguments) == 1 else None


def take_id(keys: Iterable[str], rest: dict[str, Any], extra: dict[str, Any]) -> str | None:
    """Remove the id of a call from *rest*, under the first of *keys* that has one.

    One that is a whole number is kept as it was in *extra*.
    """
    for key in keys:
        value = rest.get(key)
        if isinstance(value, str) and value:
            return str(rest.pop(key))
        if type(value) is int:
            extra["tool_call_id"] = rest.pop(key)
            return str(value)
    return None


def _arguments(value: Any, extra: dict[str, Any]) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if isinstance(value, str):
        parsed = _parse(value)
        return {_RAW: value} if parsed is None else parsed
    put(extra, "arguments", value)
    return {}


def _parse(text: str) -> dict[str, Any] | None:
    """Parse a JSON object, ``None`` if the text is not one or cannot be kept faithfully."""
    try:
        value = parse_json(utf8(text).encode())
    except InvalidBodyError:
        return None
    if not isinstance(value, dict):
        return None
    fitted, dropped = fit(value, max_depth=_ARGUMENTS_DEPTH)
    return None if dropped else fitted
