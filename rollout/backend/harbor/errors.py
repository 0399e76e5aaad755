"""Errors of this package: of users' code within a trial, and of tasks."""

from __future__ import annotations

from rollout.errors import RolloutError
from rollout.types import MODEL_ENDPOINT, MODEL_KEY, RolloutErrorCategory

__all__ = [
    "GraderError",
    "TaskFetchError",
    "UnfitTaskError",
    "UserCodeError",
    "WorkflowError",
    "WorkflowSetupError",
]

_CATEGORIES = frozenset(
    {
        RolloutErrorCategory.TIMEOUT,
        RolloutErrorCategory.VALIDATION_ERROR,
        RolloutErrorCategory.HTTP_ERROR,
    }
)


class UserCodeError(Exception):
    """A workflow or a grader failed; the text is that of what it raised.

    Not a `TimeoutError` in any case: Harbor would take that for a deadline of its own.

    Args:
        message: The text.
        category: What went wrong; a category that user code cannot have counts as `agent_error`.
        source: Whose failure an `agent_error` was, where that is known.
    """

    def __init__(
        self,
        message: str,
        category: RolloutErrorCategory = RolloutErrorCategory.AGENT_ERROR,
        source: str | None = None,
    ) -> None:
        super().__init__(message)
        known = category in _CATEGORIES
        self.category = category if known else RolloutErrorCategory.AGENT_ERROR
        self.source = source if source in {MODEL_ENDPOINT, MODEL_KEY} and not known else None


class WorkflowError(UserCodeError):
    """The workflow raised, returned what it may not, or ended without a result."""


class WorkflowSetupError(WorkflowError):
    """The sandbox cannot run the workflow: it lacks a Python or one of its packages."""


class GraderError(UserCodeError):
    """The grader raised, set no reward, or had nothing to grade since the agent had failed."""


class TaskFetchError(RolloutError, RuntimeError):
    """A task could not be downloaded; the message says why, without any credentials.

    Raised by `fetch_task`.
    """


class UnfitTaskError(ValueError):
    """A folder cannot be used as a task; the message says what is wrong, and where in it.

    Raised by `check_tree`, `copy_tree` and `rollout.backend.harbor.tasks.files.describe`; the
    callers of those make an error of it that says whose task it is.
    """
