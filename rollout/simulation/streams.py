"""A streamed answer on its way through the simulated network, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import httpx
import trio
from attrs import define

from rollout.simulation.faults import Fate, Fault
from rollout.simulation.server import Exchange

__all__ = ["TRICKLES", "SimulatedStream"]

TRICKLES = 10.0
"""For how many times `Fate.after_sec` an answer trickles in."""


@define(eq=False, repr=False)
class SimulatedStream(httpx.AsyncByteStream):
    """What a client reads of an answer that the server sends bit by bit.

    Attributes:
        request: The request that is answered.
        exchange: Where the server puts what it sends.
        fate: What happens on the way.
        timeout_sec: How long the client lets a read take.
        on_chunk: Called with every chunk that arrives.
        on_end: Called once, with how it ended: the name of an error, ``ended``, or ``closed``.
        on_gone: Called when the server is told that the connection is gone before its end.
    """

    request: httpx.Request
    exchange: Exchange
    fate: Fate
    timeout_sec: float
    on_chunk: Callable[[bytes], None]
    on_end: Callable[[str], None]
    on_gone: Callable[[], None]
    _lost_at: float = math.inf
    _taken: int = 0
    _over: bool = False

    def __attrs_post_init__(self) -> None:
        if self.fate.fault is Fault.LOST_DURING:
            self._lost_at = trio.current_time() + self.fate.after_sec

    async def open(self) -> None:
        """Wait for the head of the answer, which a gateway in between may hold back.

        Raises:
            httpx.TransportError: There is none in time.
        """
        opened = False
        try:
            await self._next(head=True)
            await self._hold_back()
            opened = True
        finally:
            if not opened:
                self._over = True
                if self.fate.fault is not Fault.SILENCE:  # else the server does not learn of it
                    self._leave()

    async def _hold_back(self) -> None:
        if self.fate.fault in {Fault.LATE, Fault.TRICKLE}:
            times = TRICKLES if self.fate.fault is Fault.TRICKLE else 1.0
            held_sec = self.fate.after_sec * times
            await trio.sleep(min(held_sec, self.timeout_sec))
            if held_sec > self.timeout_sec:
                raise httpx.ReadTimeout("the answer is held back", request=self.request)

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        """Yield what arrives.

        Raises:
            httpx.TransportError: What a real network would make of the fate.
        """
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                self.on_chunk(chunk)
                yield chunk

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                chunk = await self._next()
            except httpx.TransportError as error:
                self._end(type(error).__name__)
                raise
            if chunk is None:
                self._end("ended")
                return
            cut = self.fate.fault is Fault.TRUNCATED and self._taken > 1
            yield chunk[: len(chunk) // 2] if cut else chunk
            if cut or (self.fate.fault is Fault.LOST_AFTER and self._taken == 1):
                self._end("RemoteProtocolError")
                self._leave()
                raise httpx.RemoteProtocolError("the answer broke off", request=self.request)

    async def _next(self, *, head: bool = False) -> bytes | None:
        """Wait for the next chunk, ``None`` at the end; or for the head of the answer alone."""
        until = trio.current_time() + self.timeout_sec
        exchange = self.exchange
        silent = self.fate.fault is Fault.SILENCE
        await trio.lowlevel.checkpoint()
        while True:
            now = trio.current_time()
            if now >= self._lost_at:
                for _ in range(self.fate.after_steps):
                    await trio.lowlevel.checkpoint()
                self._leave()
                raise httpx.ReadError("connection reset", request=self.request)
            if not silent:
                if head and exchange.status:
                    return None
                if not head and self._taken < len(exchange.chunks):
                    self._taken += 1
                    return exchange.chunks[self._taken - 1]
                if exchange.over.is_set():
                    if exchange.complete:
                        return None
                    message = "the server process is gone"
                    raise httpx.RemoteProtocolError(message, request=self.request)
            if now >= until:
                raise httpx.ReadTimeout("the server was silent", request=self.request)
            exchange.moved = trio.Event()
            with trio.move_on_at(min(until, self._lost_at)):
                await exchange.moved.wait()

    def _end(self, how: str) -> None:
        if not self._over:
            self._over = True
            self.on_end(how)

    def _leave(self) -> None:
        if not (self.exchange.over.is_set() or self.exchange.gone.is_set()):
            self.on_gone()
            self.exchange.disconnect()

    async def aclose(self) -> None:
        """Close the connection; the server learns of it, unless nothing gets through."""
        self._end("closed")
        if self.fate.fault is not Fault.SILENCE:
            self._leave()
        await trio.lowlevel.checkpoint()
