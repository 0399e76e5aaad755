"""Writes rows to a store, as many in one commit as there are.

Theory of operation: one task commits what was put since it last did. While a commit is under way
the next one fills up, so the more there is to do the less each row costs. Whoever put a row is
called in the event loop when it is kept, and those of one commit share one event.

A commit that fails is repeated until the store works again. Admissions are not part of that: they
are refused, since nobody has been told anything of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import trio

from rollout._logs import get_logger
from rollout.errors import DuplicateRolloutError, StateUnavailableError
from rollout.server.state.rows import KeptRollout
from rollout.server.state.store import StateStore

__all__ = ["Journal"]

logger = get_logger(__name__)

_SWEEP_SEC = 10.0
_RETRY_SEC = 1.0

Done = Callable[[Exception | None], None]


class _Write(NamedTuple):
    row: KeptRollout
    done: Done
    once: bool


class Journal:
    """The writes of one registry to its store.

    Args:
        store: Where rows are kept; open.
        clock: Returns the serving time.

    Attributes:
        trouble: Why the store keeps nothing at the moment; ``None`` while it works.
        commits: How many commits there were, by ``kept`` and ``failed``.
    """

    def __init__(self, store: StateStore, clock: Callable[[], float]) -> None:
        self.trouble: str | None = None
        self.commits: Counter[str] = Counter()
        self._logged = False
        self._store = store
        self._clock = clock
        self._pending: list[_Write] = []
        self._tried = trio.Event()  # set once what is pending has been tried
        self._trying = trio.Event()  # the same of the commit that is under way, or was the last
        self._trying.set()
        self._wake = trio.Event()

    def put(self, row: KeptRollout, done: Done, *, once: bool = False) -> None:
        """Keep a row.

        Args:
            row: It replaces the row with its number.
            done: Called with ``None`` when it is kept; with `StateUnavailableError` whenever a
                commit with it has failed; with `DuplicateRolloutError` if the id is taken.
            once: Do not repeat a commit of it that has failed.
        """
        self._pending.append(_Write(row, done, once))
        self._wake.set()

    async def flushed(self) -> None:
        """Wait until a commit of all that was put so far has been tried."""
        await (self._tried if self._pending else self._trying).wait()

    async def run(self) -> None:
        """Commit what is put, and sweep now and then, until cancelled."""
        sweep_at = trio.current_time()
        while True:
            if not self._pending:
                with trio.move_on_at(sweep_at):
                    await self._wake.wait()
            self._wake = trio.Event()
            if self._pending:
                await self._commit()
            else:
                more = await self._sweep()
                sweep_at = trio.current_time() + (0.0 if more else _SWEEP_SEC)
            if self.trouble is not None:
                await trio.sleep(_RETRY_SEC)
                sweep_at = trio.current_time()  # with nothing pending, this is the next attempt

    async def close(self) -> None:
        """Try for the last time to keep what is left."""
        if self._pending:
            await self._commit()

    async def _commit(self) -> None:
        writes, self._pending = self._pending, []
        self._trying, self._tried = self._tried, trio.Event()
        rows = {write.row.number: write.row for write in writes}
        error: StateUnavailableError | None = None
        taken: frozenset[int] = frozenset()
        # A commit whose outcome nobody learned would be repeated, or forgotten.
        with trio.CancelScope(shield=True):
            try:
                taken = frozenset(await self._store.commit(list(rows.values()), self._clock()))
            except StateUnavailableError as raised:
                error = raised
        self.commits["kept" if error is None else "failed"] += 1
        self._note(error)
        if error is None and self._logged:
            self._logged = False
            logger.warning("the state can be written again; admissions are open")
        if error is not None:
            self._pending[:0] = [write for write in writes if not write.once]
        for write in writes:
            if write.row.number in taken:
                write.done(DuplicateRolloutError("the result of this rollout_id is still retained"))
            else:
                write.done(error)
        self._trying.set()

    async def _sweep(self) -> bool:
        more = False
        error: StateUnavailableError | None = None
        with trio.CancelScope(shield=True):
            try:
                more = await self._store.sweep(self._clock())
            except StateUnavailableError as raised:
                error = raised
        self._note(error)
        return more

    def _note(self, error: StateUnavailableError | None) -> None:
        self.trouble = None if error is None else str(error)
        if error is not None and not self._logged:
            self._logged = True
            logger.error(
                "%s; admissions are refused, running rollouts go on, and results wait in memory",
                error,
            )
