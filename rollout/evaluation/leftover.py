"""Results that a run's own server has kept, of attempts whose process did not record them.

Theory of operation: the server keeps results in a state in the run's folder. It outlives a process
that is killed by some seconds, and its state outlives both. So a process that goes on with the run
first waits until that server has ended and nobody holds the state, and then takes what is in it and
not in the journal. A server that does not end, since code of users blocks it, is killed.
What was cut short is left: cancelled with the run, or in flight when the server died.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import trio

from rollout._files.atomic import reason_of
from rollout._logs import get_logger
from rollout.codec import parse_json, structure
from rollout.errors import EvaluationError, RolloutServerError
from rollout.evaluation.process import ServerRecord
from rollout.evaluation.server import SERVER_RECORD
from rollout.server.state import KeptRollout, is_held, read_state
from rollout.types import (
    MODEL_KEY,
    SERVER_RESTART,
    RolloutErrorCategory,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = ["ended_ids", "results_of", "wait_released"]

logger = get_logger(__name__)

_ENDS_SEC = 20.0
"""The server of a process that died takes less, see `rollout.evaluation.server`."""
_LOOK_SEC = 0.1


async def wait_released(state: Path) -> None:
    """Wait until the server of the process before has ended, and kill it if it does not.

    Raises:
        EvaluationError: Its lock cannot be opened, its record is damaged, or it is another user's.
    """
    record = await trio.to_thread.run_sync(ServerRecord.read, state.with_name(SERVER_RECORD))
    if not await trio.to_thread.run_sync(_is_left, state, record):
        return
    logger.warning("waiting for the server of the process before, which is ending")
    await _wait_gone(state, record)
    if record is not None and record.runs:
        logger.warning("the server of the process before did not end, so it is killed")
        record.kill()
        await _wait_gone(state, record)


async def _wait_gone(state: Path, record: ServerRecord | None) -> None:
    with trio.move_on_after(_ENDS_SEC):
        while await trio.to_thread.run_sync(_is_left, state, record):  # noqa: ASYNC110 - a process
            await trio.sleep(_LOOK_SEC)


def _is_left(state: Path, record: ServerRecord | None) -> bool:
    try:
        return (record is not None and record.runs) or (state.exists() and is_held(state))
    except OSError as error:
        raise EvaluationError(f"the lock of {state}: {reason_of(error)}") from None


def ended_ids(state: Path) -> set[str]:
    """Return the ids of the rollouts that came to an end of their own. Blocking.

    Raises:
        EvaluationError: The state cannot be read.
    """
    rows = _rows(state, bodies=False)
    return {row.rollout_id for row in rows if row.status not in {None, RolloutStatus.CANCELLED}}


def results_of(
    state: Path, run_id: str, ids: Collection[str]
) -> Iterator[tuple[tuple[int, int], RolloutResultResponse]]:
    """Yield the results of some rollouts of a run, each with row and attempt. Blocking.

    Raises:
        EvaluationError: The state cannot be read.
    """
    pattern = re.compile(rf"{re.escape(run_id)}-([0-9]+)-([0-9]+)-[0-9a-f]+")
    for row in _rows(state, bodies=True) if ids else ():
        match = pattern.fullmatch(row.rollout_id)
        if match is None or row.rollout_id not in ids:
            continue
        result = structure(parse_json(row.body or b""), RolloutResultResponse)
        expired = result.err_category is RolloutErrorCategory.LEASE_EXPIRED
        if not expired and result.err_source not in {SERVER_RESTART, MODEL_KEY}:
            yield (int(match[1]), int(match[2])), result


def _rows(state: Path, *, bodies: bool) -> Iterator[KeptRollout]:
    if not state.exists():
        return
    try:
        for row, _ in read_state(state, bodies=bodies):
            yield row
    except RolloutServerError as error:
        raise EvaluationError(
            f"{error}; remove the folder {state.parent} to run again what only it holds"
        ) from None
