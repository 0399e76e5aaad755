"""Token ids and log-probabilities: asked for at the endpoint, and kept from the agent. Pure.

vLLM and SGLang send token ids for ``return_token_ids``, llama.cpp within the log-probabilities,
which all of them send for ``logprobs``. Endpoints that know none of it ignore it. What comes is
recorded as it comes; an agent that has not asked for it does not see it.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import define

from rollout.codec import dump_json
from rollout.integrations.recording.calls import dicts

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

    def stripped(self, data: bytes, body: Any) -> bytes:
        """Return a whole answer, *body* parsed, without what the agent has not asked for."""
        if not isinstance(body, dict):
            return data
        self._strip(body)
        return dump_json(body)

    def stripped_event(self, event: bytes, body: dict[str, Any]) -> bytes:
        """Return an event of a stream, its data parsed, without what was not asked for."""
        if b"logprobs" not in event and b"token_ids" not in event:
            return event
        self._strip(body)
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"

    def _strip(self, body: dict[str, Any]) -> None:
        """Take out of a parsed answer what the agent has not asked for.

        The recorder has the lists in it, so these are left as they are.
        """
        for part in (body, *dicts(body.get("choices"))):
            if self._hide_ids:
                for name in _IDS:
                    part.pop(name, None)
            if self._hide_logprobs and part.get("logprobs") is not None:
                part["logprobs"] = None
