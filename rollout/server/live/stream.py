"""``GET /rollouts/live``: the lines that those who look on get."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from itertools import islice
from typing import Any

import trio

from rollout.codec import dump_json
from rollout.server.asgi import EndlessBody
from rollout.server.live.view import LiveView, Watch

__all__ = ["LIVE_PATH", "LiveStream"]

LIVE_PATH = "/rollouts/live"

UPDATE_SEC = 1.0
"""The shortest time between two lines."""

SILENCE_SEC = 5.0
"""The longest time between two lines."""

_ROWS_AT_ONCE = 256


class LiveStream(EndlessBody):
    """The states of a server for one who looks on, who is noted for as long as they are sent.

    Each line is a JSON object. The first has everything, a later one the sections that have
    changed, and the rows that have.
    """

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._said: dict[str, bytes] = {}

    async def __aenter__(self) -> AsyncGenerator[bytes, None]:
        await trio.lowlevel.checkpoint()
        self._watch = self._view.watch()
        self._lines = self._write(self._watch)
        return self._lines

    async def __aexit__(self, *_: object) -> None:
        self._view.unwatch(self._watch)
        await self._lines.aclose()

    async def _write(self, watch: Watch) -> AsyncGenerator[bytes, None]:
        said_at = trio.current_time() - SILENCE_SEC
        while True:
            head = self._head()
            silent = trio.current_time() >= said_at + SILENCE_SEC
            if head or watch.changed or watch.gone or silent:
                said_at = trio.current_time()
                yield b'{"now":%s%s,"rows":[' % (dump_json(self._view.time()), head)
                # Of what changes while a line is being sent, the rest of it has the new state.
                first = True
                for rows in self._rows(watch):
                    await trio.lowlevel.checkpoint()
                    yield rows if first else b"," + rows
                    first = False
                gone, watch.gone = list(watch.gone), {}
                yield b'],"gone":%s}\n' % dump_json(gone)
            if self._view.closed.is_set():
                return
            with trio.move_on_at(trio.current_time() + UPDATE_SEC):
                await self._view.closed.wait()

    def _head(self) -> bytes:
        """Return the sections that have changed since they were sent."""
        pieces: list[bytes] = []
        for name, section in self._view.sections().items():
            encoded = dump_json(section)
            if self._said.get(name) != encoded:
                self._said[name] = encoded
                pieces.append(b',"%s":%s' % (name.encode(), encoded))
        return b"".join(pieces)

    def _rows(self, watch: Watch) -> Iterator[bytes]:
        """Yield the rows that are marked, many at once."""
        left = len(watch.changed)
        while left > 0 and watch.changed:
            rows: list[Any] = []
            for rollout_id in list(islice(watch.changed, _ROWS_AT_ONCE)):
                del watch.changed[rollout_id]
                row = self._view.row(rollout_id)
                if row is not None:
                    rows.append(row)
            left -= _ROWS_AT_ONCE
            if rows:
                yield dump_json(rows)[1:-1]
