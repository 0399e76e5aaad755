"""The steps of a trajectory, message by message."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from rollout.codec import dump_json
from rollout.trajectory.calls import read_call, take_id
from rollout.trajectory.content import Content, put, take_content
from rollout.trajectory.totals import TIME_KEYS, take_metrics, take_timestamp

__all__ = ["COPIED", "Steps"]

COPIED = "is_copied_context"
"""Marks messages of the assistant, and their steps, that this rollout's model did not write."""

_SOURCES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "agent",
    "agent": "agent",
    "model": "agent",
    "ai": "agent",
}
_RESULT_ROLES = frozenset({"tool", "function"})
_RESULT_ID_KEYS = ("tool_call_id", "tool_use_id", "call_id")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_OFTEN_NULL = frozenset(
    {
        "annotations",
        "audio",
        "function_call",
        "logprobs",
        "name",
        "reasoning",
        "reasoning_content",
        "refusal",
        "tool_calls",
        "usage",
    }
)
"""Fields that servers send with every message, often as null; null is dropped."""

_OBVIOUS_ROLES = frozenset({"system", "user", "assistant"})
_ORDER = (
    "step_id",
    "timestamp",
    "source",
    "model_name",
    "reasoning_effort",
    "message",
    "reasoning_content",
    "tool_calls",
    "observation",
    "metrics",
    COPIED,
    "extra",
)


@define(eq=False)
class _Pending:
    """A call that results may answer, and its step."""

    step: dict[str, Any]
    call: dict[str, Any]


@define(eq=False)
class _Calls:
    """Calls that results cannot tell apart, in their order.

    Attributes:
        all: The calls.
        answered: How many of them have a result; the first ones have it first.
    """

    all: list[_Pending] = field(factory=list)
    answered: int = 0

    def take(self, *, again: bool) -> _Pending | None:
        """Return the first that is still open; else the last one, if it may have another result."""
        if self.answered < len(self.all):
            self.answered += 1
            return self.all[self.answered - 1]
        return self.all[-1] if again else None


