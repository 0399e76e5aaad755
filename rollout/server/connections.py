"""All open connections of a server: how many there may be, how long they idle, how they end.

A connection gets `HEAD_SEC` for the head of its next request until a request on it has carried
the server's key, and the keep-alive time from then on. When as many are open as may be, a new
one takes the place of the one that has waited longest without ever showing the key; with none
of those left, it waits until another one ends. So whoever has no key cannot keep others out.
"""

from __future__ import annotations

import math
from contextlib import suppress

import trio

__all__ = ["HEAD_SEC", "Connections", "LimitedListener", "ReadClock", "descriptors_for_connections"]

HEAD_SEC = 10.0
"""How long a connection without the key may take for the head of a request, TLS included."""

MOST_DESCRIPTORS = 65_536
"""How far the limit of open files is raised. Some programs close every possible descriptor when
they start, so children should not inherit a limit of a billion."""


def descriptors_for_connections() -> int:
    """Raise the soft limit of open files; return how many of them connections may take.

    A quarter is left to the code of users: models, sandboxes, files.
    """
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return MOST_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounded = [each for each in (hard, MOST_DESCRIPTORS) if each != resource.RLIM_INFINITY]
    if soft != resource.RLIM_INFINITY and soft < min(bounded):
        with suppress(ValueError, OSError):  # macOS has a lower limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(bounded), hard))
            soft = min(bounded)
    return min(each for each in (soft, *bounded) if each != resource.RLIM_INFINITY) * 3 // 4


class Connections:
    """What the connections of one server share.

    Args:
        limit: How many may be open at a time.
        keep_alive_sec: How long one that has shown the key may wait for its next request.
        grace_sec: How long a write may still take once the server stops.

    Attributes:
        stopping: Whether the server stops.
        writes: The writes that are under way.
        give_up_at: When the last of them is given up (trio time).
    """

    def __init__(self, *, limit: int, keep_alive_sec: float, grace_sec: float) -> None:
        self.keep_alive_sec = keep_alive_sec
        self.stopping = False
        self.writes: set[trio.CancelScope] = set()
        self.give_up_at = math.inf
        self._limit = limit
        self._grace_sec = grace_sec
        self._open: set[ReadClock] = set()
        self._strangers: dict[ReadClock, None] = {}
        self._room = trio.Event()

    def opened(self) -> ReadClock:
        """Count a new connection, and return its clock."""
        clock = ReadClock(self)
        self._open.add(clock)
        self._strangers[clock] = None
        return clock

    def recognized(self, clock: ReadClock) -> None:
        """Note that a request on a connection has carried the key."""
        clock.known = True
        self._strangers.pop(clock, None)

    def closed(self, clock: ReadClock) -> None:
        """Count a connection no longer."""
        self._open.discard(clock)
        self._strangers.pop(clock, None)
        self._room.set()
        self._room = trio.Event()

    async def make_room(self) -> None:
        """Return once there is room for another connection."""
        await trio.lowlevel.checkpoint()
        while len(self._open) >= self._limit:
            if self._strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.expire()
            await self._room.wait()

    def stop(self) -> None:
        """Close idle connections at once from now on, and bound all writes."""
        self.stopping = True
        self.give_up_at = trio.current_time() + self._grace_sec
        for scope in self.writes:
            scope.deadline = min(scope.deadline, self.give_up_at)
        for clock in self._open:
            if clock.idle:
                clock.expire()


class ReadClock:
    """The deadline of whatever read of a connection is under way.

    Attributes:
        known: Whether a request on the connection has carried the key.
        idle: Whether the connection waits for a request, or only for its end.
    """

    def __init__(self, connections: Connections) -> None:
        self.known = False
        self.idle = True
        self._connections = connections
        self._scope = trio.CancelScope()
        self._expired = False
        self._interrupted = False
        self._until = math.inf
        self.start_idle()

    def reading(self) -> trio.CancelScope:
        """Return the scope for one read."""
        self._scope = trio.CancelScope(deadline=self._until)
        return self._scope

    def start_idle(self, sec: float | None = None) -> None:
        """Give up reading in *sec* seconds; by default after the time for a request head."""
        self.idle = True
        if sec is None:
            sec = self._connections.keep_alive_sec if self.known else HEAD_SEC
        if self._connections.stopping:
            self._expired = True
        self._read_until(trio.current_time() + sec)

    def stop_idle(self) -> None:
        """Read without a deadline: a request is under way."""
        self.idle = False
        self._read_until(math.inf)

    def interrupt(self) -> None:
        """End the read under way: there is something else to do first."""
        self._interrupted = True
        self._scope.cancel()

    def was_interrupted(self) -> bool:
        """Whether the last read was interrupted, and not given up."""
        interrupted, self._interrupted = self._interrupted, False
        return interrupted and not self._expired

    def expire(self) -> None:
        """Give up reading for good."""
        self._expired = True
        self._read_until(-math.inf)

    def _read_until(self, deadline: float) -> None:
        self._until = self._scope.deadline = -math.inf if self._expired else deadline


class LimitedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that has room made for each connection before it hands it on."""

    def __init__(self, listener: trio.SocketListener, connections: Connections) -> None:
        self._listener = listener
        self._connections = connections

    async def accept(self) -> trio.SocketStream:
        """Accept a connection, once there is room for it."""
        stream = await self._listener.accept()
        try:
            await self._connections.make_room()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()
