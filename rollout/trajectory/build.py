"""Builds an ATIF document from a list of messages.

Theory of operation: messages come in whatever form an agent uses: chat messages of OpenAI,
items of its Responses, blocks of Anthropic, or something else. First everything is brought to
plain JSON. Then each message adds a step, or a part of one: results of tools go to the agent's
step that has their call, and the items of one response form one step. Fields that ATIF has no
place for stay in the ``extra`` of the step, the call or the result. Last, secrets are blanked out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout._json.fit import fit
from rollout._redaction import Redactor
from rollout._version import package_version
from rollout.codec import MAX_JSON_DEPTH
from rollout.trajectory.steps import Steps
from rollout.trajectory.totals import final_metrics
from rollout.types import RolloutSample

__all__ = ["DETAILS", "SCHEMA_VERSION", "build_trajectory", "with_details"]

DETAILS = "message_details"
"""The extra field of a sample that has an object for each of its messages, with time, model, usage
and so on."""

SCHEMA_VERSION = "ATIF-v1.8"

_MESSAGE_DEPTH = MAX_JSON_DEPTH - 12
"""The depth for messages, some of which end up deeper than they were."""

_SAID = frozenset({"role", "content", "tool_calls"})
"""Fields of a message that its details cannot change."""

_EXTRA_DEPTH = MAX_JSON_DEPTH - 4


def build_trajectory(
    messages: Sequence[Mapping[str, Any]],
    *,
    rollout_id: str,
    prompt: Sequence[Mapping[str, Any]] = (),
    model_name: str | None = None,
    agent_name: str = "rollout",
    sample: RolloutSample | None = None,
    metadata: Mapping[str, Any] | None = None,
    secrets: Sequence[str | None] | None = (),
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make an ATIF document, whatever the messages look like.

    Args:
        messages: The history. If the sample has details of so many messages (see `DETAILS`), each
            is kept with its own.
        rollout_id: The rollout's id, which becomes the document's.
        prompt: The initial messages of the rollout. Those of the assistant among them, at the
            beginning of the history, are marked as copied and not counted in the totals.
        model_name: The model; by default the one that the messages name, if it is always the same.
        agent_name: How the document calls the agent.
        sample: Where label, reward, metrics and extra fields come from.
        metadata: The caller's own data.
        secrets: Texts that must not be in it, see `rollout._redaction.Redactor`. With ``None``,
            secrets and lone surrogates are left to the caller.
        extra: More to keep in the document's ``extra``.

    Returns:
        The document in plain JSON types. Its ``extra`` has ``reward``, ``label``,
        ``remove_sample``, ``metrics`` and ``extra_fields`` of the sample, ``metadata``, and
        under ``dropped`` a line for each value without a JSON form.
    """
    own = {} if sample is None else dict(sample.extra_fields)
    if _fits(messages, own.get(DETAILS)):
        messages = with_details(messages, own.pop(DETAILS))
    plain, dropped = fit(list(messages), max_depth=_MESSAGE_DEPTH)
    dropped = [f"messages{line}" for line in dropped]
    steps = Steps()
    copied = True
    for place, message in enumerate(plain):
        copied = copied and place < len(prompt) and message == prompt[place]
        steps.add(message, copied=copied)
    finished = steps.finish()
    rest = _extra(sample, own, metadata, extra, dropped)
    agent: dict[str, Any] = {"name": agent_name or "rollout", "version": package_version()}
    if model_name is None:
        models = {step["model_name"] for step in finished if "model_name" in step}
        model_name = models.pop() if len(models) == 1 else None
    if model_name is not None:
        agent["model_name"] = model_name
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "session_id": rollout_id,
        "trajectory_id": rollout_id,
        "agent": agent,
        "steps": finished,
        "final_metrics": final_metrics(finished),
    }
    if rest:
        document["extra"] = rest
    if secrets is None:
        return document
    clean: dict[str, Any] = Redactor(secrets).value(document)
    return clean


def _fits(messages: Sequence[Mapping[str, Any]], details: Any) -> bool:
    return (
        isinstance(details, list)
        and len(details) == len(messages)
        and all(isinstance(known, Mapping) for known in details)
    )


def with_details(
    messages: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages, each with its own details."""
    return [
        {**message, **{name: value for name, value in known.items() if name not in _SAID}}
        for message, known in zip(messages, details, strict=True)
    ]


def _extra(
    sample: RolloutSample | None,
    extra_fields: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
    dropped: list[str],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if sample is not None:
        values["reward"] = sample.reward
        values["label"] = sample.label
        if sample.remove_sample:
            values["remove_sample"] = True
        if sample.metrics:
            values["metrics"] = sample.metrics
        if extra_fields:
            values["extra_fields"] = extra_fields
    if metadata is not None:
        values["metadata"] = metadata
    values |= extra or {}
    fitted, more = fit(values, max_depth=_EXTRA_DEPTH)
    dropped += more
    plain: dict[str, Any] = fitted or {}
    if dropped:
        plain["dropped"] = dropped
    return plain
