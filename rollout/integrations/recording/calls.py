"""Calls of a model and their answers, read off the wire; `streams` puts streamed answers together.

Pure, and tolerant: an endpoint is somebody else's program. An unreadable answer becomes an `Answer`
with an error; reading never raises, since the user's own call may cope with the answer.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from attrs import define, field

from rollout._json.fit import fit
from rollout.integrations.recording.anthropic import reply_of
from rollout.integrations.recording.responses import items_as_messages
from rollout.trajectory.totals import whole_numbers

__all__ = [
    "Answer",
    "Call",
    "Choice",
    "Outcome",
    "dicts",
    "error_message",
    "ids_in_logprobs",
    "load",
    "parse",
    "read_body",
    "read_head",
    "read_message",
    "read_response",
    "read_token_ids",
    "reply_message",
    "text",
]

_LONGEST_MESSAGE = 500
_ERROR_KEYS = ("error", "message", "detail", "msg")
_EMPTY_IN_REPLY = ("refusal", "annotations", "audio", "function_call", "tool_calls")


_READERS: list[Callable[[bytes | str], Any]] = [json.loads]
"""What reads JSON. The first refuses a little of what the last one takes."""
with suppress(ModuleNotFoundError):  # the OpenAI SDK brings it
    _jiter: Any = importlib.import_module("jiter")
    _READERS.insert(
        0, lambda data: _jiter.from_json(data if isinstance(data, bytes) else data.encode())
    )


@define(kw_only=True)
class Choice:
    """One reply of the model.

    Attributes:
        index: Its place among the choices of its call.
        messages: The reply in chat form. More than one only where items of the
            Responses API form no single message.
        finish_reason: Why it ended; ``None`` if that was never said.
        token_ids: Those of the reply, if the endpoint sends them.
        logprobs: As the endpoint sent them. They are many, so they are fitted into JSON when they
            are written, not when they are read.
    """

    index: int = 0
    messages: list[dict[str, Any]] = field(factory=list)
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None


@define(kw_only=True)
class Answer:
    """The answer of an endpoint to one call.

    Attributes:
        response_id: The answer's own id.
        model: The model that answered.
        usage: Tokens, as the endpoint counted them.
        prompt_token_ids: Those of the prompt, if the endpoint tells them.
        choices: The replies, in the order of their index.
        error: Why it is unusable, ``None`` for a usable answer.
        complete: Whether it came to its end.
    """

    response_id: str | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    choices: list[Choice] = field(factory=list)
    error: str | None = None
    complete: bool = True


Outcome = str
"""``running``, ``complete``, ``interrupted`` or ``failed``."""


@define(eq=False, kw_only=True)
class Call:
    """One request to the endpoint of the policy, and its answer.

    A call that the SDK tries again is several of these.

    Attributes:
        number: Its place among the requests of the rollout, from 1, in the order of sending.
        conversation: The name of the conversations that it belongs to.
        api: ``chat``, ``responses``, ``completions``, or ``messages`` for Anthropic's.
        model: The model that answered, before that the one that was asked for.
        tools: The tools that were offered.
        streamed: Whether the answer was asked for as a stream.
        retry: How many times it had been tried before.
        started_at: When it was sent (wall clock, UTC).
        outcome: How it ended: ``running`` before that, ``complete``, ``interrupted`` if its
            caller was cancelled or closed the stream early, ``failed``.
        status_code: The HTTP status of the answer.
        error: Why it failed.
        latency_sec: From sending it to the end of the answer, in seconds.
        request_id: The endpoint's id of the request.
        response_id: The endpoint's id of the answer.
        usage: Tokens, as the endpoint counted them.
        prompt_token_ids: Those of the prompt, if the endpoint tells them.
        choices: The replies.
        policy_versions: The versions of the policy when it was sent and when its answer was over,
            where a gateway knows them.
    """

    number: int
    conversation: str
    api: str
    model: str | None = None
    tools: list[Any] = field(factory=list, repr=False)
    streamed: bool = False
    retry: int = 0
    started_at: datetime
    outcome: Outcome = "running"
    status_code: int | None = None
    error: str | None = None
    latency_sec: float | None = None
    request_id: str | None = None
    response_id: str | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = field(default=None, repr=False)
    choices: list[Choice] = field(factory=list, repr=False)
    policy_versions: tuple[int, int] | None = None

    @property
    def complete(self) -> bool:
        """Whether it was answered in whole."""
        return self.outcome == "complete"

    def take(self, answer: Answer) -> None:
        """Copy the fields of an answer."""
        self.response_id = answer.response_id
        self.model = answer.model or self.model
        self.usage = answer.usage
        self.prompt_token_ids = answer.prompt_token_ids
        self.choices = answer.choices

    def details(self, choice: Choice | None) -> dict[str, Any]:
        """Return the time of a message and, for a reply, the facts about its call.

        Args:
            choice: The reply; ``None`` for a message that was sent.
        """
        if choice is None:
            return {"timestamp": _written(self.started_at)}
        answered_at = self.started_at + timedelta(seconds=self.latency_sec or 0.0)
        known = {
            "call": self.number,
            "choice": choice.index or None,
            "model": self.model,
            "usage": self.usage,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": choice.token_ids,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "request_id": self.request_id,
            "response_id": self.response_id,
            "latency_sec": self.latency_sec,
        }
        if self.policy_versions is not None:
            known["policy_version_start"], known["policy_version_end"] = self.policy_versions
        if not self.complete:
            known["interrupted"] = True
        told = {name: value for name, value in known.items() if value is not None}
        return {"timestamp": _written(answered_at), **told}

    def enriched(self, message: dict[str, Any], choice: Choice | None) -> dict[str, Any]:
        """Return a message with its `details`, as trajectories keep it."""
        return message | self.details(choice)

    def problem(self) -> dict[str, Any]:
        """Return the facts about a call that did not end well."""
        told = {
            "call": self.number,
            "outcome": self.outcome,
            "status_code": self.status_code,
            "error": self.error,
            "request_id": self.request_id,
            "retry": self.retry or None,
        }
        return {name: value for name, value in told.items() if value is not None}


def _written(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def parse(data: bytes | str) -> Any:
    """Parse JSON into plain, finite values; ``None`` if it is invalid."""
    return fit(load(data))[0]


def load(data: bytes | str) -> Any:
    """Parse JSON as Python does, much faster than `parse`; ``None`` if it is invalid."""
    for read in _READERS:
        with suppress(ValueError, RecursionError):
            return read(data)
    return None


def error_message(body: Any, *, depth: int = 4) -> str | None:
    """Return the message in the body of an error, in the forms that endpoints use."""
    if isinstance(body, str):
        return body[:_LONGEST_MESSAGE] or None
    within: list[Any] = []
    if isinstance(body, dict):
        within = [body.get(key) for key in _ERROR_KEYS]
    elif isinstance(body, list):
        within = body[:1]
    said = (error_message(each, depth=depth - 1) for each in within if depth)
    return next((each for each in said if each is not None), None)


def read_body(body: Any, api: str) -> Answer:
    """Read the body of a successful answer.

    Args:
        body: The body, parsed.
        api: See `Call.api`.
    """
    if not isinstance(body, dict):
        return Answer(error="the answer is not a JSON object")
    answer = _READ.get(api, _read_completion)(body)
    if not answer.choices and answer.error is None and answer.complete:
        answer.error = error_message(body.get("error")) or "the answer has no choices"
    return answer


def read_head(body: dict[str, Any]) -> Answer:
    """Read the fields of an answer that both APIs have."""
    usage = fit(body.get("usage"))[0]
    return Answer(
        response_id=text(body.get("id")),
        model=text(body.get("model")),
        usage=usage if isinstance(usage, dict) and usage else None,
        prompt_token_ids=whole_numbers(body.get("prompt_token_ids")),
    )


def _read_completion(body: dict[str, Any]) -> Answer:
    answer = read_head(body)
    for place, raw in enumerate(dicts(body.get("choices"))):
        message = raw.get("message")
        if isinstance(raw.get("text"), str):  # that of a completion
            message = {"content": raw["text"]}
        if isinstance(message, dict):
            index = raw.get("index")
            answer.choices.append(
                Choice(
                    index=index if type(index) is int else place,
                    messages=[reply_message(message)],
                    finish_reason=text(raw.get("finish_reason")),
                    token_ids=read_token_ids(raw) or ids_in_logprobs(raw.get("logprobs")),
                    logprobs=raw.get("logprobs"),
                )
            )
            if answer.prompt_token_ids is None:
                answer.prompt_token_ids = whole_numbers(raw.get("prompt_token_ids"))
    answer.choices.sort(key=lambda choice: choice.index)
    return answer


def read_token_ids(choice: dict[str, Any]) -> list[int] | None:
    """Return the token ids of a choice, under any of the names that endpoints have for them."""
    return whole_numbers(choice.get("token_ids")) or whole_numbers(choice.get("response_token_ids"))


def ids_in_logprobs(logprobs: Any) -> list[int] | None:
    """Return the token ids in log-probabilities, where an endpoint has them there."""
    tokens = dicts(logprobs.get("content")) if isinstance(logprobs, dict) else []
    return whole_numbers([token.get("id") for token in tokens])


def reply_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a reply without empty fields, and without values that JSON cannot say."""
    reply = {"role": "assistant", **fit(message)[0]}
    for key in _EMPTY_IN_REPLY:
        if key in reply and not reply[key]:
            del reply[key]
    return {key: value for key, value in reply.items() if value is not None or key == "content"}


