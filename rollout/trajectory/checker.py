"""The rules of ATIF, checked without Harbor.

The rules are a table: which object has which fields, and what each field takes. Harbor's own
validator also reads numbers and booleans out of strings and each other (``"3"`` or ``true`` as a
number); this one takes JSON's own types alone, and judges everything else as Harbor does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from rollout.trajectory.totals import is_number, is_timestamp

__all__ = ["trajectory_problems"]

Problems = Iterator[str]
Check = Callable[[Any, str], Problems]

_MOST_PROBLEMS = 200
_DEEPEST = 40
"""How deeply documents of subagents may nest."""

_LARGEST_WHOLE = 2**63

_VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_AUDIO_TYPES = (
    "audio/wav",
    "audio/mpeg",
    "audio/mp4",
    "audio/aac",
    "audio/ogg",
    "audio/flac",
    "audio/webm",
    "audio/aiff",
)
_AUDIO_ALIASES = (
    "audio/mp3",
    "audio/mpga",
    "audio/x-mpeg",
    "audio/x-wav",
    "audio/wave",
    "audio/vnd.wave",
    "audio/x-m4a",
    "audio/m4a",
    "audio/x-aac",
    "audio/x-flac",
    "audio/x-aiff",
)
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def trajectory_problems(document: Any) -> list[str]:
    """Return what keeps a document from being valid ATIF (v1.0 to v1.8).

    Args:
        document: A parsed JSON value.

    Returns:
        One line for each problem, with its place, 200 at most; an empty list for a valid document.
    """
    problems: list[str] = []
    for problem in _document(document, "trajectory"):
        problems.append(problem)
        if len(problems) == _MOST_PROBLEMS:
            break
    return problems


# --- values -----------------------------------------------------------------------------------


def _is(test: Callable[[Any], bool], what: str) -> Check:
    """Return a check of a value's type."""

    def check(value: Any, place: str) -> Problems:
        if not test(value):
            yield f"{place}: must be {what}, not {_name(value)}"

    return check


def _is_whole(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) < _LARGEST_WHOLE


_text = _is(lambda value: isinstance(value, str), "a string")
_whole = _is(_is_whole, "a whole number")
_number = _is(is_number, "a number")
_effort = _is(lambda value: isinstance(value, str) or is_number(value), "a string or a number")
_truth = _is(lambda value: isinstance(value, bool), "true or false")
_any_object = _is(lambda value: isinstance(value, dict), "an object")


def _from(lowest: int) -> Check:
    def check(value: Any, place: str) -> Problems:
        if not _is_whole(value):
            yield from _whole(value, place)
        elif value < lowest:
            yield f"{place}: must be {lowest} or more, not {value}"

    return check


def _duration(value: Any, place: str) -> Problems:
    if not is_number(value):
        yield from _number(value, place)
    elif value < 0:
        yield f"{place}: must not be negative"


def _timestamp(value: Any, place: str) -> Problems:
    if not isinstance(value, str):
        yield from _text(value, place)
    elif not is_timestamp(value):
        yield f"{place}: is not an ISO 8601 time"


def _one_of(names: tuple[str, ...]) -> Check:
    def check(value: Any, place: str) -> Problems:
        if not isinstance(value, str) or value not in names:
            yield f"{place}: must be one of {', '.join(names)}"

    return check


def _list_of(check: Check) -> Check:
    def check_all(value: Any, place: str) -> Problems:
        if not isinstance(value, list):
            yield f"{place}: must be a list, not {_name(value)}"
            return
        for index, item in enumerate(value):
            yield from check(item, f"{place}[{index}]")

    return check_all


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "that")


# --- objects ----------------------------------------------------------------------------------


def _object(
    value: Any, place: str, required: Mapping[str, Check], optional: Mapping[str, Check]
) -> Problems:
    """Check the fields of an object; those that are not required may be ``null``."""
    yield from _any_object(value, place)
    if not isinstance(value, dict):
        return
    for name, check in required.items():
        if name not in value:
            yield f"{place}.{name}: is missing"
        else:
            yield from check(value[name], f"{place}.{name}")
    for name, item in value.items():
        if name in optional:
            if item is not None:
                yield from optional[name](item, f"{place}.{name}")
        elif name not in required:
            yield f"{place}.{str(name)[:100]}: is not a field of ATIF"


def _fields(required: Mapping[str, Check], optional: Mapping[str, Check]) -> Check:
    return lambda value, place: _object(value, place, required, optional)


def _image(value: Any, place: str) -> Problems:
    yield from _object(value, place, {"media_type": _one_of(_IMAGE_TYPES), "path": _text}, {})


def _audio(value: Any, place: str) -> Problems:
    def media_type(name: Any, where: str) -> Problems:
        plain = name.strip().lower() if isinstance(name, str) else name
        if plain not in _AUDIO_ALIASES:
            yield from _one_of(_AUDIO_TYPES)(plain, where)

    yield from _object(
        value, place, {"media_type": media_type, "path": _text}, {"duration_sec": _duration}
    )


def _part(value: Any, place: str) -> Problems:
    kind = value.get("type") if isinstance(value, dict) else None
    source: Check = _audio if kind == "audio" else _image
    known = _one_of(("text", "image", "audio"))
    yield from _object(value, place, {"type": known}, {"text": _text, "source": source})
    if not isinstance(kind, str) or kind not in {"text", "image", "audio"}:
        return
    wanted, unwanted = ("text", "source") if kind == "text" else ("source", "text")
    if value.get(wanted) is None:
        yield f"{place}.{wanted}: is missing from a part of type {kind}"
    if value.get(unwanted) is not None:
        yield f"{place}.{unwanted}: does not belong to a part of type {kind}"


