"""The sample of a rollout whose agent belongs to a framework on the asyncio side.

Theory of operation: two records come together. The framework has the history in its own form,
which becomes the sample's messages. The wire has what the framework forgets: each request, which
model answered, what it cost and how long it took. The trajectory is the framework's history in
chat form, and each reply in it is given the call that brought it, found by the ids of its tool
calls, or by its text and by what it was the answer to.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import trio
from attrs import frozen

from rollout._json.fit import fit
from rollout.integrations.recording.calls import Answer, Call, Choice
from rollout.integrations.recording.recorder import (
    ConversationRecorder,
    current_rollout,
    recorder_of,
)
from rollout.types import RolloutSample

__all__ = ["FrameworkSource", "framework_source"]

_MOST_OTHERS = 50
_SYSTEM = ("system", "developer")


def framework_source(*, record: bool) -> FrameworkSource | None:
    """Return the sample source of the rollout that runs here, ``None`` if *record* is false.

    Raises:
        IntegrationError: No rollout is running here.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    return recorder_of(current_rollout(), FrameworkSource) if record else None


@frozen
class _History:
    """The history of one run as a framework keeps it, in its own form and in chat form."""

    messages: list[dict[str, Any]]
    chat: list[dict[str, Any]]


_Place = tuple[int, str]
"""The place of a reply in a history: the number of messages before it, and the last one's text."""


