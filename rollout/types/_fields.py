"""Converters and validators that several types share; no message repeats a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote, urlsplit

from attrs import field

from rollout._checks import is_finite
from rollout._json.fit import dumped, plain_number
from rollout.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attrs import Attribute

V = TypeVar("V", bound="Callable[..., None]")

RULES: dict[Any, dict[str, Any]] = {}
"""JSON Schema of the checks beyond a field's type, by validator."""


def rule(**schema: Any) -> Callable[[V], V]:
    """Register the JSON Schema of what a validator checks beyond the type of its field."""

    def noted(validator: V) -> V:
        RULES[validator] = schema
        return validator

    return noted


MAX_QUOTED_ID_LENGTH = 32 * 1024
"""Longest rollout_id, percent-encoded, that still fits a request line."""


def instance_of(kind: type, *, name: str) -> Any:
    """Validate that a value is a *kind*; *name* is how a message calls that type."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise InvalidFieldError(attribute.name, f"must be {name}", kind="type_error")

    return check


def optional(validator: Any) -> Any:
    """Validate with *validator* unless the value is ``None``."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is not None:
            validator(instance, attribute, value)

    RULES[check] = RULES.get(validator, {})
    return check


def optional_field(kind: type, name: str) -> Any:
    """Make a field that is a *kind* or ``None``, which is its default."""
    return field(default=None, validator=optional(instance_of(kind, name=name)))


def messages(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a list of message objects."""
    check_objects(attribute.name, value, list, dict)


def check_objects(name: str, value: Any, sequence: type, mapping: type) -> None:
    """Validate that a value is a *sequence* of *mapping*.

    Raises:
        InvalidFieldError: It is not; the message names the first item that is something else.
    """
    reason = "must be a list of objects"
    if isinstance(value, sequence) and not isinstance(value, (str, bytes)):
        for index, item in enumerate(cast("Sequence[Any]", value)):
            if not isinstance(item, mapping):
                kind = type(item).__name__
                reason += f", but item {index} is of type {kind}: put {_plain_form(item)} there"
                break
        else:
            return
    raise InvalidFieldError(name, reason, kind="type_error")


def _plain_form(item: Any) -> str:
    if is_dataclass(item) or hasattr(type(item), "__attrs_attrs__"):
        return "its asdict()"
    known = ("model_dump", "to_dict", "dict", "_asdict")
    method = next((name for name in known if callable(getattr(type(item), name, None))), None)
    return "a dict" if method is None else f"its {method}()"


def as_messages(value: Any) -> Any:
    """Turn the message objects of SDKs in a list into dicts; leave the rest to the validator."""
    if isinstance(value, list) and not all(isinstance(item, dict) for item in value):
        return [dumped(item) or item for item in value]
    return value


MAX_TEXT_LENGTH = 256


@rule(minLength=1)
def given_text(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a text that is left out or not empty."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidFieldError(attribute.name, "must be a string or null", kind="type_error")
    if not value:
        raise InvalidFieldError(attribute.name, "must be left out or not empty")


@rule(minLength=1, maxLength=MAX_TEXT_LENGTH)
def short_text(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a text that is left out or has 1 to 256 characters."""
    given_text(instance, attribute, value)
    if value is not None and len(value) > MAX_TEXT_LENGTH:
        raise InvalidFieldError(attribute.name, f"must have at most {MAX_TEXT_LENGTH} characters")


def strings(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a list of strings."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidFieldError(attribute.name, "must be a list of strings", kind="type_error")


def string_map(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a mapping from strings to strings."""
    if not isinstance(value, dict) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        raise InvalidFieldError(attribute.name, "must be an object of strings", kind="type_error")


def utc_time(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a time that says its offset."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidFieldError(
            attribute.name, "must be a datetime with a time zone", kind="type_error"
        )


@rule(minimum=0)
def count(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a whole number from 0 up."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidFieldError(attribute.name, "must be a whole number", kind="type_error")
    if value < 0:
        raise InvalidFieldError(attribute.name, "must not be negative")


def path_segment_problem(value: str) -> str | None:
    """Say why *value* cannot be a rollout id, or return ``None`` when it can."""
    if value in {"", ".", ".."}:
        return "must be a single path segment, not empty, '.' or '..'"
    if any(separator in value for separator in ("/", "\\", "\x00")):
        return "must be a single path segment, without '/', '\\' or NUL"
    try:
        quoted = quote(value, safe="")
    except UnicodeEncodeError:
        return "must be encodable as UTF-8, so it may not hold lone surrogates"
    if len(quoted) > MAX_QUOTED_ID_LENGTH:
        return f"must not exceed {MAX_QUOTED_ID_LENGTH} characters when percent-encoded"
    return None


# Without backtracking or lookahead: up to two dots and then something else, or more dots.
@rule(pattern=r"^(\.{0,2}[^./\\\x00][^/\\\x00]*|\.{3,}[^/\\\x00]*)$")
def path_segment(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate an id that becomes one segment of a URL and of a file path."""
    if not isinstance(value, str):
        raise InvalidFieldError(attribute.name, "must be a string", kind="type_error")
    if problem := path_segment_problem(value):
        raise InvalidFieldError(attribute.name, problem)


@rule(format="uri", pattern=r"^[Hh][Tt][Tt][Pp][Ss]?://[^/?#\\\s]")
def http_url(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate an http or https URL that names a host."""
    if not isinstance(value, str):
        raise InvalidFieldError(attribute.name, "must be a string", kind="type_error")
    if url_host(value) is None:
        reason = "must be an http:// or https:// URL with a host, without spaces"
        raise InvalidFieldError(attribute.name, reason, kind="url")


def url_host(url: str) -> tuple[str, int] | None:
    """Return host and port of an http or https URL; ``None`` for any other text.

    An IPv6 address keeps its brackets.
    """
    if any(char <= " " or char in "\x7f\\" for char in url):  # libraries differ in what they mean
        return None
    try:
        parts = urlsplit(url)
        usual_port = {"http": 80, "https": 443}[parts.scheme]
        port = parts.port
    except (ValueError, KeyError):
        return None
    host = parts.hostname
    if not host:
        return None
    return f"[{host}]" if ":" in host else host, usual_port if port is None else port


def timeout(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a timeout: ``None`` for no limit, else any finite number of seconds."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidFieldError(attribute.name, "must be a number of seconds", kind="type_error")
    if not is_finite(value):
        raise InvalidFieldError(attribute.name, "must be finite; leave it out to run unbounded")


def finite_number(name: str, value: Any) -> float | None:
    """Convert to a plain finite float or ``None``, or raise an error with the field's name."""
    if value is None:
        return None
    number = plain_number(value)
    if number is None:
        is_float = isinstance(value, float)  # NaN or an infinity, then
        found = f"{float(value)}" if is_float else type(value).__name__
        raise InvalidFieldError(name, f"must be a finite number, not {found}", kind="finite_number")
    return number