def _message(value: Any, place: str) -> Problems:
    if isinstance(value, list):
        yield from _list_of(_part)(value, place)
    else:
        yield from _text(value, place)


def _reference(value: Any, place: str) -> Problems:
    names = ("trajectory_id", "session_id", "trajectory_path")
    yield from _object(value, place, {}, {**dict.fromkeys(names, _text), "extra": _any_object})
    if isinstance(value, dict) and all(value.get(n) is None for n in (names[0], names[2])):
        yield f"{place}: needs a trajectory_id or a trajectory_path"


_agent = _fields(
    {"name": _text, "version": _text},
    {"model_name": _text, "tool_definitions": _list_of(_any_object), "extra": _any_object},
)
_tool_call = _fields(
    {"tool_call_id": _text, "function_name": _text, "arguments": _any_object},
    {"extra": _any_object},
)
_result = _fields(
    {},
    {
        "source_call_id": _text,
        "content": _message,
        "subagent_trajectory_ref": _list_of(_reference),
        "extra": _any_object,
    },
)
_metrics = _fields(
    {},
    {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), _whole),
        **dict.fromkeys(("prompt_token_ids", "completion_token_ids"), _list_of(_whole)),
        "cost_usd": _number,
        "logprobs": _list_of(_number),
        "extra": _any_object,
    },
)
_totals = _fields(
    {},
    {
        "total_prompt_tokens": _whole,
        "total_completion_tokens": _whole,
        "total_cached_tokens": _whole,
        "total_cost_usd": _number,
        "total_steps": _from(0),
        "extra": _any_object,
    },
)
_step_fields = _fields(
    {"step_id": _from(1), "source": _one_of(("system", "user", "agent")), "message": _message},
    {
        "timestamp": _timestamp,
        "model_name": _text,
        "reasoning_effort": _effort,
        "reasoning_content": _text,
        "tool_calls": _list_of(_tool_call),
        "observation": _fields({"results": _list_of(_result)}, {}),
        "metrics": _metrics,
        "is_copied_context": _truth,
        "llm_call_count": _from(0),
        "extra": _any_object,
    },
)


# --- rules between fields ---------------------------------------------------------------------


def _step(value: Any, place: str) -> Problems:
    yield from _step_fields(value, place)
    if not isinstance(value, dict):
        return
    agent = value.get("source") == "agent"
    if not agent:
        for name in _AGENT_ONLY:
            if value.get(name) is not None:
                yield f"{place}.{name}: belongs to steps of the agent only"
    count = value.get("llm_call_count")
    if agent and _is_whole(count) and count == 0:
        for name in ("metrics", "reasoning_content"):
            if value.get(name) is not None:
                yield f"{place}.{name}: contradicts llm_call_count 0"
    yield from _sources(value, place)


def _sources(step: dict[str, Any], place: str) -> Problems:
    """Check that a result that names a call names one of its own step."""
    calls = _entries(step.get("tool_calls"))
    known = {call["tool_call_id"] for call in calls if isinstance(call.get("tool_call_id"), str)}
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    for index, result in enumerate(_entries(results)):
        source = result.get("source_call_id")
        if isinstance(source, str) and source not in known:
            yield (
                f"{place}.observation.results[{index}].source_call_id: "
                "does not name a call of this step"
            )


def _entries(value: Any) -> list[dict[str, Any]]:
    return (
        [item if isinstance(item, dict) else {} for item in value]
        if isinstance(value, list)
        else []
    )


def _steps(items: Any, place: str) -> Problems:
    yield from _list_of(_step)(items, place)
    if items == []:
        yield f"{place}: must not be empty"
    for index, item in enumerate(_entries(items)):
        number = item.get("step_id")
        if _is_whole(number) and number >= 1 and number != index + 1:
            yield f"{place}[{index}].step_id: must be {index + 1}, not {number}"


def _subagents(depth: int) -> Check:
    def check(items: Any, place: str) -> Problems:
        if depth == _DEEPEST:
            yield f"{place}: nests too deeply"
            return
        yield from _list_of(lambda item, inner: _document(item, inner, depth + 1))(items, place)
        seen: set[str] = set()
        for index, item in enumerate(_entries(items)):
            name = item.get("trajectory_id")
            if name is None:
                yield f"{place}[{index}].trajectory_id: is missing from a subagent's document"
            elif isinstance(name, str):
                if name in seen:
                    yield f"{place}[{index}].trajectory_id: is used by another subagent too"
                seen.add(name)

    return check


def _document(value: Any, place: str, depth: int = 0) -> Problems:
    required: dict[str, Check] = {"agent": _agent, "steps": _steps}
    if isinstance(value, dict) and "schema_version" in value:
        required["schema_version"] = _one_of(_VERSIONS)  # it may be missing, but not be null
    names = ("session_id", "trajectory_id", "notes", "continued_trajectory_ref")
    optional: dict[str, Check] = {
        **dict.fromkeys(names, _text),
        "final_metrics": _totals,
        "extra": _any_object,
        "subagent_trajectories": _subagents(depth),
    }
    yield from _object(value, place, required, optional)
