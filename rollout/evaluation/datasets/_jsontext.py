"""Strict JSON in which the source text of a value is not lost.

`rollout.codec.parse_json` is for bodies. A dataset asks for more: which column a fault is in,
and the text of a number as it was written, since ``1.50`` is not the label ``1.5``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from rollout.codec import MAX_JSON_DEPTH, nests_deeper
from rollout.errors import InvalidFieldError
from rollout.evaluation.datasets._place import Place, shown

__all__ = ["KEEP_NUMBERS", "LABEL", "VALUE", "parse_members", "parse_value"]

_SPACE = re.compile(r"[ \t\n\r]*")
_NOT_ZERO = re.compile(r"-?[0.]*[1-9]")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidFieldError("", f"has the key {shown(key)} twice in an object")
            seen.add(key)
    return value


def _float(text: str) -> float:
    value = float(text)
    if value in {float("inf"), float("-inf")}:
        raise InvalidFieldError("", "holds a number beyond the range of floats")
    return value


def _kept_float(text: str) -> float:
    value = _float(text)
    if not value and _NOT_ZERO.match(text):
        raise InvalidFieldError("", "holds a number too small for a float, which would become 0")
    return value


def _constant(name: str) -> Any:
    raise InvalidFieldError("", f"holds {name}, which is not JSON")


def _decoder(parse_int: Callable[[str], Any], parse_float: Callable[[str], Any]) -> Any:
    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_int=parse_int,
        parse_float=parse_float,
        parse_constant=_constant,
    )


VALUE = _decoder(int, _kept_float)
"""For values that are used as such."""

LABEL = _decoder(str, _float)
"""For values of which the text is taken: whole numbers may have any number of digits."""

KEEP_NUMBERS = _decoder(str, str)
"""For what nobody uses: it has to be JSON, no more."""


def _read(decoder: Any, text: str, at: int, place: Place, column: str | None) -> tuple[Any, int]:
    try:
        value, end = decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _syntax(error.msg, error.pos, text, place, column) from None
    except InvalidFieldError as error:
        raise place.error(error.reason, column=column) from None
    except ValueError:
        raise place.error("holds a number with too many digits", column=column) from None
    except RecursionError:
        raise _too_deep(place, column) from None
    # The body that it is sent in is one more level.
    if nests_deeper(value, MAX_JSON_DEPTH - 1):
        raise _too_deep(place, column)
    return value, _skip(text, end)


def _too_deep(place: Place, column: str | None) -> Exception:
    return place.error(f"nests deeper than {MAX_JSON_DEPTH - 1} levels", column=column)


def _syntax(problem: str, at: int, text: str, place: Place, column: str | None) -> Exception:
    reason = f"is not JSON: {problem.removesuffix(' at')} at character {at + 1}"
    if text.startswith("\ufeff", at):
        reason += " (a byte-order mark within the file; was it put together from several?)"
    elif "\r" in text.rstrip("\r"):
        reason += r" (\r alone does not end a line; use \n)"
    return place.error(reason, column=column)


def parse_value(text: str, place: Place, column: str) -> Any:
    """Parse the JSON text of a cell.

    Raises:
        DatasetError: It is not strict JSON, or nests too deeply.
    """
    at = _skip(text, 0)
    value, end = _read(VALUE, text, at, place, column)
    if end != len(text):
        raise _syntax("Extra data", end, text, place, column)
    return value


def parse_members(
    text: str, decoders: dict[str, Any], place: Place
) -> dict[str, tuple[Any, int, int]]:
    """Parse an object, and say where in the text the value of each member stands.

    Args:
        text: The object's JSON text.
        decoders: The decoder for the members of these names; `KEEP_NUMBERS` for the others.
        place: Where it stands.

    Raises:
        DatasetError: It is not strict JSON, nests too deeply, or is not an object.
    """
    at = _skip(text, 0)
    if not text.startswith("{", at):
        raise _no_object(text, at, place)
    members: dict[str, tuple[Any, int, int]] = {}
    at = _skip(text, at + 1)
    key: str | None = None
    while not (text.startswith("}", at) and not members):
        key, at = _key(text, at, members, place)
        value, end = _read(decoders.get(key, KEEP_NUMBERS), text, at, place, key)
        members[key] = (value, at, end)
        at = end
        if not text.startswith(",", at):
            break
        at = _skip(text, at + 1)
    if not text.startswith("}", at):
        raise _syntax("Expecting ',' or '}'", at, text, place, key)
    at = _skip(text, at + 1)
    if at != len(text):
        raise _syntax("Extra data", at, text, place, None)
    return members


def _key(text: str, at: int, members: Collection[str], place: Place) -> tuple[str, int]:
    """Read a key and its colon; give where its value begins."""
    if at == len(text):
        raise place.error("ends within the object; an object must be on one line")
    if not text.startswith('"', at):
        raise _syntax("Expecting a key in double quotes", at, text, place, None)
    key, at = _read(VALUE, text, at, place, None)
    if key in members:
        raise place.error("stands twice in the row", column=key)
    if not text.startswith(":", at):
        raise _syntax("Expecting ':'", at, text, place, key)
    return key, _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _no_object(text: str, at: int, place: Place) -> Exception:
    if text.startswith("[", at) and place.row == 0:
        return place.error(
            "is not a JSON object; the file must hold one object a line, not an array"
        )
    if text[at : at + 1] in set('"[-0123456789tfn'):
        return place.error("is not a JSON object")
    return _syntax("Expecting an object", at, text, place, None)
