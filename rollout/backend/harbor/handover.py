"""Share a rollout with the agent and verifier of its trial, which Harbor makes.

Harbor makes agents and verifiers out of a configuration that it also writes to files, so
neither a key nor an object can reach them that way. A `Handover` is entered around the trial
instead, and a context variable carries it into the trial's asyncio task.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from contextvars import ContextVar, Token
from typing import Any, Self

import trio
from attrs import define, field

from rollout.backend.harbor.plan import TrialPlan
from rollout.errors import BackendConfigurationError
from rollout.types import GraderConfig, RolloutSample

__all__ = ["Handover", "current_handover", "entered_handover"]

_entered: ContextVar[Handover | None] = ContextVar("harbor_handover", default=None)


@define(eq=False)
class Handover:
    """The context of one trial, for our agent and verifier in it.

    Used as a context manager it becomes what `current_handover` returns, also in asyncio tasks
    that are started inside.

    Attributes:
        plan: The trial's plan.
        read_sample: Reads what the agent handed back, given what a model gateway has recorded.
            Blocking; called in a thread once the agent has ended.
        grader_cls: The user's grader, if there is one.
        grader_config: Its config.
        grader_slots: What it waits for before it grades; ``None`` for nothing.
        raised: Gets the errors of the grader, of which Harbor keeps names and texts alone.
        agent_failed: Whether an agent of ours has raised.
        graded: The sample as the grader left it; ``None`` while it has not graded.
    """

    plan: TrialPlan
    read_sample: Callable[[RolloutSample | None], RolloutSample | None] = field(repr=False)
    grader_cls: Any = None
    grader_config: GraderConfig | None = None
    grader_slots: trio.CapacityLimiter | None = field(default=None, repr=False)
    raised: MutableSequence[BaseException] = field(factory=list, repr=False)
    agent_failed: bool = False
    graded: RolloutSample | None = field(default=None, init=False)
    _token: Token[Handover | None] | None = field(default=None, init=False, repr=False)

    def __enter__(self) -> Self:
        self._token = _entered.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _entered.reset(self._token)


def entered_handover() -> Handover | None:
    """Return the handover of the trial that runs here, ``None`` outside of one."""
    return _entered.get()


def current_handover() -> Handover:
    """Return the handover of the trial that runs here.

    Raises:
        BackendConfigurationError: None is entered: `HarborBackend` did not start this trial.
    """
    handover = entered_handover()
    if handover is None:
        raise BackendConfigurationError(
            "this part of rollout.backend.harbor only works in trials that HarborBackend starts"
        )
    return handover