@define(eq=False)
class Steps:
    """Turns messages in plain JSON types into steps."""

    _steps: list[dict[str, Any]] = field(factory=list)
    _calls_by_id: dict[str, _Calls] = field(factory=dict)
    _calls_without_id: dict[str, _Calls] = field(factory=dict)
    _ids_in_step: set[str] = field(factory=set)
    _open: str | None = None  # the last item of the response that the last step is made of
    _count: int = 0

    def add(self, message: Any, *, copied: bool = False) -> None:
        """Add the next message, whose dict becomes part of the steps.

        Args:
            message: The message, in JSON types.
            copied: Whether it comes from an earlier conversation.
        """
        position = self._count
        self._count += 1
        if not isinstance(message, dict):
            put(self._new("system")["extra"], "message", message)
            return
        rest = message
        if rest.get(COPIED) is True:
            copied = rest.pop(COPIED)
        kind = _kind(rest)
        if kind is not None:
            self._add_item(kind, rest, position)
            return
        role = rest.pop("role", None)
        if role is None and isinstance(rest.get("type"), str) and rest["type"] in _SOURCES:
            role = rest.pop("type")
        if role in ("tool", "function") or (role is None and "tool_call_id" in rest):
            self._add_result(rest, position, role)
            return
        source = _SOURCES.get(role, "system") if isinstance(role, str) else "system"
        _unwrap(rest)
        extra: dict[str, Any] = {}
        if role is not None and not (isinstance(role, str) and role in _OBVIOUS_ROLES):
            extra["role"] = role
        if rest.get("type") == "message":
            del rest["type"]
        if source == "agent":
            self._add_agent(rest, extra, position, copied=copied)
        else:
            self._add_plain(source, rest, extra, position)

    def finish(self) -> list[dict[str, Any]]:
        """Return all steps, numbered from 1; a history without messages has an empty one."""
        if not self._steps:
            self._new("system")
        for number, step in enumerate(self._steps, 1):
            step["step_id"] = number
            if step.get("thoughts"):
                step["reasoning_content"] = "\n\n".join(step["thoughts"])
            if not step["extra"]:
                del step["extra"]
        return [{name: step[name] for name in _ORDER if name in step} for step in self._steps]

    # --- messages -------------------------------------------------------------------------------

    def _add_plain(
        self, source: str, rest: dict[str, Any], extra: dict[str, Any], position: int
    ) -> None:
        content = take_content(rest.pop("content", None), calls=True)
        timestamp = take_timestamp(rest)
        alone = not (content.parts or content.kept or rest or extra)
        for raw in content.results:
            result = dict(raw)
            if alone and timestamp is not None:
                put(result, "timestamp", timestamp)
            self._add_result(result, position, "tool_result")
        if content.results and alone:
            return
        step = self._new(source)
        _stamp(step, timestamp)
        step["message"] = content.message
        self._keep(step, content, rest, extra)

    def _add_agent(
        self, rest: dict[str, Any], extra: dict[str, Any], position: int, *, copied: bool
    ) -> None:
        content = take_content(rest.pop("content", None), agent=True, calls=True)
        step = self._response_step("message", goes_on=self._open == "reasoning")
        step["message"] = content.message
        thoughts = content.thoughts
        if rest:
            _stamp(step, take_timestamp(rest))
            _take_model(step, rest)
            thoughts = [*_take_thoughts(rest), *thoughts]
            metrics = take_metrics(rest)
            if metrics is not None:
                step["metrics"] = metrics
        self._think(step, thoughts)
        if copied:
            step[COPIED] = True
        if rest or content.calls:
            self._take_calls(step, content, rest)
        self._keep(step, content, rest, extra)
        for raw in content.results:
            self._add_result(dict(raw), position, "tool_result")

    def _add_item(self, kind: str, rest: dict[str, Any], position: int) -> None:
        """Add an item of a response that is not a message."""
        if kind == "result":
            self._add_result(rest, position, None)
            return
        timestamp = take_timestamp(rest)
        if kind == "reasoning":
            step = self._response_step("reasoning", goes_on=self._open == "reasoning")
            _stamp(step, timestamp)
            self._think(step, _take_summaries(rest))
            self._keep(step, Content(), {k: v for k, v in rest.items() if k != "type"}, {})
            return
        goes_on = self._open is not None and "observation" not in self._steps[-1]
        step = self._response_step("message", goes_on=goes_on)
        _stamp(step, timestamp)
        self._call(step, rest)

    # --- calls and results ----------------------------------------------------------------------

    def _take_calls(self, step: dict[str, Any], content: Content, rest: dict[str, Any]) -> None:
        raws = rest.get("tool_calls")
        strange: list[Any] = []
        if isinstance(raws, list):
            for raw in rest.pop("tool_calls"):
                if isinstance(raw, dict):
                    self._call(step, raw)
                else:
                    strange.append(raw)
        if strange:
            put(step["extra"], "tool_calls", strange)
        if isinstance(rest.get("function_call"), dict):
            self._call(step, rest.pop("function_call"))
        for raw in content.calls:
            self._call(step, raw)

    def _call(self, step: dict[str, Any], raw: dict[str, Any]) -> None:
        read = read_call(raw)
        calls = step.setdefault("tool_calls", [])
        # Results name a call of their step by its id, so each call needs one, of its own.
        number = len(calls) + 1
        call_id = read.call_id or f"call-{len(self._steps)}-{number}"
        while call_id in self._ids_in_step:
            number += 1
            call_id = f"{read.call_id or 'call'} ({number})"
        self._ids_in_step.add(call_id)
        call = {"tool_call_id": call_id, **read.call}
        if read.call_id is not None and call_id != read.call_id:
            put(call.setdefault("extra", {}), "tool_call_id", read.call_id)
        calls.append(call)
        if read.call_id is not None:
            alike = self._calls_by_id.setdefault(read.call_id, _Calls())
        else:
            alike = self._calls_without_id.setdefault(call["function_name"], _Calls())
        alike.all.append(_Pending(step, call))

    def _add_result(self, rest: dict[str, Any], position: int, role: str | None) -> None:
        extra: dict[str, Any] = {}
        if role not in {"tool", "tool_result", None}:
            extra["role"] = role
        if rest.get("type") in ("tool", "tool_result", "function_call_output"):
            del rest["type"]
        call_id = take_id(_RESULT_ID_KEYS, rest, extra)
        content = _result_content(rest)
        result: dict[str, Any] = {}
        pending = self._pending(call_id, rest.get("name"))
        if pending is None:
            # A result names calls of its own step only.
            step = self._new("system")
            _stamp(step, take_timestamp(rest))
            if call_id is not None:
                extra.setdefault("tool_call_id", call_id)
        else:
            step = pending.step
            result["source_call_id"] = pending.call["tool_call_id"]
            if step is not self._steps[-1]:
                extra["position"] = position
            if rest.get("name") == pending.call["function_name"]:
                del rest["name"]
        result["content"] = content.message
        for name, value in rest.items():
            put(extra, name, value)
        if content.kept:
            put(extra, "content_parts", content.kept)
        if extra:
            result["extra"] = extra
        step.setdefault("observation", {"results": []})["results"].append(result)

    def _pending(self, call_id: str | None, name: Any) -> _Pending | None:
        """Find the call that a result answers: the first of its id that is still open."""
        if call_id is not None:
            alike = self._calls_by_id.get(call_id)
            return None if alike is None else alike.take(again=True)
        alike = self._calls_without_id.get(name) if isinstance(name, str) else None
        return None if alike is None else alike.take(again=False)

    # --- steps ----------------------------------------------------------------------------------

    def _response_step(self, item: str, *, goes_on: bool) -> dict[str, Any]:
        """Return the step of the response that an item belongs to: the last one, or a new one."""
        step = self._steps[-1] if goes_on else self._new("agent")
        self._open = item
        return step

    def _new(self, source: str) -> dict[str, Any]:
        self._open = None
        self._ids_in_step = set()
        step: dict[str, Any] = {"source": source, "message": "", "extra": {}}
        self._steps.append(step)
        return step

    def _think(self, step: dict[str, Any], thoughts: list[str]) -> None:
        if not thoughts:
            return
        known = step.setdefault("thoughts", [])
        known += [thought for thought in dict.fromkeys(thoughts) if [thought] != known]

    def _keep(
        self, step: dict[str, Any], content: Content, rest: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        for name, value in (*extra.items(), *rest.items()):
            if value is not None or name not in _OFTEN_NULL:
                put(step["extra"], name, value)
        if content.kept:
            put(step["extra"], "content_parts", content.kept)


def _kind(message: dict[str, Any]) -> str | None:
    """Return the kind of an item of a response; ``None`` for a message."""
    kind = message.get("type")
    if not isinstance(kind, str) or "role" in message:
        return None
    if kind == "reasoning":
        return "reasoning"
    if kind.endswith(("_call_output", "tool_result")):
        return "result"
    if kind.endswith(("_call", "tool_use")):
        return "call"
    return None


def _unwrap(message: dict[str, Any]) -> None:
    """Move time, model and usage to where other messages have them.

    Harbor's agents, of which mini-swe-agent is one, keep them in the message's ``extra``, with the
    endpoint's response.
    """
    extra = message.get("extra")
    if not isinstance(extra, dict):
        return
    response = extra.get("response")
    if isinstance(response, dict):
        for name in ("usage", "model"):
            if name in response and name not in message:
                message[name] = response.pop(name)
    if "timestamp" in extra and message.keys().isdisjoint(TIME_KEYS):
        message["timestamp"] = extra.pop("timestamp")


def _stamp(step: dict[str, Any], timestamp: str | None) -> None:
    """Give a step its time; the times of further items of the same response stay beside it."""
    if timestamp is not None and step.setdefault("timestamp", timestamp) != timestamp:
        put(step["extra"], "timestamp", timestamp)


def _take_model(step: dict[str, Any], rest: dict[str, Any]) -> None:
    for key in ("model", "model_name"):
        if isinstance(rest.get(key), str) and rest[key] and "model_name" not in step:
            step["model_name"] = rest.pop(key)
    if isinstance(rest.get("reasoning_effort"), (str, int, float)):
        effort = rest["reasoning_effort"]
        if isinstance(effort, str) or type(effort) is float:
            step["reasoning_effort"] = rest.pop("reasoning_effort")


def _take_thoughts(rest: dict[str, Any]) -> list[str]:
    return [rest.pop(key) for key in _THOUGHTS if isinstance(rest.get(key), str) and rest[key]]


def _take_summaries(rest: dict[str, Any]) -> list[str]:
    """Remove and return the texts of a reasoning item; lists with other parts stay."""
    thoughts: list[str] = []
    for key in ("summary", "content"):
        parts = rest.get(key)
        if isinstance(parts, list) and all(
            isinstance(part, dict)
            and isinstance(part.get("text"), str)
            and part.keys() <= {"type", "text"}
            for part in parts
        ):
            thoughts += [part["text"] for part in rest.pop(key)]
    return thoughts


def _result_content(rest: dict[str, Any]) -> Content:
    key = "output" if "output" in rest and "content" not in rest else "content"
    value = rest.pop(key, None)
    if value is None or isinstance(value, (str, list)):
        return take_content(value)
    content = take_content(value)
    if not content.parts:
        # An object or a number: its JSON text says all of it.
        return take_content(dump_json(value).decode("ascii"))
    return content
