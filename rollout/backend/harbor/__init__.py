"""Run rollouts as Harbor trials, each in a sandbox of its own.

`HarborBackend` needs the extra ``harbor`` and Python 3.12 or newer; importing this package needs
neither. `rollout.backend.harbor.namespace` holds an environment for Harbor that needs no Docker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout._moved import moved_names

if TYPE_CHECKING:
    from rollout.backend.harbor.agents.workflow import python_paths
    from rollout.backend.harbor.backend import HarborBackend
    from rollout.backend.harbor.result.evidence import verify_trial_evidence
    from rollout.backend.harbor.tasks.source import TaskMode
    from rollout.backend.harbor.trial.prewarm import PrewarmReport

__all__ = ["HarborBackend", "PrewarmReport", "TaskMode", "python_paths", "verify_trial_evidence"]

_PLACES = {
    "HarborBackend": "backend",
    "PrewarmReport": "trial.prewarm",
    "TaskMode": "tasks.source",
    "python_paths": "agents.workflow",
    "verify_trial_evidence": "result.evidence",
}


def __getattr__(name: str) -> Any:
    """Load the backend when it is asked for; the runner inside a sandbox does without."""
    if name not in _PLACES:
        return moved_names(__name__)(name)
    from importlib import import_module  # noqa: PLC0415 - see above

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
