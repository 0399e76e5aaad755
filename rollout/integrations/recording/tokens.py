"""What is missing of the tokens of calls, and where prompts do not go on with them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from rollout.integrations.recording.calls import Call
from rollout.integrations.recording.conversations import Conversation
from rollout.trajectory.totals import take_metrics

__all__ = ["missing_tokens", "token_drift"]

_WANTED = ("prompt_token_ids", "completion_token_ids", "logprobs")


def missing_tokens(call: Call) -> list[str]:
    """Return what the endpoint has not sent of a call's tokens, as ATIF names it."""
    found = [take_metrics(dict(call.details(choice))) or {} for choice in call.choices]
    missing = [name for name in _WANTED if not found or any(name not in each for each in found)]
    if not missing and any(
        len(each["logprobs"]) != len(each["completion_token_ids"]) for each in found
    ):
        return ["logprobs"]
    return missing


def token_drift(conversations: Iterable[Conversation]) -> list[dict[str, Any]]:
    """Return the turns whose prompt does not go on with the tokens of the turn before.

    Such a turn cannot be trained as a continuation: the agent, or the template of the chat, has
    changed what was said before.

    Returns:
        For each of them ``call`` and ``after``, the numbers of both calls, and ``at``, the
        index of the first token that differs.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for conversation in conversations:
        replies = [
            (entry.call, entry.choice) for entry in conversation.entries if entry.choice is not None
        ]
        for (before, choice), (call, _) in pairwise(replies):
            prompt, said, now = before.prompt_token_ids, choice.token_ids, call.prompt_token_ids
            if prompt is None or said is None or now is None:
                continue
            so_far = prompt + said
            if now[: len(so_far)] == so_far:
                continue
            pairs = enumerate(zip(so_far, now, strict=False))
            shorter = min(len(so_far), len(now))
            at = next((place for place, (one, other) in pairs if one != other), shorter)
            turn = {"call": call.number, "after": before.number, "at": at}
            found[before.number, call.number] = turn
    return list(found.values())
