"""Finish a trial: read its sample, scrub its files, archive them, and remove its folder.

`settle` is blocking and runs in a thread. Nothing here changes what the agent or the verifier
said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field

from rollout._files.trees import drop_links_out, tame_tree
from rollout._json.fit import plain_number
from rollout._json.text import utf8
from rollout._logs import get_logger
from rollout._redaction import Redactor
from rollout.artifacts import ARTIFACTS, ArtifactStore
from rollout.backend.failures import describe_exception
from rollout.backend.harbor.agents.native import NativeAgent
from rollout.backend.harbor.agents.spec import AgentSpec
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.opensandbox import leftover_note
from rollout.backend.harbor.plan import TrialPlan
from rollout.backend.harbor.result.evidence import write_manifest
from rollout.backend.harbor.result.facts import USAGE, TrialFacts
from rollout.backend.harbor.result.outcomes import lacks_reward
from rollout.backend.harbor.result.scrub import ScrubReport, scrub_folder
from rollout.backend.harbor.result.trajectories import Adoption, adopt_trajectory
from rollout.backend.harbor.settings import HarborSettings
from rollout.backend.harbor.workspaces import remove_workspace
from rollout.types import RolloutSample

__all__ = ["Settled", "agent_sample", "archive_trial", "settle"]

logger = get_logger(__name__)

_CANCELLED = "CancelledError"
_HARBOR = "harbor"
_MOST_LINES = 20


@define
class Settled:
    """What is kept of a finished trial.

    Attributes:
        sample: What the agent made, if anything, without a reward.
        diagnostics: What went on, for the rollout's ``diagnostics.json``.
        document: The one trajectory document that was adopted.
        facts: What Harbor said of the trial.
        missing: Why there is no sample; ``None`` if there is one.
        step: What is being done with what it left.
    """

    sample: RolloutSample | None = None
    diagnostics: dict[str, Any] = field(factory=dict)
    document: dict[str, Any] | None = field(default=None, repr=False)
    facts: TrialFacts | None = None
    missing: str | None = None
    step: str = "reading its sample"

    def note(self, name: str, value: Any) -> None:
        """Add to the notes on the trial, which another thread may read at any time."""
        self.diagnostics = {"harbor": {**self.diagnostics.get("harbor", {}), name: value}}


def settle(
    settled: Settled,
    plan: TrialPlan,
    facts: TrialFacts,
    settings: HarborSettings,
    watch: EnvironmentWatch,
    *,
    keep_failed: bool,
    recorded: RolloutSample | None = None,
    graded: RolloutSample | None = None,
    error: BaseException | None = None,
) -> None:
    """Finish a trial in its workspace: sample, scrubbing, archive, removal.

    What is not known to be free of the rollout's key is neither archived nor kept. A trial
    that was cancelled has not failed.

    Args:
        settled: What there is so far goes there, whatever comes after it.
        plan: The trial's plan.
        facts: What Harbor said of the trial.
        settings: The backend's: who made the sample, and where artifacts and logs go.
        watch: The trial's environment, and how its stop went.
        keep_failed: Whether the folder of a failed trial stays.
        recorded: What a model gateway has recorded, if the rollout had one.
        graded: The sample as a user's grader left it; ``None`` if none graded.
        error: What the trial raised, rather than recorded.
    """
    redactor = Redactor(plan.secrets)
    notes: dict[str, Any] = _facts(plan, facts)
    if watch.note is not None:
        notes["stop"] = watch.note
    if watch.has_no_sandbox and settings.environment.is_opensandbox:
        errors = [error, *(each.exception or each.type for each in facts.errors)]
        leftover = leftover_note(plan.name, settings.environment.domain(), errors)
        notes |= {} if leftover is None else {"leftover": leftover}
    settled.diagnostics = {"harbor": redactor.value(notes)}
    there = plan.trial_dir.is_dir() and not plan.trial_dir.is_symlink()
    removed = _tamed(plan.trial_dir) if there else None
    adoption = _take_sample(settled, plan, settings.agent, redactor, recorded)
    clean = False
    deleted: list[str] = []
    if there:
        settled.step = "searching it for the key"
        # Nobody else may be at work on what is searched.
        busy = watch.may_write and facts.agent is not None
        report = _scrubbed(plan, removed, busy=busy)
        settled.note("scrubbed", redactor.value(report.to_dict()))
        clean = report.verified
        deleted = report.deleted
        if not clean:
            logger.warning(
                "rollout %s: nothing of its trial is kept, since it may hold the key: %s",
                plan.request.id,
                report.reason,
            )
    undecided = adoption is not None and adoption.undecided
    keep = clean and (
        (keep_failed and _failed(plan, facts, error, graded or settled.sample)) or undecided
    )
    if clean:
        settled.document = None if adoption is None else adoption.document
        settled.step = "archiving it"
        lost = [redactor.text(line) for line in deleted]
        archived = archive_trial(plan, settings.store, keep=keep, lost=lost)
        settled.note("archive", redactor.value(archived))
    if keep:
        settled.note("kept_in", redactor.text(str(plan.trial_dir)))
        logger.info(
            "rollout %s: the folder of its trial stays: %s", plan.request.id, plan.trial_dir
        )
    kept = plan.trial_dir if keep else None
    if not remove_workspace(plan.request.id, plan.workspace, keep=kept):
        settled.note("not_removed", redactor.text(str(plan.workspace)))


def _take_sample(
    settled: Settled,
    plan: TrialPlan,
    agent: AgentSpec,
    redactor: Redactor,
    recorded: RolloutSample | None,
) -> Adoption | None:
    """Read the sample; without one it is what was recorded, or what Harbor's agent wrote down."""
    try:
        # As it is: only what stays here has to be free of the key.
        settled.sample = agent.sample(plan)
    except Exception as error:  # noqa: BLE001 - what came out of a sandbox may be anything
        settled.sample = None
        text = redactor.text(describe_exception(error, plan.secrets))
        settled.note("sample", text)
        settled.missing = text
        logger.warning("rollout %s: its agent's result is not a sample: %s", plan.request.id, text)
    if settled.sample is None and recorded is not None:
        settled.sample = recorded
        settled.note("trajectory", "recorded by the model gateway")
    if settled.sample is not None:
        return None
    adoption = adopt_trajectory(plan)
    settled.note("trajectory", adoption.note)
    if adoption.messages or _needs_no_conversation(agent):
        settled.sample = _conversation(plan, adoption)
    settled.missing = settled.missing or f"{agent.name} left no conversation: {adoption.note}"
    return adoption


