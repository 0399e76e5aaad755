"""Signals for commands that have something to tidy up before they end."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from attrs import define, field

__all__ = ["Interrupts", "interrupts"]

_HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)


@define(eq=False)
class Interrupts:
    """The cancel scopes that the signals of a command cancel.

    Attributes:
        number: The first signal that came, ``None`` so far.
        work: Cancelled by the first signal; the command's work belongs into it.
        tidying: Cancelled by the second one; what follows the first belongs into it.
        again: Called with the second one, by a command whose tidying up is shielded.
    """

    number: int | None = None
    work: trio.CancelScope = field(factory=trio.CancelScope)
    tidying: trio.CancelScope = field(factory=trio.CancelScope)
    again: Callable[[int], None] | None = None

    async def watch(self, received: AsyncIterator[int]) -> None:
        """Handle signals until cancelled."""
        async for number in received:
            if self.number is None:
                self.number = number
                self.work.cancel()
            elif number != _HANG_UP:  # which the kernel and the shell may each send
                self.tidying.cancel()
                if self.again is not None:
                    self.again(number)


@asynccontextmanager
async def interrupts(
    *, again: Callable[[int], None] | None = None, hang_up: bool = False
) -> AsyncGenerator[Interrupts, None]:
    """Handle SIGINT and SIGTERM for the length of the block.

    Outside of the main thread, where Python lets nobody handle signals, none ever comes.

    Args:
        again: See `Interrupts`.
        hang_up: Whether to handle the end of the terminal as well, unless ``nohup`` has it
            ignored.
    """
    state = Interrupts(again=again)
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hang_up and _HANG_UP is not None and signal.getsignal(_HANG_UP) == signal.SIG_DFL:
        numbers.append(_HANG_UP)
    with trio.open_signal_receiver(*numbers) as received:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(state.watch, received)
            yield state
            nursery.cancel_scope.cancel()
