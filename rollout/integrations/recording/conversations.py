"""Conversations, found by which call of a model continues which history. Pure.

Theory of operation: a chat endpoint has no memory, so an agent sends the whole history with each
call. A call whose messages begin with a recorded conversation, its last reply included, goes on
with it: the new messages and the reply are added at its end. Any other call begins a branch,
which shares with the recorded conversations what it has in common with the closest of them.

Messages are compared by what they say: role, text, calls, ids. Agents drop and reformat the rest
when they send a reply back; the reply is recorded as the model gave it. But for one thing:
some endpoints give calls of tools no ids, and agents make them up. Those are taken over, since the
results of the tools name them.

An agent's answer comes last, so the conversation of the last call is the one that counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from attrs import define, evolve, field, frozen

from rollout._json.fit import fit
from rollout.integrations.recording.calls import Call, Choice
from rollout.integrations.recording.responses import text_of
from rollout.trajectory.steps import COPIED

__all__ = ["Conversation", "Conversations", "Entry"]


@frozen(eq=False)
class Entry:
    """A message of a conversation.

    Attributes:
        message: It, in chat form.
        call: The call that brought it; a reply if `choice` is there, else a message that was
            first sent with it.
        choice: The reply that it is, or the first message of.
        replied: Whether the model said it.
        sent: The form in which the agent sent it last, if that is another one.
    """

    message: dict[str, Any]
    call: Call
    choice: Choice | None = None
    replied: bool = False
    sent: dict[str, Any] | None = None

    @cached_property
    def key(self) -> list[Any]:
        """Its content, for comparisons."""
        return _key(self.message)

    @cached_property
    def bare_key(self) -> list[Any]:
        """The key without the ids of its calls."""
        return _key(self.message, ids=False) if _calls(self.message) else self.key

    def details(self) -> dict[str, Any]:
        """Return time, model, usage and so on, see `Call.details`."""
        details = self.call.details(self.choice)
        if not self.replied and self.message.get("role") == "assistant":
            details[COPIED] = True
        return details

    def says(self, sent: Entry) -> bool:
        """Whether it equals what was sent, apart from ids that it may lack."""
        return self is sent or self.key in (sent.key, sent.bare_key)

    def as_sent(self, sent: Entry) -> Entry:
        """Return it with the ids and the form of what was sent."""
        if self is sent or sent.message in (self.message, self.sent):
            return self
        message = self.message
        if self.key != sent.key:
            calls = [
                {**mine, "id": theirs.get("id")} if isinstance(mine, dict) else mine
                for mine, theirs in zip(_calls(message), _calls(sent.message), strict=True)
            ]
            message = {**message, "tool_calls": calls}
        return evolve(self, message=message, sent=sent.message)


@define(eq=False)
class Conversation:
    """A history of messages.

    Attributes:
        name: Whose it is; conversations of different names have nothing in common.
        entries: The messages.
        last: The call that went on with it last.
        choice: The index of the choice of that call that it goes on with.
    """

    name: str
    entries: list[Entry] = field(factory=list)
    last: Call | None = None
    choice: int = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages in chat form."""
        return [entry.message for entry in self.entries]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its rank among conversations; the highest one is the sample."""
        answered = max(
            (each.call.number for each in self.entries if each.choice and each.call.complete),
            default=0,
        )
        return answered, self.last.number if self.last is not None else 0, -self.choice

    def has_reply(self, response_id: str, choice: int) -> bool:
        """Whether a reply is part of it."""
        return any(
            each.choice is not None
            and each.choice.index == choice
            and each.call.response_id == response_id
            for each in self.entries
        )

    def shared(self, history: list[Entry]) -> int:
        """Return how many messages it has in common with a history, from the beginning on."""
        if self.entries == history[: len(self.entries)]:
            return len(self.entries)  # the very same, as a rule
        count = 0
        for entry, other in zip(self.entries, history, strict=False):
            if not entry.says(other):
                break
            count += 1
        return count


class Conversations:
    """All conversations of a rollout."""

    def __init__(self) -> None:
        self._all: list[Conversation] = []

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def history(self, call: Call, messages: Sequence[Any]) -> list[Entry]:
        """Return the messages that are sent with a call.

        Messages that are known to the letter are neither copied nor read again, since each call
        sends the whole history.
        """
        known: list[Entry] = []
        for each in reversed(self._all):
            if each.name != call.conversation:
                continue
            count = 0
            for entry, message in zip(each.entries, messages, strict=False):
                if message not in (entry.message, entry.sent):
                    break
                count += 1
            if count > len(known):
                known = each.entries[:count]
            if count == len(each.entries):
                break
        new: list[Any] = fit(list(messages[len(known) :]))[0]
        return [*known, *(Entry(each, call) for each in new if isinstance(each, dict))]

    def add(self, call: Call, sent: list[Entry]) -> None:
        """Add the messages and the replies of a call that was answered, in whole or in part."""
        extended: Conversation | None = None
        closest: Conversation | None = None
        common = 0
        for each in self._all:
            if each.name != call.conversation:
                continue
            shared = each.shared(sent)
            if shared == len(each.entries) and (
                extended is None or shared >= len(extended.entries)
            ):
                extended = each
            if shared > common:
                closest, common = each, shared
        if extended is not None and len(extended.entries) < common:
            extended = None  # it would split what another conversation has as a whole
        base = extended or closest
        history = sent
        if base is not None:
            known = base.entries[:common]
            if known != sent[:common]:
                known = [entry.as_sent(each) for entry, each in zip(known, sent, strict=False)]
                history = [*known, *sent[common:]]
        for choice in call.choices:
            reply = [
                Entry(message, call, choice if not place else None, replied=True)
                for place, message in enumerate(choice.messages)
            ]
            target = extended
            if target is None:
                target = Conversation(call.conversation)
                self._all.append(target)
            extended = None
            target.entries = [*history, *reply]
            target.last, target.choice = call, choice.index

    def with_reply(self, response_id: str, choice: int) -> Conversation | None:
        """Find the conversation that has a reply; of several, the one that counts most."""
        found = [each for each in self._all if each.has_reply(response_id, choice)]
        return max(found, key=lambda each: each.rank, default=None)

    def before_response(self, response_id: str) -> list[dict[str, Any]] | None:
        """Return the history up to a response, its reply included; ``None`` if unknown."""
        for each in reversed(self._all):
            for place in range(len(each.entries) - 1, -1, -1):
                entry = each.entries[place]
                if entry.choice is not None and entry.call.response_id == response_id:
                    end = place + len(entry.choice.messages)
                    return [entry.message for entry in each.entries[:end]]
        return None

    def best(self, name: str) -> Conversation | None:
        """Return the conversation that counts: of that name, or else of any."""
        named = [each for each in self._all if each.name == name]
        return max(named or self._all, key=lambda each: each.rank, default=None)


def _calls(message: dict[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _key(message: dict[str, Any], *, ids: bool = True) -> list[Any]:
    role = message.get("role")
    said: list[Any] = [role, _said(message.get("content"), strip=role == "assistant")]
    said += [_call_key(call, ids=ids) for call in _calls(message)]
    if message.get("function_call"):
        said.append(_call_key({"function": message["function_call"]}, ids=ids))
    said += [message[name] for name in ("tool_call_id", "name") if message.get(name)]
    if role is None:
        said.append({key: value for key, value in message.items() if key != "status"})
    return said


def _said(content: Any, *, strip: bool) -> Any:
    text = text_of(content)
    if text is None:
        return content or None
    return (text.strip() if strip else text) or None


def _call_key(call: Any, *, ids: bool) -> Any:
    if not isinstance(call, dict):
        return call
    inner = call.get("function") or call.get("custom") or {}
    if not isinstance(inner, dict):
        return call
    given = _meaning(inner.get("arguments", inner.get("input")))
    return [call.get("id") or None if ids else None, inner.get("name"), given]


def _meaning(arguments: Any) -> Any:
    """Return the same for all the ways to write the same arguments."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    # Text that is not JSON, or nests too deeply, is compared as it is.
    with suppress(ValueError, RecursionError):
        value = json.loads(text.strip() or "null", parse_float=_number)
        return json.dumps({} if value is None else value, sort_keys=True)
    return arguments


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number
