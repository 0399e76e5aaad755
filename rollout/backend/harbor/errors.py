"""Errors of this package: of users' code within a trial, of tasks, of files.

A trial keeps the bare name of an exception's class and its text. So there is one class for
each category, and `rollout.backend.harbor.result.outcomes` reads the category off the name.
"""

from __future__ import annotations

from rollout.errors import RolloutError
from rollout.types import MODEL_ENDPOINT, RolloutErrorCategory

__all__ = [
    "CATEGORIES",
    "SOURCES",
    "GraderAgentError",
    "GraderEndpointError",
    "GraderHttpError",
    "GraderNotRunError",
    "GraderTimeoutError",
    "GraderValidationError",
    "TaskFetchError",
    "UnfitTaskError",
    "UserCodeError",
    "WorkflowAgentError",
    "WorkflowEndpointError",
    "WorkflowHttpError",
    "WorkflowSetupError",
    "WorkflowTimeoutError",
    "WorkflowValidationError",
    "grader_error",
    "workflow_error",
]


class UserCodeError(Exception):
    """A workflow or a grader failed; the text is that of what it raised.

    Not a `TimeoutError` in any case: Harbor would take that for a deadline of its own.
    """


class WorkflowTimeoutError(UserCodeError):
    """The workflow raised a timeout."""


class WorkflowValidationError(UserCodeError):
    """The workflow raised a value, type or assertion error, or returned what it may not."""


class WorkflowHttpError(UserCodeError):
    """The workflow raised an error of a sandbox provider."""


class WorkflowAgentError(UserCodeError):
    """The workflow raised any other error, or its process ended without a result."""


class WorkflowEndpointError(UserCodeError):
    """The workflow failed as `WorkflowAgentError`, because of the model's endpoint."""


class WorkflowSetupError(UserCodeError):
    """The sandbox cannot run the workflow: it lacks a Python or one of its packages."""


class GraderTimeoutError(UserCodeError):
    """The grader raised a timeout."""


class GraderValidationError(UserCodeError):
    """The grader raised a value, type or assertion error, or set no reward."""


class GraderHttpError(UserCodeError):
    """The grader raised an error of a sandbox provider."""


class GraderAgentError(UserCodeError):
    """The grader raised any other error."""


class GraderEndpointError(UserCodeError):
    """The grader failed as `GraderAgentError`, because of the model's endpoint."""


class GraderNotRunError(UserCodeError):
    """There was nothing to grade, since the agent had failed."""


_WORKFLOW: dict[RolloutErrorCategory, type[UserCodeError]] = {
    RolloutErrorCategory.TIMEOUT: WorkflowTimeoutError,
    RolloutErrorCategory.VALIDATION_ERROR: WorkflowValidationError,
    RolloutErrorCategory.HTTP_ERROR: WorkflowHttpError,
    RolloutErrorCategory.AGENT_ERROR: WorkflowAgentError,
}
_GRADER: dict[RolloutErrorCategory, type[UserCodeError]] = {
    RolloutErrorCategory.TIMEOUT: GraderTimeoutError,
    RolloutErrorCategory.VALIDATION_ERROR: GraderValidationError,
    RolloutErrorCategory.HTTP_ERROR: GraderHttpError,
    RolloutErrorCategory.AGENT_ERROR: GraderAgentError,
}

CATEGORIES: dict[str, RolloutErrorCategory] = {
    error.__name__: category for table in (_WORKFLOW, _GRADER) for category, error in table.items()
} | {
    WorkflowEndpointError.__name__: RolloutErrorCategory.AGENT_ERROR,
    GraderEndpointError.__name__: RolloutErrorCategory.AGENT_ERROR,
    WorkflowSetupError.__name__: RolloutErrorCategory.AGENT_ERROR,
    GraderNotRunError.__name__: RolloutErrorCategory.AGENT_ERROR,
}
"""The category of each class, by its name."""


SOURCES = dict.fromkeys(
    (WorkflowEndpointError.__name__, GraderEndpointError.__name__), MODEL_ENDPOINT
)
"""Whose failure those are that are not the user code's own, by the class's name."""


def workflow_error(
    category: RolloutErrorCategory, message: str, source: str | None = None
) -> UserCodeError:
    """Make the error of a workflow; categories that no user code has count as agent errors."""
    if source == MODEL_ENDPOINT and category is RolloutErrorCategory.AGENT_ERROR:
        return WorkflowEndpointError(message)
    return _WORKFLOW.get(category, WorkflowAgentError)(message)


def grader_error(
    category: RolloutErrorCategory, message: str, source: str | None = None
) -> UserCodeError:
    """Make the error of a grader, likewise."""
    if source == MODEL_ENDPOINT and category is RolloutErrorCategory.AGENT_ERROR:
        return GraderEndpointError(message)
    return _GRADER.get(category, GraderAgentError)(message)


class TaskFetchError(RolloutError, RuntimeError):
    """A task could not be downloaded; the message says why, without any credentials.

    Raised by `fetch_task`.
    """


class UnfitTaskError(ValueError):
    """A folder cannot be used as a task; the message says what is wrong, and where in it.

    Raised by `check_tree`, `copy_tree` and `rollout.backend.harbor.tasks.files.describe`; the
    callers of those make an error of it that says whose task it is.
    """
