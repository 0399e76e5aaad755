"""Trajectories of rollouts that have ended, read from the folder of their files.

The folder may be written by workers, and a rollout's folder may be left over from an earlier one
of the same id. So a trajectory counts only if the diagnostics beside it name the same start of
the agent as the result.
"""

from __future__ import annotations

import gzip
from datetime import datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path

import trio

from rollout._files.rollouts import RolloutFolders, problem_of
from rollout._threads import run_off_loop
from rollout.backend.saving import DIAGNOSTICS, TRAJECTORY
from rollout.codec import format_timestamp, parse_json
from rollout.errors import InvalidBodyError, StateUnavailableError, TrajectoryUnavailableError

__all__ = ["stored_trajectory"]

_LARGEST = 1024 * 1024 * 1024
"""The client reads no larger answer either."""

_FASTEST = 1
"""The level of compression: it makes a third of token ids, and 6 no more than a tenth less."""

_READERS = trio.CapacityLimiter(4)
"""A disk that hangs holds up other trajectories, and nothing else."""


async def stored_trajectory(
    root: Path | None, rollout_id: str, agent_started_at: datetime | None, *, compress: bool
) -> bytes:
    """Return the trajectory of a rollout that has ended, as it was written.

    Args:
        root: Where the files of rollouts are kept; ``None`` if nowhere.
        rollout_id: The rollout.
        agent_started_at: When its agent started, as its result says.
        compress: Whether to compress it with gzip.

    Raises:
        TrajectoryUnavailableError: It was not kept, or is gone.
        StateUnavailableError: The storage fails.

    Cancelling this leaves a thread behind that still reads.
    """
    if root is None:
        await trio.lowlevel.checkpoint()
        raise _unavailable("this server keeps no files of rollouts")
    read = partial(_read, root, rollout_id, agent_started_at, compress=compress)
    return await run_off_loop(read, _READERS, abandon=True)


def _read(
    root: Path, rollout_id: str, agent_started_at: datetime | None, *, compress: bool
) -> bytes:
    try:
        diagnostics, trajectory = RolloutFolders(root).read(
            rollout_id, (DIAGNOSTICS, TRAJECTORY), largest=_LARGEST
        )
    except FileNotFoundError:
        diagnostics = trajectory = b""
    except OSError as error:
        raise StateUnavailableError(
            f"the files of the rollout cannot be read: {problem_of(error)}"
        ) from error
    if not _is_of(diagnostics, rollout_id, agent_started_at):
        raise _unavailable(
            "no trajectory of this rollout is in the folder of the server: none was written, it "
            "was removed, or it was written on another machine"
        )
    return gzip.compress(trajectory, _FASTEST, mtime=0) if compress else trajectory


def _is_of(diagnostics: bytes, rollout_id: str, agent_started_at: datetime | None) -> bool:
    """Whether diagnostics are those of the rollout, and not of an earlier one of its id."""
    try:
        document = parse_json(diagnostics)
    except InvalidBodyError:
        return False
    started = None if agent_started_at is None else format_timestamp(agent_started_at)
    return (
        isinstance(document, dict)
        and document.get("rollout_id") == rollout_id
        and document.get("agent_started_at", "") == started
    )


def _unavailable(message: str) -> TrajectoryUnavailableError:
    return TrajectoryUnavailableError(message, status_code=HTTPStatus.NOT_FOUND)
