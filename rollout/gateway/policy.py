"""The version of a policy's weights, and whether calls of it are sent.

A trainer pauses the calls, changes the weights, and resumes them with the new version. Calls that
come meanwhile wait; those under way come to their end, or are cancelled and sent again afterwards.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import trio

from rollout._checks import check_choice, check_number, check_whole

__all__ = ["PauseMode", "Policy"]

PauseMode = Literal["drain", "abort"]
_MODES = ("drain", "abort")


class Policy:
    """The state of a policy behind a gateway.

    Attributes:
        version: The version of its weights, ``None`` while nobody has said one.
        paused: Whether calls wait.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.paused = False
        self._sending: set[trio.CancelScope] = set()
        self._aborted: set[trio.CancelScope] = set()
        self._changed = trio.Event()

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "paused": self.paused,
            "version": self.version,
            "calls_in_flight": len(self._sending),
        }

    async def read(self) -> dict[str, Any]:
        """Return the same as `state`."""
        await trio.lowlevel.checkpoint()
        return self.state()

    async def pause(self, mode: PauseMode, timeout_sec: float) -> dict[str, Any]:
        """Hold back all calls; return the state once none is in flight, or the time is up.

        Args:
            mode: ``drain`` lets those in flight come to their end, ``abort`` cancels them.
            timeout_sec: How long to wait for them, in seconds. The pause goes on afterwards.

        Cancelling this leaves the pause as it is.

        Raises:
            InvalidFieldError: The mode is another one, or the time not a number from 0.
        """
        check_choice("mode", mode, _MODES)
        check_number("timeout_sec", timeout_sec, least=0)
        self.paused = True
        if mode == "abort":
            self._aborted |= self._sending
            for scope in self._sending:
                scope.cancel()
        with trio.move_on_after(timeout_sec):
            while self._sending and self.paused:
                await self._changed.wait()
        await trio.lowlevel.checkpoint()
        return self.state()

    def resume(self, version: int | None = None) -> dict[str, Any]:
        """Send calls again, with a new version if one is given; return the state.

        Raises:
            InvalidFieldError: The version is not a whole number from 0.
        """
        check_whole("version", version, least=0, none=True)
        if version is not None:
            self.version = version
        self.paused = False
        self._wake()
        return self.state()

    async def wait(self, timeout_sec: float) -> bool:
        """Wait until calls may be sent; return whether they may in time."""
        with trio.move_on_after(timeout_sec):
            while self.paused:
                await self._changed.wait()
        return not self.paused

    @contextmanager
    def sending(self) -> Generator[trio.CancelScope, None, None]:
        """Count a call for the length of the block; an abort cancels it."""
        with trio.CancelScope() as scope:
            self._sending.add(scope)
            try:
                yield scope
            finally:
                self._sending.discard(scope)
                self._wake()

    def took_back(self, scope: trio.CancelScope) -> bool:
        """Whether an abort cancelled a call before its end; asked once."""
        aborted = scope in self._aborted
        self._aborted.discard(scope)
        return aborted and scope.cancelled_caught

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