def read_response(body: dict[str, Any]) -> Answer:
    """Read a response of the Responses API."""
    answer = read_head(body)
    status = body.get("status")
    if status in ("failed", "cancelled"):
        answer.error = error_message(body.get("error")) or f"the response is {status}"
        return answer
    items = dicts(body.get("output"))
    reason = status
    if status == "incomplete" and isinstance(body.get("incomplete_details"), dict):
        reason = body["incomplete_details"].get("reason") or status
    elif status in ("queued", "in_progress"):
        answer.complete = False
    if items:
        answer.choices.append(
            Choice(
                messages=fit(items_as_messages(items))[0],
                finish_reason=text(reason),
                logprobs=_response_logprobs(items),
            )
        )
    return answer


def read_message(body: dict[str, Any]) -> Answer:
    """Read a message of Anthropic's API."""
    answer = read_head(body)
    if body.get("type") == "error":
        answer.error = error_message(body.get("error")) or "the answer is an error"
    elif dicts(body.get("content")):
        reply = reply_message(reply_of(body["content"]))
        answer.choices = [Choice(messages=[reply], finish_reason=text(body.get("stop_reason")))]
    return answer


_READ = {"responses": read_response, "messages": read_message}


def _response_logprobs(items: list[dict[str, Any]]) -> Any:
    tokens = [
        token
        for item in items
        for part in dicts(item.get("content"))
        for token in dicts(part.get("logprobs"))
    ]
    return {"content": tokens} if tokens else None


def text(value: Any) -> str | None:
    """Return a text that is not empty; ``None`` for anything else."""
    return value if isinstance(value, str) and value else None


def dicts(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; empty for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
