"""Assembles an answer that a model endpoint sends as a stream of events.

Pure, and tolerant, as `recording.calls` is: a stream may end anywhere, and the pieces until then
are the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from attrs import define, field

from rollout.integrations.recording.anthropic import GrowingMessage
from rollout.integrations.recording.calls import (
    Answer,
    Choice,
    dicts,
    error_message,
    ids_in_logprobs,
    load,
    parse,
    read_head,
    read_message,
    read_response,
    read_token_ids,
    reply_message,
    text,
)

__all__ = ["Events", "StreamedAnswer", "event_data"]

_DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_LONGEST_END = 4


class Events:
    """Cuts a stream of server-sent events into events, whatever the chunks that it comes in."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Add a chunk; yield the bytes of each event that is complete with it."""
        self._rest += chunk
        start = 0
        # Not from the beginning: an event may be long, and come in many chunks.
        search = max(0, self._searched - _LONGEST_END + 1)
        while found := _EVENT_END.search(self._rest, search):
            yield bytes(self._rest[start : found.end()])
            start = search = found.end()
        del self._rest[:start]
        self._searched = len(self._rest)

    def rest(self) -> bytes:
        """Remove and return the bytes of an event without an end."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._searched = 0
        return rest


def event_data(event: bytes) -> bytes:
    """Return the data of an event; empty for a comment."""
    if event[:6] == b"data: " and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]  # one line, as nearly all events are
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines)


_WHOLE = frozenset({"role", "id", "type", "name", "model"})
"""Strings that come as a whole, sometimes again and again; all others come in pieces."""

_OBJECTS = frozenset({"function_call", "audio"})
"""Objects of a message that come in pieces; all others come as a whole."""


def _merge_pieces(into: dict[str, Any], pieces: dict[str, Any]) -> None:
    for name, value in pieces.items():
        if value is not None:
            _merge(into, name, value)


def _merge(into: dict[str, Any], name: str, value: Any) -> None:
    before: Any = into.get(name)
    if name == "content" and isinstance(value, dict):
        value = [value]
    if name in _WHOLE:
        into[name] = value or before
    elif isinstance(before, str) and isinstance(value, str):
        into[name] = before + value
    elif isinstance(before, list) and isinstance(value, list):
        before += value
    elif isinstance(before, (str, list)) and isinstance(value, (str, list)):
        into[name] = _joined(_parts(before), _parts(value))
    elif name in _OBJECTS and isinstance(before, dict) and isinstance(value, dict):
        _merge_pieces(before, value)
    else:
        into[name] = value


def _parts(value: str | list[Any]) -> list[Any]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    return value


def _joined(before: list[Any], new: list[Any]) -> list[Any]:
    """Append parts; a part that is nothing but text goes on with one before it."""
    for part in new:
        last = before[-1] if before else None
        if _is_text(last) and _is_text(part):
            before[-1] = {**last, "text": last["text"] + part["text"]}
        else:
            before.append(part)
    return before


def _is_text(part: Any) -> TypeGuard[dict[str, Any]]:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


@define
class _Growing:
    """A choice of a chat completion that comes in pieces."""

    message: dict[str, Any] = field(factory=dict)
    calls: list[tuple[int, dict[str, Any]]] = field(factory=list)
    finish_reason: str | None = None
    token_ids: list[int] = field(factory=list)
    logprobs: dict[str, Any] | None = None

    def add(self, raw: dict[str, Any]) -> None:
        delta = raw.get("delta")
        if isinstance(raw.get("text"), str):  # that of a completion
            _merge(self.message, "content", raw["text"])
        if isinstance(delta, dict):
            for each in dicts(delta.get("tool_calls")):
                self._add_call(each)
            _merge_pieces(self.message, {k: v for k, v in delta.items() if k != "tool_calls"})
        self.finish_reason = text(raw.get("finish_reason")) or self.finish_reason
        self.token_ids += read_token_ids(raw) or ()
        logprobs = raw.get("logprobs")
        if isinstance(logprobs, dict):
            self.logprobs = self.logprobs or {}
            _merge_pieces(self.logprobs, logprobs)

    def _add_call(self, delta: dict[str, Any]) -> None:
        call = self._open_call(delta)
        for name, value in delta.items():
            if isinstance(value, dict):
                inner = call.setdefault(name, {})
                if isinstance(inner, dict):
                    _merge_pieces(inner, value)
            elif name != "index" and value is not None:
                _merge(call, name, value)

    def _open_call(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the call that a delta goes on with, or one that it begins."""
        index, call_id, name = delta.get("index"), delta.get("id"), _name(delta)
        known = [call for place, call in self.calls if type(index) is int and place == index]
        if not known and call_id and not (name and type(index) is int):
            known = [call for _, call in self.calls if call.get("id") == call_id]
        elif not known and not name:
            # Some endpoints count pieces instead of calls.
            known = [call for _, call in self.calls]
        # Some endpoints give all the calls of a reply the same index.
        if known and not _begins_another(known[-1], delta):
            return known[-1]
        begun: dict[str, Any] = {}
        self.calls.append((index if type(index) is int else len(self.calls), begun))
        return begun

    def choice(self, index: int) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": None, **self.message}
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls, key=lambda c: c[0])]
        return Choice(
            index=index,
            messages=[reply_message(message)],
            finish_reason=self.finish_reason,
            token_ids=self.token_ids or ids_in_logprobs(self.logprobs),
            logprobs=self.logprobs,
        )

    @property
    def said_something(self) -> bool:
        return bool(self.calls) or any(
            value for name, value in self.message.items() if name != "role"
        )


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def _name(call: dict[str, Any]) -> Any:
    return _function(call).get("name")


