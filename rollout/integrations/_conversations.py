"""Which calls of a model continue which conversation. Pure.

Theory of operation: a chat endpoint has no memory, so an agent sends the whole history with each
call. A call whose messages begin with a recorded conversation, its last reply included, goes on
with it: the new messages and the reply are added at its end. Any other call begins a branch,
which shares with the recorded conversations what it has in common with the closest of them.

Messages are compared by what they say: role, text, calls, ids. Agents drop and reformat the rest
when they send a reply back; what is recorded is the reply as the model gave it. But for one thing:
some endpoints give calls of tools no ids, and agents make them up. Those are taken over, since the
results of the tools name them.

An agent's answer comes last, so the conversation of the last call is the one that counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from attrs import define, evolve, field, frozen

from rollout.integrations._model_answers import Choice
from rollout.integrations._model_calls import Call
from rollout.trajectory.steps import COPIED

__all__ = ["Conversation", "Conversations", "Entry"]


@frozen
class Entry:
    """A message of a conversation.

    Attributes:
        message: It, in chat form.
        key: What it says, for comparisons.
        call: The call that brought it; a reply if `choice` is there, else a message that was
            first sent with it.
        choice: The reply that it is, or the first message of.
        bare_key: The key without the ids of its calls.
        replied: Whether the model said it.
    """

    message: dict[str, Any]
    key: str
    call: Call
    choice: Choice | None = None
    bare_key: str = ""
    replied: bool = False

    @classmethod
    def of(
        cls,
        message: dict[str, Any],
        call: Call,
        choice: Choice | None = None,
        *,
        replied: bool = False,
    ) -> Entry:
        """Return a message as part of a conversation."""
        key = _key(message)
        bare = _key(message, ids=False) if _calls(message) else key
        return cls(message, key, call, choice, bare, replied)

    def enriched(self) -> dict[str, Any]:
        """Return the message with what trajectories keep of it."""
        whole = self.call.enriched(self.message, self.choice)
        if not self.replied and self.message.get("role") == "assistant":
            whole[COPIED] = True
        return whole

    def says(self, sent: Entry) -> bool:
        """Whether it is what was sent, but for ids that it may lack."""
        return self.key in (sent.key, sent.bare_key)

    def with_ids(self, sent: Entry) -> Entry:
        """Return it with the ids of what was sent."""
        if self.key == sent.key:
            return self
        calls = [
            {**mine, "id": theirs.get("id")} if isinstance(mine, dict) else mine
            for mine, theirs in zip(_calls(self.message), _calls(sent.message), strict=True)
        ]
        return evolve(self, message={**self.message, "tool_calls": calls})


@define(eq=False)
class Conversation:
    """A history of messages.

    Attributes:
        name: Whose it is; conversations of different names have nothing in common.
        entries: The messages.
        last: The call that went on with it last.
        choice: Which choice of that call it goes on with.
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
        """What decides which conversation counts: the highest one does."""
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

    def shared(self, history: Sequence[Entry]) -> int:
        """Return how many messages it has in common with a history, from the beginning on."""
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

    def add(self, call: Call, messages: Sequence[dict[str, Any]]) -> None:
        """Take what was sent with a call that has been answered, in whole or in part."""
        sent = [Entry.of(message, call) for message in messages]
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
            known = [
                entry.with_ids(each)
                for entry, each in zip(base.entries[:common], sent, strict=False)
            ]
            history = [*known, *sent[common:]]
        for choice in call.choices:
            reply = [
                Entry.of(message, call, choice if not place else None, replied=True)
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


def _key(message: dict[str, Any], *, ids: bool = True) -> str:
    role = message.get("role")
    said: list[Any] = [role, _said(message.get("content"), strip=role == "assistant")]
    if isinstance(message.get("tool_calls"), list):
        said.append([_call_key(call, ids=ids) for call in message["tool_calls"]])
    if message.get("function_call"):
        said.append(_call_key({"function": message["function_call"]}, ids=ids))
    said += [message[name] for name in ("tool_call_id", "name") if message.get(name)]
    if role is None:
        said.append({key: value for key, value in message.items() if key != "status"})
    return json.dumps(said, sort_keys=True)


def _said(content: Any, *, strip: bool) -> Any:
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if isinstance(content, str) and strip:
        content = content.strip()
    return content or None


def _call_key(call: Any, *, ids: bool) -> Any:
    if not isinstance(call, dict):
        return call
    inner = call.get("function") or call.get("custom") or {}
    if not isinstance(inner, dict):
        return call
    given: Any = inner.get("arguments", inner.get("input"))
    # Text that is no JSON, or too much of it, is compared as it is.
    with suppress(TypeError, ValueError, RecursionError):
        given = json.dumps(json.loads(given), sort_keys=True)
    return [call.get("id") or None if ids else None, inner.get("name"), given]
