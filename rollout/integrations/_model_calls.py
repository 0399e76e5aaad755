"""One call of a model, as the recorder keeps it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from attrs import define, field

from rollout.integrations._model_answers import Answer, Choice

__all__ = ["Call", "Outcome"]

Outcome = str
"""``running``, ``complete``, ``interrupted`` or ``failed``."""


@define(eq=False, kw_only=True)
class Call:
    """One request to the endpoint of the policy, and its answer.

    A call that the SDK tries again is several of these.

    Attributes:
        number: Its place among the requests of the rollout, from 1, in the order of sending.
        conversation: The name of the conversations that it belongs to.
        api: ``chat`` or ``responses``.
        model: The model that answered, before that the one that was asked for.
        tools: The tools that were offered.
        streamed: Whether the answer was asked for as a stream.
        retry: How many times it had been tried before.
        started_at: When it was sent (wall clock, UTC).
        outcome: How it ended: ``running`` before that, ``complete``, ``interrupted`` if its
            caller was cancelled or closed the stream early, ``failed``.
        status_code: The HTTP status of the answer.
        error: What went wrong.
        latency_sec: From sending it to the end of the answer, in seconds.
        request_id: The endpoint's id of the request.
        response_id: The endpoint's id of the answer.
        usage: Tokens, as the endpoint counted them.
        prompt_token_ids: Those of the prompt, if the endpoint tells them.
        choices: The replies.
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

    @property
    def complete(self) -> bool:
        """Whether it was answered in whole."""
        return self.outcome == "complete"

    def take(self, answer: Answer) -> None:
        """Take over what an answer says."""
        self.response_id = answer.response_id
        self.model = answer.model or self.model
        self.usage = answer.usage
        self.prompt_token_ids = answer.prompt_token_ids
        self.choices = answer.choices

    def details(self, choice: Choice | None) -> dict[str, Any]:
        """Return what is known of a message beside it: its time, and of a reply its call.

        Args:
            choice: The reply; ``None`` for a message that was sent.
        """
        if choice is None:
            return {"timestamp": _written(self.started_at)}
        answered_at = self.started_at + timedelta(seconds=self.latency_sec or 0.0)
        known = {
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
        if not self.complete:
            known["interrupted"] = True
        told = {name: value for name, value in known.items() if value is not None}
        return {"timestamp": _written(answered_at), **told}

    def enriched(self, message: dict[str, Any], choice: Choice | None) -> dict[str, Any]:
        """Return a message with its `details`, as trajectories keep it."""
        return message | self.details(choice)

    def problem(self) -> dict[str, Any]:
        """Return what is told of a call that did not end well."""
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
