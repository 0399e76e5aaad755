"""Reads the calls of a model, with their tokens, out of a trajectory document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from rollout.errors import TrajectoryError
from rollout.trajectory.build import DETAILS, with_details
from rollout.trajectory.checker import trajectory_problems
from rollout.trajectory.steps import COPIED, Steps

__all__ = ["Trajectory", "TrajectoryCall", "read_trajectory"]


@frozen(kw_only=True)
class TrajectoryCall:
    """One reply of the model in a trajectory.

    Attributes:
        number: The place of the call among the requests of the rollout, from 1; ``None`` if the
            calls were not recorded. Choices of one call share it.
        branch: The conversation that the reply is part of: 0 for the rollout's sample, 1 and up
            for those in ``extra_fields["branches"]``, in that order.
        conversation: The name of that conversation, ``None`` if it is not known.
        prompt_token_ids: The tokens of the whole prompt, as the endpoint sent them, or ``None``.
        completion_token_ids: Those of the reply, or ``None``.
        logprobs: The log-probability of each token of the reply, or ``None``.
        policy_version_start: The version of the policy when the call was sent, or ``None``.
        policy_version_end: The version when its answer was over, or ``None``.
        drift_at: The first token of the prompt that differs from the tokens of the turn before;
            ``None`` if it goes on with them, or if it is not known.
        step: The step as ATIF has it: message, tool calls, model, usage and so on.
    """

    number: int | None = None
    branch: int = 0
    conversation: str | None = None
    prompt_token_ids: list[int] | None = field(default=None, repr=False)
    completion_token_ids: list[int] | None = field(default=None, repr=False)
    logprobs: list[float] | None = field(default=None, repr=False)
    policy_version_start: int | None = None
    policy_version_end: int | None = None
    drift_at: int | None = None
    step: dict[str, Any] = field(repr=False)

    @property
    def captured(self) -> bool:
        """Whether all tokens are there, with a log-probability for each token of the reply."""
        said, scores = self.completion_token_ids, self.logprobs
        known = self.prompt_token_ids is not None and said is not None and scores is not None
        return known and len(said or ()) == len(scores or ())


@frozen(kw_only=True)
class Trajectory:
    """The trajectory of a rollout.

    Attributes:
        document: The ATIF document.
        calls: The replies of the model, in the order in which their calls were sent. Those of
            conversations beside the sample are among them if a gateway captured tokens.
    """

    document: dict[str, Any] = field(repr=False)
    calls: tuple[TrajectoryCall, ...]

    @property
    def rollout_id(self) -> str | None:
        """The rollout's id."""
        found = self.document.get("trajectory_id")
        return found if isinstance(found, str) else None

    @property
    def extra(self) -> dict[str, Any]:
        """Status, reward, label, metrics and more; see the page on trajectories."""
        return _object(self.document.get("extra"))


def read_trajectory(document: Any) -> Trajectory:
    """Read a parsed trajectory document; it is kept as it is, and must not be changed afterwards.

    Raises:
        TrajectoryError: It breaks a rule of the format.
    """
    problems = trajectory_problems(document)
    if problems:
        raise TrajectoryError(f"this is not a valid trajectory: {problems[0]}", problems)
    fields = _object(_object(document.get("extra")).get("extra_fields"))
    turns = _objects(fields.get("token_drift"))
    drift = {_whole(turn.get("call")): _whole(turn.get("at")) for turn in turns}
    found: dict[Any, TrajectoryCall] = {}
    for branch, (name, steps) in enumerate(_conversations(document, fields)):
        for step in steps:
            if step.get("source") == "agent" and not step.get(COPIED):
                call = _call(step, branch, name, drift)
                # Branches may have a beginning in common.
                choice = _whole(_object(step.get("extra")).get("choice"))
                key = (call.number, choice) if call.number is not None else (branch, id(step))
                found.setdefault(key, call)
    numbered = [call for call in found.values() if call.number is not None]
    calls = sorted(numbered, key=lambda call: call.number or 0) or found.values()
    return Trajectory(document=document, calls=tuple(calls))


def _conversations(
    document: dict[str, Any], fields: dict[str, Any]
) -> Iterator[tuple[str | None, list[dict[str, Any]]]]:
    """Yield name and steps of the sample, then of each branch."""
    yield None, document["steps"]
    for branch in _objects(fields.get("branches")):
        messages, details = _objects(branch.get("messages")), _objects(branch.get(DETAILS))
        steps = Steps()
        if len(messages) == len(details):
            for message in with_details(messages, details):
                steps.add(message)
        yield _text(branch.get("conversation")), steps.finish()


def _call(
    step: dict[str, Any], branch: int, name: str | None, drift: Mapping[int | None, int | None]
) -> TrajectoryCall:
    extra, metrics = _object(step.get("extra")), _object(step.get("metrics"))
    number = _whole(extra.get("call"))
    return TrajectoryCall(
        number=number,
        branch=branch,
        conversation=name,
        prompt_token_ids=metrics.get("prompt_token_ids"),
        completion_token_ids=metrics.get("completion_token_ids"),
        logprobs=metrics.get("logprobs"),
        policy_version_start=_whole(extra.get("policy_version_start")),
        policy_version_end=_whole(extra.get("policy_version_end")),
        drift_at=None if number is None else drift.get(number),
        step=step,
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
