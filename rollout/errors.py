"""The exceptions of this library; those of sandboxes are in `rollout.sandbox`.

Each error subclasses the builtin that fits it best, so that a caller who knows nothing of
this library can still catch it. Errors of httpx (`httpx.TransportError` and its kin) pass
through unchanged: they say more than a wrapper could.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence

from attrs import frozen

__all__ = [
    "AdmissionsClosedError",
    "BackendConfigurationError",
    "BridgeCancelledError",
    "BridgeError",
    "DatasetError",
    "DuplicateRolloutError",
    "EvaluationDamagedError",
    "EvaluationError",
    "EvaluationInputsChangedError",
    "EvaluationLockedError",
    "EvaluationStoppedError",
    "EvidenceError",
    "FieldProblem",
    "IntegrationError",
    "InvalidBodyError",
    "InvalidFieldError",
    "InvalidLeaseError",
    "InvalidTransitionError",
    "JudgeRefusedError",
    "JudgeUnreachableError",
    "NotOnTrioError",
    "RolloutAdmissionTimeoutError",
    "RolloutCancelTimeoutError",
    "RolloutCapacityError",
    "RolloutClientClosedError",
    "RolloutClientEnteredError",
    "RolloutClientNotEnteredError",
    "RolloutError",
    "RolloutHandleCancelled",
    "RolloutIdleTimeoutError",
    "RolloutPollTimeoutError",
    "RolloutProtocolError",
    "RolloutServerError",
    "RubricError",
    "SampleSourceError",
    "SimulationTimeoutError",
    "StateUnavailableError",
    "TrajectoryError",
    "TrajectoryUnavailableError",
    "UnknownRolloutError",
    "VerdictError",
]


class RolloutError(Exception):
    """Base of the errors that belong to this library alone.

    All of them can be copied and pickled.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # By default a copy calls the class with `args`, which are no longer what it was given.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__ or None  # type: ignore[attr-defined]


class InvalidFieldError(RolloutError, ValueError):
    """A value broke the rule of the field that it was meant for.

    Raised by the types of `rollout.types` on construction and on assignment, and by the
    codec while it reads a request or a response.

    Attributes:
        field: The name of the field.
        reason: What the field asks for, without the value (a value may be a secret).
        kind: A short machine-readable name of the rule, the ``type`` of a 422 answer.
    """

    def __init__(self, field: str, reason: str, *, kind: str = "value_error") -> None:
        super().__init__(f"{field} {reason}")
        self.field = field
        self.reason = reason
        self.kind = kind


@frozen
class FieldProblem:
    """One thing that is wrong with a body.

    Attributes:
        loc: The way to the field, outermost first.
        msg: What the field asks for.
        type: A short name of the rule.
    """

    loc: tuple[str | int, ...]
    msg: str
    type: str

    def __str__(self) -> str:
        where = ".".join(str(part) for part in self.loc)
        return f"{where}: {self.msg}" if where else self.msg


class InvalidBodyError(RolloutError, ValueError):
    """A body is not strict JSON, or does not fit its type.

    Attributes:
        problems: Everything that is wrong with it, in order of the fields.
    """

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class InvalidTransitionError(RolloutError, ValueError):
    """A rollout was asked to go from one status to another that cannot follow it."""


