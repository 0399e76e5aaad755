"""Run trials through a caller's ``harbor.trial.queue.TrialQueue``.

Such a queue bounds how many trials run, tries failed ones again, and has hooks. It makes its trials
itself, and the one place where it hands out a trial before it runs is its own ``_setup_hooks``. So
that is wrapped, once for each queue: a context variable says what is to be done with the trials
that the asyncio task at work submits. Trials that others submit are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rollout.errors import BackendConfigurationError

__all__ = ["adopt_queue", "submit"]

_SET_UP = "_setup_hooks"
_set_up: ContextVar[Callable[[Any], None] | None] = ContextVar("harbor_set_up", default=None)


def adopt_queue(queue: Any) -> int:
    """Take over a caller's queue for one backend, and return how many trials it runs at a time.

    Raises:
        BackendConfigurationError: It is not a ``TrialQueue``, or another backend's: a queue is
            bound to one event loop, and each backend has a loop of its own.
    """
    from harbor.trial.queue import TrialQueue  # noqa: PLC0415 - an extra

    if not isinstance(queue, TrialQueue):
        raise BackendConfigurationError("orchestrator must be a harbor.trial.queue.TrialQueue")
    if _SET_UP in vars(queue):
        raise BackendConfigurationError(
            "orchestrator belongs to another HarborBackend; make a TrialQueue for each, since "
            "each has an event loop of its own"
        )
    queues_own = getattr(queue, _SET_UP)

    def set_up(trial: Any) -> None:
        ours = _set_up.get()
        if ours is not None:
            ours(trial)
        queues_own(trial)

    setattr(queue, _SET_UP, set_up)
    return int(queue._n_concurrent)  # noqa: SLF001 - it has no public name


async def submit(queue: Any, config: Any, set_up: Callable[[Any], None]) -> Any:
    """Run a trial through an adopted queue; an asyncio function.

    Args:
        queue: The queue.
        config: The ``TrialConfig``.
        set_up: Called with the trial before it runs, and with each further try of it.
    """
    token = _set_up.set(set_up)
    try:
        return await queue.submit(config)
    finally:
        _set_up.reset(token)
