"""What is kept of a rollout, and what a restart makes of it. No I/O.

A rollout is one row, from its admission to the end of its retention. A row holds what answers
need and nothing else of the request: no messages, no key, and of the lease token the digest.
Times are serving time, which goes on where the last process left it, so downtime does not count.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from attrs import field, frozen

from rollout.server.results import encode
from rollout.types import (
    SERVER_RESTART,
    RolloutErrorCategory,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = ["KeptRollout", "Restored", "ended_by_restart"]


class KeptRollout(NamedTuple):
    """The row of one rollout.

    Attributes:
        number: Counts the admissions of a state; new for each of them.
        rollout_id: Its id; only one row at a time has it.
        token_digest: The digest of its lease token.
        request_digest: The keyed digest of a request with an admission key.
        agent_started_at: When its agent started, as it is written in answers.
        status: Its terminal status; ``None`` in flight.
        until: When its retention ends (serving time); ``None`` in flight.
        body: Its encoded terminal result; ``None`` in flight.
    """

    number: int
    rollout_id: str
    token_digest: bytes
    request_digest: bytes | None = None
    agent_started_at: str | None = None
    status: str | None = None
    until: float | None = None
    body: bytes | None = None


@frozen
class Restored:
    """What a store holds when it is opened.

    Attributes:
        secret: Random bytes that were drawn when the state was made.
        time: The serving time that the last process is known to have reached.
        next_number: The number of the next admission.
        in_flight: The rollouts that had not ended.
    """

    secret: bytes = field(repr=False)
    time: float = 0.0
    next_number: int = 1
    in_flight: tuple[KeptRollout, ...] = ()


def ended_by_restart(row: KeptRollout, until: float) -> KeptRollout:
    """Return the row of a rollout that was in flight when its server died, as a failure.

    Args:
        row: The row as the dead process left it.
        until: When the retention of its result ends (serving time).
    """
    at = row.agent_started_at
    started = None if at is None else datetime.fromisoformat(at)
    ran = "had not started" if started is None else "had started"
    text = f"the rollout server restarted while the rollout was in flight; its agent {ran}"
    result = RolloutResultResponse(
        rollout_id=row.rollout_id,
        status=RolloutStatus.FAILURE,
        err_message=text,
        err_category=RolloutErrorCategory.INTERNAL_ERROR,
        agent_started_at=started,
        err_source=SERVER_RESTART,
    )
    return row._replace(status=str(result.status), until=until, body=encode(result))