class FrameworkSource(ConversationRecorder):
    """Records the calls of a framework, and keeps its histories.

    Both sides of the bridge use it, so each step holds a lock for its short time.
    """

    def __init__(
        self, *, secrets: tuple[str | None, ...] = (), info: dict[str, Any] | None = None
    ) -> None:
        super().__init__(secrets=secrets, info=info)
        self._lock = threading.Lock()
        self._histories: list[_History] = []
        self._heads: dict[int, dict[str, Any] | None] = {}
        self._head: dict[str, Any] | None = None
        self._asked: dict[int, _Place] = {}

    def start(
        self, body: dict[str, Any], *, api: str, conversation: str, at: datetime, retry: int = 0
    ) -> Call:
        """Record a request that is about to be sent, see `ConversationRecorder.start`."""
        with self._lock:
            call = super().start(body, api=api, conversation=conversation, at=at, retry=retry)
            head = _system_message(body)
            if head != self._head:
                self._head = fit(head)[0]
            self._heads[call.number] = self._head  # the same object, again and again
        return call

    def finish(self, call: Call, answer: Answer, latency_sec: float) -> None:
        """Record the answer of a call, see `ConversationRecorder.finish`."""
        with self._lock:
            if call.number in self._sent:
                self._asked[call.number] = _end_of(
                    [entry.message for entry in self._sent[call.number]]
                )
            super().finish(call, answer, latency_sec)

    def take_history(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat: Sequence[Mapping[str, Any]],
        *,
        from_chat: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> None:
        """Keep the history of a run.

        It replaces those that it goes on with. The last one is the sample.

        Args:
            messages: In the framework's form, JSON values.
            chat: The same in chat form.
            from_chat: Turns chat messages into the framework's form. If given, a last reply that
                the framework has not kept, since it could not make sense of it, is added.
        """
        taken = _History(
            [dict(each) for each in fit(list(messages))[0]],
            [dict(each) for each in fit(list(chat))[0]],
        )
        with self._lock:
            reply = self._not_kept(taken.chat) if from_chat is not None else None
            if from_chat is not None and reply is not None:
                taken.messages.extend(from_chat([reply]))
                taken.chat.append(reply)
            self._histories = [
                each
                for each in self._histories
                if each.messages != taken.messages[: len(each.messages)]
            ]
            self._histories.append(taken)

    async def get_sample(self) -> RolloutSample:
        """Return the sample as it stands.

        Where no run has delivered a history, it is the conversation as it went over the wire.
        """
        if not self._histories:
            return await super().get_sample()
        await trio.lowlevel.checkpoint()
        with self._lock:
            *others, last = self._histories
            chat, found = self._with_calls(last.chat)
            used = {call.number for call, _ in found}
            extra: dict[str, Any] = {}
            if found:
                extra["reply_details"] = [call.details(choice) for call, choice in found]
            if others:
                extra["other_runs"] = [each.messages for each in others[-_MOST_OTHERS:]]
            aside = [call for call in self.calls if call.complete and call.number not in used]
            if aside:
                extra["other_calls"] = [_aside(call) for call in aside[-_MOST_OTHERS:]]
            offered = [call.tools for call in self.calls if call.number in used and call.tools]
            extra |= self._notes_on_calls(offered[-1] if offered else [])
            return RolloutSample(
                messages=copy.deepcopy(last.messages),
                trajectory_messages=copy.deepcopy(chat),
                metrics=self.metrics(),
                extra_fields=copy.deepcopy(extra | self.extra_fields),
            )

    def _not_kept(self, chat: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the reply of the last call if it answers a history that does not hold it."""
        last = next((each for each in reversed(self.calls) if each.complete and each.choices), None)
        if last is None or self._asked[last.number] != _end_of(chat):
            return None
        return last.choices[0].messages[0]

    def _with_calls(
        self, chat: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[tuple[Call, Choice]]]:
        """Return a history with the details of the calls in it, and these calls."""
        open_calls = [call for call in self.calls if call.choices]
        history: list[dict[str, Any]] = []
        used: list[tuple[Call, Choice]] = []
        unstamped = 0
        place: _Place = (0, "")
        for message in chat:
            found = None
            if message.get("role") == "assistant":
                found = self._find(message, open_calls, place)
            if message.get("role") not in _SYSTEM:
                place = (place[0] + 1, _text(message))
            if found is None:
                history.append(message)
                continue
            call, choice = found
            open_calls.remove(call)
            used.append(found)
            # New messages of the request were sent with it.
            history[unstamped:] = [
                each
                if "timestamp" in each or each.get("role") == "assistant"
                else call.enriched(each, None)
                for each in history[unstamped:]
            ]
            wire = {key: value for key, value in choice.messages[0].items() if value is not None}
            whole = {**wire, **message}
            if len(_calls(message)) < len(_calls(wire)):  # of those, one has ended the run
                whole["tool_calls"] = wire["tool_calls"]
            history.append(call.enriched(whole, choice))
            unstamped = len(history)
            head = self._heads.get(call.number)
            if len(used) == 1 and head is not None and history[0].get("role") not in _SYSTEM:
                history.insert(0, call.enriched(head, None))
                unstamped += 1
        return history, used

    def _find(
        self, message: dict[str, Any], calls: list[Call], place: _Place
    ) -> tuple[Call, Choice] | None:
        """Find the call that brought a message: the same question's, or else the first alike."""
        alike = [
            (call, choice)
            for call in calls
            if message.get("response_id") in (None, call.response_id)
            for choice in call.choices
            if choice.messages
            and ("response_id" in message or _is_same(message, choice.messages[0]))
        ]
        # Of several runs that went the same way, the last one is the sample.
        fits = [each for each in alike if self._asked.get(each[0].number) == place]
        return fits[-1] if fits else next(iter(alike), None)


def _end_of(messages: Sequence[dict[str, Any]]) -> _Place:
    """Return the place after messages, without those of the system, which frameworks drop."""
    counted = [each for each in messages if each.get("role") not in _SYSTEM]
    return len(counted), _text(counted[-1]) if counted else ""


def _system_message(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the system message that a request begins with."""
    messages = body.get("messages")
    head = messages[0] if isinstance(messages, list) and messages else None
    return head if isinstance(head, dict) and head.get("role") in _SYSTEM else None


def _aside(call: Call) -> dict[str, Any]:
    replies = [message for choice in call.choices for message in choice.messages]
    return {"call": call.number, "model": call.model, "usage": call.usage, "replies": replies}


def _is_same(message: Mapping[str, Any], reply: Mapping[str, Any]) -> bool:
    """Whether a framework's message is a reply off the wire."""
    ours, theirs = _ids(message), _ids(reply)
    if ours and theirs:
        return set(ours) <= set(theirs)
    # Where the endpoint gives calls no ids, frameworks make them up.
    return _text(message) == _text(reply) and _called(message) == _called(reply)


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [each for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []


def _ids(message: Mapping[str, Any]) -> list[Any]:
    ids = [each.get("id") for each in _calls(message)]
    return ids if all(ids) else []


def _called(message: Mapping[str, Any]) -> list[Any]:
    functions = [each.get("function") for each in _calls(message)]
    return [each.get("name") if isinstance(each, dict) else None for each in functions]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return content.strip() if isinstance(content, str) else ""
