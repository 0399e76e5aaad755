"""What a model endpoint answered, read off the wire: whole bodies and streams of events.

Pure, and tolerant: an endpoint is somebody else's program. What cannot be read leaves an answer
that says so; it never raises, since it runs beside the call of a user who may do well with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attrs import define, field

from rollout.integrations._responses_items import items_as_messages
from rollout.jsonfit import fit

__all__ = ["Answer", "Choice", "Events", "StreamedAnswer", "error_message", "read_answer"]

_LONGEST_MESSAGE = 500
_EMPTY_IN_REPLY = ("refusal", "annotations", "audio", "function_call", "tool_calls")
_DONE = b"[DONE]"


@define(kw_only=True)
class Choice:
    """One reply of the model.

    Attributes:
        index: Its place among the choices of its call.
        messages: What the model said, in chat form. More than one only where items of the
            Responses API form no single message.
        finish_reason: Why it ended; ``None`` if that was never said.
        logprobs: As the endpoint sent them.
    """

    index: int = 0
    messages: list[dict[str, Any]] = field(factory=list)
    finish_reason: str | None = None
    logprobs: Any = None


@define(kw_only=True)
class Answer:
    """What an endpoint answered to one call.

    Attributes:
        response_id: The answer's own id.
        model: The model that answered.
        usage: Tokens, as the endpoint counted them.
        choices: The replies, in the order of their index.
        error: What was wrong with it, ``None`` for a usable answer.
        complete: Whether it came to its end.
    """

    response_id: str | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    choices: list[Choice] = field(factory=list)
    error: str | None = None
    complete: bool = True


def parse(data: bytes | str) -> Any:
    """Return JSON in plain, finite values; ``None`` if it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return fit(value)[0]


def error_message(body: Any) -> str | None:
    """Return what the body of an error says, in the forms that endpoints use."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error", body)
    for value in (inner, *(inner.get(key) for key in ("message", "detail") if _is_dict(inner))):
        if isinstance(value, str) and value:
            return value[:_LONGEST_MESSAGE]
    return None


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def read_answer(data: bytes, api: str) -> Answer:
    """Read the body of a successful answer.

    Args:
        data: The body.
        api: ``chat`` or ``responses``.
    """
    body = parse(data)
    if not isinstance(body, dict):
        return Answer(error="the answer is no JSON object")
    answer = _read_response(body) if api == "responses" else _read_completion(body)
    if not answer.choices and answer.error is None:
        answer.error = error_message(body.get("error")) or "the answer has no choices"
    return answer


def _read_head(body: dict[str, Any]) -> Answer:
    usage = body.get("usage")
    return Answer(
        response_id=_text(body.get("id")),
        model=_text(body.get("model")),
        usage=usage if isinstance(usage, dict) and usage else None,
    )


def _read_completion(body: dict[str, Any]) -> Answer:
    answer = _read_head(body)
    for place, raw in enumerate(_dicts(body.get("choices"))):
        message = raw.get("message")
        if isinstance(message, dict):
            index = raw.get("index")
            answer.choices.append(
                Choice(
                    index=index if type(index) is int else place,
                    messages=[reply_message(message)],
                    finish_reason=_text(raw.get("finish_reason")),
                    logprobs=raw.get("logprobs"),
                )
            )
    answer.choices.sort(key=lambda choice: choice.index)
    return answer


def reply_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a reply without what servers send along empty."""
    reply = {"role": "assistant", **message}
    for key in _EMPTY_IN_REPLY:
        if key in reply and not reply[key]:
            del reply[key]
    return {key: value for key, value in reply.items() if value is not None or key == "content"}


def _read_response(body: dict[str, Any]) -> Answer:
    answer = _read_head(body)
    status = body.get("status")
    if status in ("failed", "cancelled"):
        answer.error = error_message(body.get("error")) or f"the response is {status}"
        return answer
    items = _dicts(body.get("output"))
    reason = status
    if status == "incomplete" and isinstance(body.get("incomplete_details"), dict):
        reason = body["incomplete_details"].get("reason") or status
    elif status in ("queued", "in_progress"):
        answer.complete = False
    if items:
        answer.choices.append(
            Choice(
                messages=items_as_messages(items),
                finish_reason=_text(reason),
                logprobs=_response_logprobs(items),
            )
        )
    return answer


def _response_logprobs(items: list[dict[str, Any]]) -> Any:
    tokens = [
        token
        for item in items
        for part in _dicts(item.get("content"))
        for token in _dicts(part.get("logprobs"))
    ]
    return {"content": tokens} if tokens else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


class Events:
    """Cuts a stream of server-sent events into events, whatever the chunks that it comes in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take a chunk; yield the bytes of each event that is complete with it."""
        self._rest += chunk
        while True:
            cut = _event_end(self._rest)
            if cut is None:
                return
            event, self._rest = self._rest[:cut], self._rest[cut:]
            yield event

    def rest(self) -> bytes:
        """Take what is left without an end."""
        rest, self._rest = self._rest, b""
        return rest


