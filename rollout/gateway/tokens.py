"""Token ids and log-probabilities: asked for at the endpoint, and kept from the agent. Pure.

vLLM and SGLang send token ids for ``return_token_ids``, llama.cpp within the log-probabilities,
which all of them send for ``logprobs``. Endpoints that know none of it ignore it. What comes is
recorded as it comes; an agent that has not asked for it does not see it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attrs import define, field

from rollout.codec import dump_json
from rollout.integrations.recording.calls import dicts, load
from rollout.integrations.recording.streams import Events, event_data

__all__ = ["ASKED", "Capture"]

ASKED: dict[str, dict[str, Any]] = {
    "chat": {"logprobs": True, "top_logprobs": 1, "return_token_ids": True},
    "completions": {"logprobs": 1, "return_token_ids": True},
}
"""What is asked for, by `Call.api`; other APIs have no way to."""

_IDS = ("prompt_token_ids", "token_ids", "response_token_ids")


@define
class Capture:
    """The capture of one call.

    Attributes:
        body: The body of the request, with what is asked for added.
    """

    body: dict[str, Any]
    _hide_logprobs: bool
    _hide_ids: bool
    _events: Events = field(factory=Events)

    @classmethod
    def of(cls, body: dict[str, Any], api: str | None) -> Capture | None:
        """Return the capture for a request; ``None`` if its API has none.

        What the agent asks for itself stays as it is.
        """
        asked = ASKED.get(api or "")
        if asked is None:
            return None
        own_logprobs = body.get("logprobs") not in (None, False)
        own_ids = body.get("return_token_ids") is True
        added = {
            name: value
            for name, value in asked.items()
            if not (own_logprobs and name.endswith("logprobs"))
        }
        return cls({**body, **added}, not own_logprobs, not own_ids)

    def stripped(self, data: bytes) -> bytes:
        """Return a whole answer without what the agent has not asked for."""
        body = load(data)
        return dump_json(body) if self._strip(body) else data

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Add a part of a stream; yield the events for the agent that are complete with it."""
        for event in self._events.feed(chunk):
            yield self._stripped_event(event)

    def rest(self) -> bytes:
        """Return what is left at the end of a stream."""
        return self._events.rest()

    def _stripped_event(self, event: bytes) -> bytes:
        if b"logprobs" not in event and b"token_ids" not in event:
            return event
        body = load(event_data(event))
        if not self._strip(body):
            return event
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"

    def _strip(self, body: Any) -> bool:
        """Take out of a parsed answer what the agent has not asked for; return whether it could."""
        if not isinstance(body, dict):
            return False
        for part in (body, *dicts(body.get("choices"))):
            if self._hide_ids:
                for name in _IDS:
                    part.pop(name, None)
            if self._hide_logprobs and part.get("logprobs") is not None:
                part["logprobs"] = None
        return True
