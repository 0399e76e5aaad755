"""What the faults of a simulation are, in a few words each."""

from __future__ import annotations

__all__ = ["FAULTS", "listed"]

FAULTS = {
    "refused": "the connection is refused",
    "lost-before": "lost before the server sees the request",
    "lost-during": "lost while the server works on the request",
    "lost-after": "lost after the server has answered",
    "silence": "the answer never arrives; the read times out",
    "gateway": "a gateway answers 502, 503 or 504",
    "busy": "a gateway answers an admission with 429",
    "truncated": "the body of the answer is cut short",
    "foreign": "the answer is about another rollout",
    "late": "the answer is held back, for up to 35 s",
    "stale": "a cache repeats an old answer",
    "trickle": "the answer comes bit by bit, for up to 350 s",
    "paused": "all processes stand still for a while",
    "server-crashed": "the server is killed, and started again",
}
"""Each kind that a summary counts."""


def listed() -> str:
    """Return the faults in two columns, as a paragraph that click leaves as it is."""
    width = max(map(len, FAULTS))
    return "\n".join(["\b", "Faults:", *(f"  {name:<{width}}  {FAULTS[name]}" for name in FAULTS)])