def _begins_another(call: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Whether a delta at the place of a call begins another one.

    Endpoints repeat the name with each piece, or make up an id for each, so neither is enough.
    """
    name, mine, theirs = _name(delta), call.get("id"), delta.get("id")
    if not name or (mine and mine == theirs):
        return False
    if _name(call) not in (None, "", name):
        return True
    before, given = (_function(each).get("arguments") or "" for each in (call, delta))
    starts = not isinstance(given, str) or given.lstrip().startswith("{")
    if not mine or not theirs:
        return _is_whole(before) and starts
    goes_on = given and not _is_whole(given) and not (starts and before)
    return _is_whole(before) or not goes_on


def _is_whole(arguments: Any) -> bool:
    return isinstance(parse(arguments) if isinstance(arguments, str) else arguments, dict)


_PARTS = {
    "response.output_text.delta": ("content", "content_index", "output_text", "text"),
    "response.refusal.delta": ("content", "content_index", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "content_index", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": (
        "summary",
        "summary_index",
        "summary_text",
        "text",
    ),
}
"""For each event with a piece of a part: the list of the part, its index, type and text field."""

_INPUTS = {
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}
"""For each event with a piece of a tool's input, the field of the item that it belongs to."""


@define
class _GrowingItems:
    """The items of a response that come in pieces."""

    _items: dict[int, dict[str, Any]] = field(factory=dict)
    _said: set[int] = field(factory=set)

    def add(self, kind: Any, event: dict[str, Any]) -> None:
        index, item, delta = event.get("output_index"), event.get("item"), event.get("delta")
        if type(index) is not int:
            index = self._place_of(item)
        if kind == "response.output_item.added" and isinstance(item, dict):
            self._items[index] = item
        elif kind == "response.output_item.done" and isinstance(item, dict):
            self._items[index] = item
            self._said.add(index)
        elif isinstance(delta, str) and delta and index in self._items:
            grown = self._items[index]
            if kind in _INPUTS:
                before = grown.get(_INPUTS[kind])
                grown[_INPUTS[kind]] = (before if isinstance(before, str) else "") + delta
            elif kind in _PARTS:
                self._grow_part(grown, _PARTS[kind], event)
            else:
                return
            self._said.add(index)

    def _place_of(self, item: Any) -> int:
        """Return where an event without an index belongs."""
        if not isinstance(item, dict):
            return len(self._items) - 1
        same = (index for index, each in self._items.items() if each.get("id") == item.get("id"))
        return next(same, len(self._items)) if item.get("id") else len(self._items)

    def _grow_part(
        self, item: dict[str, Any], where: tuple[str, str, str, str], event: dict[str, Any]
    ) -> None:
        name, index_name, kind, field_name = where
        said = item.get(name)
        parts = item[name] = [{"type": kind, field_name: said}] if text(said) else dicts(said)
        index = event.get(index_name)
        if type(index) is not int or not 0 <= index < len(parts):
            parts.append({"type": kind})
            index = len(parts) - 1
        part = parts[index]
        before = part.get(field_name)
        part[field_name] = (before if isinstance(before, str) else "") + event["delta"]
        if event.get("logprobs"):
            part["logprobs"] = [*dicts(part.get("logprobs")), *dicts(event["logprobs"])]

    def items(self) -> list[dict[str, Any]]:
        """Return the items with content, in order."""
        return [self._items[index] for index in sorted(self._said)]


class StreamedAnswer:
    """Assembles an answer from its events.

    Args:
        api: See `Call.api`.

    Attributes:
        done: Whether the stream has said that it ends here.
        last: What the last event holds, parsed; ``None`` if that is not an object.
    """

    def __init__(self, api: str) -> None:
        self.done = False
        self.last: dict[str, Any] | None = None
        self._api = api
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Growing] = {}
        self._items = _GrowingItems()
        self._message = GrowingMessage()
        self._whole: dict[str, Any] | None = None
        self._error: str | None = None

    @property
    def over(self) -> bool:
        """Whether nothing can come that counts: it has said its end, or an error."""
        return self.done or self._error is not None

    def add(self, event: bytes) -> bool:
        """Add an event; return whether it holds nothing but the usage of a chat completion."""
        data = event_data(event)
        self.last = None
        if data.strip() == _DONE:
            self.done = True
            return False
        body = load(data or event)
        if not isinstance(body, dict):
            return False
        self.last = body
        if body.get("error") and body.get("type") != "response.created":
            self._error = error_message(body) or "the stream holds an error"
        if not data:
            return False  # an error without the form of an event
        if self._api == "responses":
            self._add_response_event(body)
            return False
        if self._api == "messages":
            self._message.add(body)
            self.done = self._message.done
            return False
        return self._add_chunk(body)

    def _add_chunk(self, body: dict[str, Any]) -> bool:
        for key in ("id", "model", "usage", "prompt_token_ids"):
            if body.get(key):
                self._head[key] = body[key]
        choices = dicts(body.get("choices"))
        for raw in choices:
            index = raw.get("index")
            if raw.get("prompt_token_ids"):
                self._head.setdefault("prompt_token_ids", raw["prompt_token_ids"])
            self._choices.setdefault(index if type(index) is int else 0, _Growing()).add(raw)
        return not choices and bool(body.get("usage"))

    def _add_response_event(self, body: dict[str, Any]) -> None:
        kind, response = body.get("type"), body.get("response")
        if isinstance(response, dict):
            self._head = response
            if kind in ("response.completed", "response.incomplete", "response.failed"):
                self._whole = response
                self.done = True
        self._items.add(kind, body)
        if kind == "error":
            self._error = error_message(body) or "the stream holds an error"

    def answer(self, *, ended: bool = False) -> Answer:
        """Return the answer as far as it has come.

        Args:
            ended: Whether nothing more can come. An answer that is not whole then has failed.
        """
        if self._api == "responses":
            body = self._whole or {**self._head, "output": self._items.items(), "status": None}
            answer = read_response(body)
            complete = self._whole is not None
        elif self._api == "messages":
            answer, complete = read_message(self._message.body()), self.done
        else:
            answer = read_head(self._head)
            answer.choices = [
                growing.choice(index)
                for index, growing in sorted(self._choices.items())
                if growing.said_something or growing.finish_reason
            ]
            complete = bool(self._choices) and (
                self.done or all(each.finish_reason for each in self._choices.values())
            )
        answer.complete = complete
        answer.error = self._error or answer.error
        if ended and not complete and answer.error is None:
            answer.error = "the stream ended before its answer was whole"
        return answer