def _event_end(data: bytes) -> int | None:
    ends = [
        at + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if (at := data.find(mark)) >= 0
    ]
    return min(ends, default=None)


def event_data(event: bytes) -> bytes:
    """Return the data of an event; empty for a comment."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines)


@define
class _Growing:
    """A choice of a chat completion that comes in pieces."""

    message: dict[str, Any] = field(factory=dict)
    calls: dict[int, dict[str, Any]] = field(factory=dict)
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None

    def add(self, raw: dict[str, Any]) -> None:
        delta = raw.get("delta")
        if isinstance(delta, dict):
            for name, value in delta.items():
                if name == "tool_calls":
                    self._add_calls(_dicts(value))
                elif value is not None:
                    _merge(self.message, name, value)
        self.finish_reason = _text(raw.get("finish_reason")) or self.finish_reason
        logprobs = raw.get("logprobs")
        if isinstance(logprobs, dict):
            self.logprobs = self.logprobs or {}
            for name, value in logprobs.items():
                if value is not None:
                    _merge(self.logprobs, name, value)

    def _add_calls(self, deltas: list[dict[str, Any]]) -> None:
        for delta in deltas:
            index = delta.get("index")
            number = index if type(index) is int else len(self.calls)
            call = self.calls.setdefault(number, {})
            for name, value in delta.items():
                if name == "index" or value is None:
                    continue
                if isinstance(value, dict):
                    inner = call.setdefault(name, {})
                    for key, part in value.items():
                        if part is not None and isinstance(inner, dict):
                            _merge(inner, key, part)
                else:
                    _merge(call, name, value)

    def choice(self, index: int) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": None, **self.message}
        if self.calls:
            message["tool_calls"] = [self.calls[number] for number in sorted(self.calls)]
        return Choice(
            index=index,
            messages=[reply_message(message)],
            finish_reason=self.finish_reason,
            logprobs=self.logprobs,
        )

    @property
    def said_something(self) -> bool:
        return bool(self.calls) or any(
            value for name, value in self.message.items() if name != "role"
        )


_WHOLE = frozenset({"role", "id", "type", "name", "model"})
"""Strings that come as a whole, sometimes again and again; all others come in pieces."""


def _merge(into: dict[str, Any], name: str, value: Any) -> None:
    before: Any = into.get(name)
    if name in _WHOLE:
        into[name] = value or before
    elif isinstance(before, str) and isinstance(value, str):
        into[name] = before + value
    elif isinstance(before, list) and isinstance(value, list):
        into[name] = [*before, *value]
    else:
        into[name] = value


class StreamedAnswer:
    """Puts an answer together out of its events.

    Args:
        api: ``chat`` or ``responses``.

    Attributes:
        done: Whether the stream has said that it ends here.
    """

    def __init__(self, api: str) -> None:
        self.done = False
        self._api = api
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Growing] = {}
        self._items: dict[int, dict[str, Any]] = {}
        self._whole: dict[str, Any] | None = None
        self._error: str | None = None

    def add(self, event: bytes) -> bool:
        """Take an event; return whether it holds nothing but the usage of a chat completion."""
        data = event_data(event)
        if data.strip() == _DONE:
            self.done = True
            return False
        body = parse(data) if data else None
        if not isinstance(body, dict):
            return False
        if body.get("error") and body.get("type") != "response.created":
            self._error = error_message(body) or "the stream holds an error"
        if self._api == "responses":
            self._add_response_event(body)
            return False
        for key in ("id", "model", "usage"):
            if body.get(key):
                self._head[key] = body[key]
        choices = _dicts(body.get("choices"))
        for raw in choices:
            index = raw.get("index")
            self._choices.setdefault(index if type(index) is int else 0, _Growing()).add(raw)
        return not choices and bool(body.get("usage"))

    def _add_response_event(self, body: dict[str, Any]) -> None:
        kind, response, item = body.get("type"), body.get("response"), body.get("item")
        if isinstance(response, dict):
            self._head = response
            if kind in ("response.completed", "response.incomplete", "response.failed"):
                self._whole = response
                self.done = True
        if kind == "response.output_item.done" and isinstance(item, dict):
            self._items[len(self._items)] = item
        if kind == "error":
            self._error = error_message(body) or "the stream holds an error"

    def answer(self) -> Answer:
        """Return the answer as far as it has come."""
        if self._api == "responses":
            body = self._whole or {
                **self._head,
                "output": list(self._items.values()),
                "status": None,
            }
            answer = _read_response(body)
            complete = self._whole is not None
        else:
            answer = _read_head(self._head)
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
        return answer