def _facts(plan: TrialPlan, facts: TrialFacts) -> dict[str, Any]:
    channels = {str(name): plain_number(value) for name, value in (facts.rewards or {}).items()}
    return {
        "trial": plan.name,
        "task": plan.task.name,
        "agent": None
        if facts.agent is None
        else {"name": facts.agent[0], "version": facts.agent[1]},
        "timings": {name: round(seconds, 6) for name, seconds in facts.timings.items()},
        "errors": [{"type": each.type, "in_verifier": each.in_verifier} for each in facts.errors],
        "rewards": channels,
        "usage": {name: facts.usage.get(name) for name in USAGE},
    }


def _failed(
    plan: TrialPlan,
    facts: TrialFacts,
    error: BaseException | None,
    sample: RolloutSample | None,
) -> bool:
    """Whether a trial failed, so that its folder is worth keeping."""
    if any(each.type == _CANCELLED for each in facts.errors):
        return False
    if error is not None or facts.errors:
        return True
    return plan.request.grade and (sample is None or lacks_reward(facts.rewards, sample))


def _tamed(folder: Path) -> list[str] | None:
    """Make a trial's folder readable; return what was removed, ``None`` if that fails."""
    removed: list[str] = []
    try:
        tame = tame_tree(folder, lambda path, why: removed.append(f"{path}: {why}"))
    except OSError:
        return None
    return removed if tame else None


def _scrubbed(plan: TrialPlan, removed: list[str] | None, *, busy: bool) -> ScrubReport:
    if busy:
        return ScrubReport(reason="its environment may still write there")
    if removed is None:
        return ScrubReport(reason="something in it cannot be read or removed")
    report = scrub_folder(plan.trial_dir, plan.secrets)
    return attrs.evolve(report, deleted=[*removed, *report.deleted])


def archive_trial(
    plan: TrialPlan, store: ArtifactStore, *, keep: bool, lost: Sequence[str] = ()
) -> dict[str, Any]:
    """Move artifacts and logs of a trial into the rollout's artifact folder. Blocking.

    ``<root>/<rollout_id>/artifacts/`` gets what the task or the agent published, and
    ``<root>/<rollout_id>/harbor/`` Harbor's own files and logs, with their manifest. Never raises
    for storage that cannot be used: that is logged and reported.

    Args:
        plan: The trial, whose folder is tame and clean.
        store: Where they go.
        keep: Whether the trial's folder stays as it is, so that they are copied.
        lost: What has been deleted from the folder before, a line each.

    Returns:
        For the diagnostics, without what is empty: the ``folders`` that are there now, what was
        ``dropped``, a line each, and the ``problem``, why something is not there.
    """
    folders: list[str] = []
    dropped: list[str] = []
    problem: str | None = None
    if store.root is None or not plan.trial_dir.is_dir():
        return {}
    try:
        for name, tree in ((ARTIFACTS, plan.trial_dir / ARTIFACTS), (_HARBOR, plan.trial_dir)):
            if not tree.is_dir() or tree.is_symlink():
                continue
            drop_links_out(tree, lambda path, why: dropped.append(utf8(f"{path}: {why}")))
            if name == _HARBOR:
                missing = [*lost, *dropped][:_MOST_LINES]
                write_manifest(tree, plan.request.id, without=(ARTIFACTS,), lost=missing)
            store.take_in(
                plan.request.id,
                name,
                tree,
                move=not keep,
                without=(ARTIFACTS,) if name == _HARBOR else (),
            )
            folders.append(name)
    except OSError as error:
        problem = error.strerror or type(error).__name__
        logger.warning(
            "rollout %s: what its trial left cannot be kept below %s: %s",
            plan.request.id,
            store.root,
            problem,
        )
    found = {"folders": folders, "dropped": dropped[:_MOST_LINES], "problem": problem}
    return {name: value for name, value in found.items() if value}


def agent_sample(
    plan: TrialPlan, agent: AgentSpec, recorded: RolloutSample | None
) -> RolloutSample | None:
    """Return the sample of a trial's agent, for its grader. Blocking.

    What a workflow handed back; what a model gateway has recorded; the conversation that one of
    Harbor's own agents wrote down; the instruction alone of one that calls no model.

    Raises:
        InvalidFieldError: What came out of the sandbox is not a sample.
    """
    sample = agent.sample(plan) or recorded
    if sample is None and isinstance(agent, NativeAgent):
        adoption = adopt_trajectory(plan)
        if adoption.messages or _needs_no_conversation(agent):
            return _conversation(plan, adoption)
    return sample


def _needs_no_conversation(agent: AgentSpec) -> bool:
    return isinstance(agent, NativeAgent) and not agent.calls_model


def _conversation(plan: TrialPlan, adoption: Adoption) -> RolloutSample:
    messages = adoption.messages
    if not messages and plan.task.instruction is not None:
        messages = [{"role": "user", "content": plan.task.instruction}]
    return RolloutSample(messages=messages or list(plan.request.prompt), label=plan.request.label)
