"""Outcomes of rollouts, and which of them are worth another attempt."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple, Self

from attrs import field, frozen

from rollout._checks import check_whole, setting
from rollout.client.admission import WasAdmitted
from rollout.errors import (
    InvalidFieldError,
    RolloutAdmissionTimeoutError,
    RolloutClientClosedError,
    RolloutProtocolError,
)
from rollout.types import (
    MODEL_ENDPOINT,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutResultResponse,
    RolloutStatus,
)
from rollout.types._fields import instance_of

__all__ = ["FinishedRollout", "RolloutRetry"]

_FROM_OUTSIDE = frozenset(
    {
        RolloutErrorCategory.HTTP_ERROR,
        RolloutErrorCategory.INTERNAL_ERROR,
        RolloutErrorCategory.LEASE_EXPIRED,
    }
)
_SAME_AGAIN = (InvalidFieldError, RolloutClientClosedError, RolloutAdmissionTimeoutError)
_REFUSALS = range(400, 500)


class _RequestAndOutcome(NamedTuple):
    request: RolloutInitRequest
    outcome: RolloutResultResponse | Exception


class FinishedRollout(_RequestAndOutcome):
    """The outcome of one request; unpacks into request and outcome.

    Attributes:
        request: The request.
        outcome: Its terminal result, whatever its status; or the error that kept it from one.
        admitted: Whether the server has admitted it: "yes", "no", or "unknown" where the answer
            to a request for admission got lost.
        agent_started_at: When its agent started, as far as the client has heard, also beside an
            error. Where there is an error, its absence does not prove that no agent has started.
        attempts: How often it was run; more than once with ``retry`` alone.
    """

    admitted: WasAdmitted
    agent_started_at: datetime | None
    attempts: int

    def __new__(
        cls,
        request: RolloutInitRequest,
        outcome: RolloutResultResponse | Exception,
        *,
        admitted: WasAdmitted | None = None,
        agent_started_at: datetime | None = None,
        attempts: int = 1,
    ) -> Self:
        """Make one; fields that are left out are taken from the outcome."""
        self = super().__new__(cls, request, outcome)
        if isinstance(outcome, RolloutResultResponse):
            self.admitted, self.agent_started_at = "yes", outcome.agent_started_at
        else:
            self.admitted, self.agent_started_at = admitted or "unknown", agent_started_at
        self.attempts = attempts
        return self

    @property
    def result(self) -> RolloutResultResponse:
        """The terminal result; raises the error where there is none."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    @property
    def succeeded(self) -> bool:
        """Whether it ended as a success."""
        return (
            isinstance(self.outcome, RolloutResultResponse)
            and self.outcome.status is RolloutStatus.SUCCESS
        )

    @property
    def never_began(self) -> bool:
        """Whether it is certain that its agent has not started.

        It is where the rollout was not admitted, or where the server says so in a terminal
        result; not where the server was lost after the admission.
        """
        if isinstance(self.outcome, Exception):
            return self.admitted == "no"
        return self.agent_started_at is None


@frozen(kw_only=True)
class RolloutRetry:
    """Which rollouts `RolloutClient.run_rollouts` runs again, each time under a new id.

    By default those that failed before they began (`FinishedRollout.never_began`), so that no
    agent runs twice. What would fail in the same way is not run again: a refused or invalid
    request, a `validation_error`, an admission that took too long; nor is what was cancelled.

    Attributes:
        attempts: How often a rollout is run at most.
        infrastructure: Whether to run again also where an agent has started, or may have, and
            the failure came from outside of it: no terminal result, an ended lease, an error of
            the server, of a sandbox provider or of the model's endpoint. Tokens may be spent
            twice.

    Raises:
        InvalidFieldError: A field breaks its rule.
    """

    attempts: int = field(default=3, validator=setting(check_whole))
    infrastructure: bool = field(default=False, validator=instance_of(bool, name="a boolean"))

    def wants(self, ended: FinishedRollout) -> bool:
        """Whether a rollout that has ended is run again."""
        outcome = ended.outcome
        if ended.attempts >= self.attempts:
            return False
        if isinstance(outcome, Exception):
            refused = isinstance(outcome, RolloutProtocolError) and outcome.status_code in _REFUSALS
            if isinstance(outcome, _SAME_AGAIN) or (refused and ended.admitted == "no"):
                return False
            return ended.never_began or self.infrastructure
        if outcome.status is not RolloutStatus.FAILURE:
            return False
        if outcome.err_source == MODEL_ENDPOINT:
            return ended.never_began or self.infrastructure
        if outcome.err_category is RolloutErrorCategory.VALIDATION_ERROR:
            return False
        return ended.never_began or (self.infrastructure and outcome.err_category in _FROM_OUTSIDE)