class RolloutProtocolError(RolloutError, RuntimeError):
    """The server answered, but not with what the protocol allows.

    Raised by every method of `rollout.client.RolloutClient` that sends a request.

    Attributes:
        status_code: The HTTP status of the answer. An answer with the expected status but
            an unusable body keeps that status (200 or 202).
    """

    def __init__(self, message: str, *, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class RolloutAdmissionTimeoutError(RolloutError, TimeoutError):
    """``admission_timeout_sec`` ran out before the server admitted the rollout.

    When the deadline fell while a request was on its way, or none of the requests got an
    answer, the message says that the admission may have succeeded all the same. Nothing is
    cancelled on the server in that case: its answer might have been that the id belongs to
    somebody else's rollout. An admitted rollout that nobody polls ends with its polling lease.
    """


class RolloutCancelTimeoutError(RolloutError, TimeoutError):
    """A cancel request was not answered within its five seconds of wall clock.

    The server may or may not have received it; asking again is safe.
    """


class RolloutIdleTimeoutError(RolloutError, TimeoutError):
    """The server did not become idle within ``timeout_sec`` of `wait_idle`."""


class RolloutPollTimeoutError(RolloutError, TimeoutError):
    """A result response trickled in so slowly that it outlived the polling lease."""


class RolloutHandleCancelled(RolloutError):  # noqa: N818 - the name mirrors trio.Cancelled
    """The handle that is awaited was cancelled, by `RolloutHandle.cancel` or by its client.

    The rollout itself was not touched: it runs on until it ends or its lease expires.
    """


class NotOnTrioError(RolloutError, RuntimeError):
    """A trio API was called from elsewhere, such as from an asyncio program."""


class RolloutClientNotEnteredError(RolloutError, RuntimeError):
    """A method that polls in the background needs ``async with RolloutClient(...)``."""


class RolloutClientEnteredError(RolloutError, RuntimeError):
    """The client was entered already; one client has one nursery."""


class RolloutClientClosedError(RolloutError, RuntimeError):
    """The client was closed, so it takes no further calls."""


class RolloutServerError(RolloutError, RuntimeError):
    """The server cannot start, or its own tasks failed while it was serving."""


class SampleSourceError(RolloutError, ValueError):
    """A second sample source was registered for one rollout."""


class BackendConfigurationError(RolloutError, ValueError):
    """A backend, workflow or grader was set up in a way that cannot work."""


class RolloutCapacityError(RolloutError, RuntimeError):
    """The backend takes no further rollout now; the server answers 429."""


class AdmissionsClosedError(RolloutError, RuntimeError):
    """The server takes no further rollout: it is shutting down, or has not started."""


class StateUnavailableError(RolloutError, RuntimeError):
    """The state, or the files of a rollout, cannot be read or written now; the answer is 503."""


class UnknownRolloutError(RolloutError, KeyError):
    """No rollout of that id is active or retained."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "unknown rollout_id"


class DuplicateRolloutError(RolloutError, ValueError):
    """A rollout of that id is active, or its result is still retained."""


class InvalidLeaseError(RolloutError, PermissionError):
    """The polling lease token does not belong to that rollout."""


class TrajectoryError(RolloutError, ValueError):
    """A file holds no trajectory document, or one that breaks a rule of the format.

    Attributes:
        problems: What is wrong with it, one line each; empty if it cannot be read at all.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class TrajectoryUnavailableError(RolloutError, LookupError):
    """There is no trajectory of a rollout to fetch; the message says why.

    Raised by `rollout.client.RolloutClient.fetch_trajectory`.

    Attributes:
        status_code: The HTTP status of the answer: 409 if the rollout has not ended, 404 if the
            server has no trajectory of it; ``None`` if nothing was asked for.
    """

    def __init__(self, message: str, *, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class EvidenceError(RolloutError, ValueError):
    """The kept files of a Harbor trial are incomplete, of another rollout, or not as they were."""


class SimulationTimeoutError(RolloutError, TimeoutError):
    """A scenario of `rollout.simulation.simulate` did not end within its simulated time.

    Most often nothing can happen in it any longer: each of its tasks waits for another one.
    """


class BridgeError(RolloutError, RuntimeError):
    """No bridge to asyncio is usable: none is open, it is closed, or its loop has ended.

    Raised by everything in `rollout.integrations.asyncio_bridge`, also in calls that were
    still running when their bridge closed.
    """


class BridgeCancelledError(BridgeError):
    """A coroutine behind a bridge ended with `asyncio.CancelledError` of its own accord.

    Something on the asyncio side cancelled it. A cancellation by trio is not an error: it stays
    `trio.Cancelled`.
    """


class IntegrationError(RolloutError, RuntimeError):
    """An integration cannot do its work here, or the endpoint of the policy refused a call.

    Raised by `rollout.integrations.openai` and `rollout.integrations.chat`: no rollout is
    running, it names no endpoint, an optional package is missing; and by
    `rollout.integrations.chat.chat` for an answer without a message.

    Attributes:
        status_code: The HTTP status of the endpoint's answer, ``None`` if there is none.
    """

    def __init__(self, message: str, *, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class RubricError(RolloutError, RuntimeError):
    """A rubric cannot be read or used. Base of what judges do wrong, too."""


class JudgeUnreachableError(RubricError):
    """The endpoint of a judge cannot be reached, or did not answer in time."""


class JudgeRefusedError(RubricError):
    """The endpoint of a judge answered with an error, or with something else than a reply.

    Attributes:
        status_code: The HTTP status of its answer, ``None`` without an answer.
    """

    def __init__(self, message: str, *, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class VerdictError(RubricError, ValueError):
    """A judge replied, but not with a verdict that can be read."""


class EvaluationError(RolloutError, RuntimeError):
    """An evaluation cannot start or go on. Base of the more exact ones."""


class DatasetError(EvaluationError, ValueError):
    """A dataset cannot be read, or a row of it cannot be read without changing a value.

    Raised while a dataset is opened and while its rows are read.

    Attributes:
        path: The file.
        line: The line in the file where the row begins, from 1; ``None`` where there is none.
        row: The row, from 0; ``None`` if it is about the file as a whole.
        column: The column, ``None`` if it is about the row as a whole.
        reason: What is wrong, without the value.
    """

    def __init__(
        self,
        path: str,
        reason: str,
        *,
        line: int | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        where = [path]
        if row is not None:
            where.append(f"row {row}" + (f" (line {line})" if line is not None else ""))
        elif line is not None:
            where.append(f"line {line}")
        if column is not None:
            where.append(f"column {column!r}")
        super().__init__(f"{', '.join(where)}: {reason}")
        self.path = path
        self.line = line
        self.row = row
        self.column = column
        self.reason = reason


class EvaluationInputsChangedError(EvaluationError, ValueError):
    """An evaluation cannot be resumed because its inputs have changed.

    Attributes:
        changes: One line for each input that differs: its name, what it was, what it is.
    """

    def __init__(self, message: str, changes: Sequence[str]) -> None:
        super().__init__(message)
        self.changes = tuple(changes)


class EvaluationDamagedError(EvaluationError, ValueError):
    """A file of an evaluation is damaged before its last line, or of another program.

    Nothing is repaired: the message names file and line.
    """


class EvaluationLockedError(EvaluationError):
    """Another process is running an evaluation in the same folder."""


class EvaluationStoppedError(EvaluationError):
    """An evaluation was stopped before its end: each further attempt would fail in the same way.

    That is by its circuit breaker, by the end of its server, or since the model's endpoint refuses
    the key. What had finished is kept. Attempts that failed until the breaker stopped it run again
    with ``retry_failed``.
    """
