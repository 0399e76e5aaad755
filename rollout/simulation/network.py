"""An httpx transport that delivers requests to a simulated server, with faults in between.

By default the network knows the routes of the protocol and delivers answers as a whole, like a
gateway that buffers them, and does not let through what a server offers beyond that. With feeds
it does: a feed is delivered chunk by chunk. A request that is about many rollouts is recorded
once for each of them.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Self
from urllib.parse import unquote

import httpx
import trio
from attrs import define, evolve, field

from rollout.simulation.faults import Fate, Fault, FaultPlan, Route
from rollout.simulation.server import Exchange, SimulatedServer
from rollout.simulation.trace import Trace
from rollout.types import (
    ADMISSION_KEYS,
    DURABLE_RESULTS,
    POLLING_LEASE_HEADER,
    SEEN_STATE_HEADER,
)

__all__ = ["Link", "SimulatedTransport"]

_TRICKLES = 10.0
"""For how many times `Fate.after_sec` an answer trickles in."""

_TERMINAL = {"success", "failure", "cancelled"}
_FOREIGN = b'{"rollout_id":"somebody-elses","status":"running"}'
_NOT_FOR_FEEDS = {ADMISSION_KEYS, DURABLE_RESULTS}
_NEVER_SENT = {Fault.REFUSED, Fault.LOST_BEFORE, Fault.GATEWAY, Fault.BUSY}
_ARRIVES_IN_VAIN = {Route.ADMIT, Route.BATCH, Route.START}
_STEPS = 25
"""Within how many steps of the tasks a server learns that nobody waits for an admission."""

_NOTHING: Mapping[str, dict[str, Any]] = {}
_NO_SEEN: Mapping[str, str | None] = {}
_NO_KEYS: Mapping[str, str] = {}
_GATEWAY_BODIES = {
    "json": (b'{"detail":"upstream"}', "application/json"),
    "html": (b"<html><body><h1>Bad gateway</h1></body></html>", "text/html"),
    "empty": (b"", "text/plain"),
}


@define(eq=False)
class _Request:
    """A request on its way.

    Attributes:
        number: Which request of the run it is, counted from 1.
        route: Where it goes.
        rollout_id: Which rollout it is about, if it is about one.
        token: Its lease token, empty without one.
        many: For a request about many rollouts, which, with the lease token of each.
        seen: What the client says to have seen of each rollout.
        feed: The token of the feed that it names, empty without one.
        keys: The admission keys in it, by rollout.
        arrived_at: When it reached the server.
    """

    raw: httpx.Request
    body: bytes
    number: int
    route: Route
    rollout_id: str
    token: str
    many: dict[str, str] | None = None
    feed: str = ""
    seen: Mapping[str, str | None] = _NO_SEEN
    keys: Mapping[str, str] = _NO_KEYS
    arrived_at: float = 0.0

    @property
    def about(self) -> Iterable[str]:
        """Which rollouts it is about; one empty id if about none."""
        return self.many or (self.rollout_id,)


@define(eq=False)
class Link:
    """A way between two machines, which can be cut and healed.

    While it is cut nothing gets through, in neither direction. What is under way arrives once it
    is healed, unless its client has given up before.

    Attributes:
        healed: Set when it is healed; ``None`` while it is not cut.
    """

    healed: trio.Event | None = None

    def cut(self) -> None:
        """Let nothing through."""
        if self.healed is None:
            self.healed = trio.Event()

    def heal(self) -> None:
        """Let everything through that waits."""
        if self.healed is not None:
            self.healed.set()
            self.healed = None

    async def passable(self) -> None:
        """Wait until it is not cut."""
        while self.healed is not None:
            await self.healed.wait()


@define(eq=False)
class _Memory:
    """What the network remembers of all requests: tokens, answers and feeds.

    Attributes:
        numbers: Counts the requests.
        tokens: The lease token of each rollout, from its latest admission.
        polled: The body of the first good answer to a poll, for each rollout.
        admissions: How many admissions of each id there were.
        feeds: Which rollouts are attached to each open feed, by its token, and for each of
            them which admission of its id it comes from.
        opened_by: The request that opened each of those feeds, by its token.
        ended: When a feed told the end of a rollout, by its token and the id.
        secrets: A number for each admission key and lease token, which stands for it in traces.
    """

    numbers: Iterator[int] = field(factory=lambda: itertools.count(1))
    tokens: dict[str, str] = field(factory=dict)
    polled: dict[str, bytes] = field(factory=dict)
    admissions: Counter[str] = field(factory=Counter)
    feeds: dict[str, dict[str, int]] = field(factory=dict)
    opened_by: dict[str, int] = field(factory=dict)
    ended: dict[tuple[str, str], float] = field(factory=dict)
    secrets: dict[str, int] = field(factory=dict)

    def number_of(self, secret: str) -> int:
        """Return the number of a key or token."""
        return self.secrets.setdefault(secret, len(self.secrets) + 1)

    def keys(self, request: _Request) -> dict[str, dict[str, Any]]:
        """Return the number of each admission key in a request, by what the request is about."""
        numbers = {name: self.number_of(key) for name, key in request.keys.items()}
        if request.route is Route.CANCEL:  # it has one event, of all its ids
            return {request.rollout_id: {"keys": numbers}} if numbers else {}
        return {name: {"key": number} for name, number in numbers.items()}

    def lease(self, request: _Request, rollout_id: str) -> str:
        """Return whose lease token a request carries: ``own``, ``other``, or an empty string."""
        if request.route is Route.RENEW:
            return "own" if rollout_id in self.attached(request.feed) else ""
        token = request.token if request.many is None else request.many[rollout_id]
        if not token:
            return ""
        return "own" if self.tokens.get(rollout_id) == token else "other"

    def attach(self, feed: str, rollout_id: str) -> None:
        """Attach a rollout to a feed, and to no other one."""
        admission = self.admissions[rollout_id]
        for attached in self.feeds.values():
            if attached.get(rollout_id) == admission:
                del attached[rollout_id]
        if feed in self.feeds:
            self.feeds[feed][rollout_id] = admission

    def attached(self, feed: str) -> list[str]:
        """Return what is attached to a feed, without those whose id is in use again."""
        return [
            rollout_id
            for rollout_id, admission in self.feeds.get(feed, {}).items()
            if admission == self.admissions[rollout_id]
        ]

    def is_earlier(self, feed: str, rollout_id: str) -> bool:
        """Whether a feed still reports an earlier admission of an id."""
        current = self.admissions[rollout_id]
        return self.feeds.get(feed, {}).get(rollout_id, current) < current

    def open(self, feed: str, request: int) -> None:
        """Add a feed that a request opened."""
        self.feeds[feed] = {}
        self.opened_by[feed] = request

    def close(self, feed: str) -> Iterable[str]:
        """Forget a feed whose connection is gone; return what was attached to it."""
        self.opened_by.pop(feed, None)
        return self.feeds.pop(feed, {})

    def detach(self, feed: str, rollout_id: str) -> None:
        """Detach a rollout from a feed that has reported its end."""
        self.feeds.get(feed, {}).pop(rollout_id, None)
        self.ended[feed, rollout_id] = trio.current_time()

    def learn(self, request: _Request, exchange: Exchange) -> None:
        """Remember the lease tokens in the answer to an admission."""
        if request.route is Route.ADMIT and exchange.status == httpx.codes.ACCEPTED:
            admission = json.loads(exchange.body)
            self._admitted(admission)
        elif request.route is Route.BATCH and exchange.status == httpx.codes.OK:
            answer = json.loads(exchange.body)
            for outcome in answer["outcomes"]:
                if outcome["status_code"] == httpx.codes.ACCEPTED:
                    self._admitted(outcome["admission"])
                    about = request.feed, outcome["admission"]["rollout_id"]
                    # Its end may have been told even before the batch was answered.
                    if answer["attached"] and self.ended.get(about, -1.0) < request.arrived_at:
                        self.attach(*about)

    def _admitted(self, admission: dict[str, Any]) -> None:
        if self.tokens.get(admission["rollout_id"]) == admission["polling_lease_token"]:
            return  # it was admitted before, and asked for again
        self.tokens[admission["rollout_id"]] = admission["polling_lease_token"]
        self.admissions[admission["rollout_id"]] += 1
        self.polled.pop(admission["rollout_id"], None)

    def buffered(self, request: _Request, exchange: Exchange, *, stale: bool, whole: bool) -> bytes:
        """Return the body of an answer; of the first one if it is to be stale."""
        if not whole and request.route is Route.ADMIT and b'"extensions"' in exchange.body:
            admission = json.loads(exchange.body)
            offered = admission["extensions"]
            admission["extensions"] = [name for name in offered if name in _NOT_FOR_FEEDS]
            return json.dumps(admission).encode()
        if request.route is not Route.POLL or exchange.status != httpx.codes.OK:
            return exchange.body
        first = self.polled.setdefault(request.rollout_id, exchange.body)
        return first if stale else exchange.body


class SimulatedTransport(httpx.AsyncBaseTransport):
    """Connects an `httpx.AsyncClient` to a `SimulatedServer`.

    Args:
        server: Who answers.
        plan: Decides what happens to each request.
        trace: Where to record.
    """

    def __init__(self, server: SimulatedServer, plan: FaultPlan, trace: Trace) -> None:
        self.server = server
        self.plan = plan
        self.trace = trace
        self.client = 1
        self.feed = False
        self.memory = _Memory()
        self.link = Link()

    def token_of_another(self, rollout_id: str) -> str | None:
        """Return the lease token of the latest other rollout, if there is any."""
        others = (token for name, token in self.memory.tokens.items() if name != rollout_id)
        return next(reversed([*others]), None)

    def of_another_client(self, number: int | None = None) -> Self:
        """Return the same network, as another client process is connected to it."""
        other = copy.copy(self)
        other.client = self.client + 1 if number is None else number
        return other

    def with_feed(self) -> Self:
        """Return the same network, as one that lets the extensions of a server through."""
        other = copy.copy(self)
        other.feed = True
        return other

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Deliver one request as its fate says.

        Raises:
            httpx.TransportError: What a real network would make of that fate.
        """
        body = await request.aread()
        this = _describe(request, body, next(self.memory.numbers))
        if this.route is Route.RENEW:
            this.many = dict.fromkeys(self.memory.attached(this.feed), "")
        fate = self.plan.fate(this.route)
        self.record("client", "sent", this, self.memory.keys(this), fault=str(fate.fault))
        try:
            if this.route is Route.FEED:
                return await self._open_feed(this, fate)
            response = await self._deliver(this, fate)
        except httpx.TransportError as error:
            self.record("client", "failed", this, error=type(error).__name__)
            raise
        except trio.Cancelled:
            self.record("client", "gave-up", this)
            raise
        detail = response.extensions.get("detail")
        if detail is None:
            detail = _detail_of(response.status_code, response.content)
        each = _outcomes(this, response.status_code, response.content)
        self.record("client", "answered", this, each, status=response.status_code, **detail)
        return response

    async def _open_feed(self, this: _Request, fate: Fate) -> httpx.Response:
        """Deliver a request for a feed; its answer is delivered as it is read."""
        response = await self._reach(this, fate)
        if response is not None:
            self.record("client", "answered", this, status=response.status_code)
            return response
        exchange = Exchange(streamed=True, write_sec=fate.back_sec)
        if self.server.start(_scope(this.raw), this.body, exchange) is None:
            raise _nobody_listens(this.raw)
        self._record_arrival(this, self.server.number)
        stream = _FeedStream(self, this, fate, exchange, self.server.number)
        await stream.open()
        return httpx.Response(
            exchange.status, headers=_headers(exchange), stream=stream, request=this.raw
        )

    async def _reach(self, this: _Request, fate: Fate) -> httpx.Response | None:
        """Bring a request to the server, or return what a gateway answers in its place.

        An admission that is given up on its way arrives all the same, and nobody waits for it.
        """
        arrives_at = trio.current_time() + fate.out_sec
        try:
            await trio.sleep_until(arrives_at)
            if self.link.healed is not None:
                with trio.move_on_after(_timeout_sec(this.raw, "connect")):
                    await self.link.passable()
        except trio.Cancelled:
            if this.route in _ARRIVES_IN_VAIN and fate.fault not in _NEVER_SENT:
                self.server.spawn(self._arrive_in_vain, this, fate, arrives_at)
            raise
        if self.link.healed is not None:
            raise httpx.ConnectTimeout("the server cannot be reached", request=this.raw)
        if fate.fault is Fault.REFUSED:
            raise httpx.ConnectError("connection refused", request=this.raw)
        if fate.fault is Fault.LOST_BEFORE:
            raise httpx.WriteError("connection reset", request=this.raw)
        if fate.fault in {Fault.GATEWAY, Fault.BUSY}:
            return _gateway(this.raw, fate)
        if this.route is Route.FEED and fate.fault is Fault.FOREIGN:
            return httpx.Response(200, content=_FOREIGN + b"\n", request=this.raw)
        return None

    async def _deliver(self, this: _Request, fate: Fate) -> httpx.Response:
        foreign = await self._reach(this, fate)
        if foreign is not None:
            return foreign
        response: httpx.Response | None = None
        with trio.move_on_after(_timeout_sec(this.raw, "read")):
            response = await self._exchange(this, fate)
        if response is None:
            raise httpx.ReadTimeout("the server did not answer in time", request=this.raw)
        if fate.fault is Fault.TRICKLE:
            await trio.sleep(fate.after_sec * _TRICKLES)
        return response

    async def _arrive_in_vain(self, this: _Request, fate: Fate, arrives_at: float) -> None:
        """Bring a request to the server whose connection is closed as it arrives."""
        await trio.sleep_until(arrives_at)
        await self.link.passable()
        steps = this.number % _STEPS
        fate = evolve(fate, fault=Fault.LOST_DURING, after_sec=0.0, after_steps=steps)
        with suppress(httpx.TransportError):
            await self._exchange(this, fate)

    async def _exchange(self, this: _Request, fate: Fate) -> httpx.Response:
        exchange = self.server.start(_scope(this.raw), this.body)
        if exchange is None:
            raise _nobody_listens(this.raw)
        this.arrived_at = trio.current_time()
        if this.route is Route.RENEW:  # a batch may have attached more on the way
            this.many = dict.fromkeys(self.memory.attached(this.feed), "")
        number = self.server.number
        self._record_arrival(this, number)
        try:
            await self._wait(this, fate, exchange)
        finally:
            if not exchange.complete:
                self.record("network", "disconnected", this, process=number)
            exchange.disconnect()
        status, detail = exchange.status, _detail_of(exchange.status, exchange.body)
        each = _outcomes(this, status, exchange.body, self.memory.opened_by)
        for rollout_id, token in _tokens(this, status, exchange.body).items():
            each.setdefault(rollout_id, {})["token"] = self.memory.number_of(token)
        self.record(
            "network", "server-answered", this, each, status=status, process=number, **detail
        )
        self.memory.learn(this, exchange)
        stale = fate.fault is Fault.STALE
        body = self.memory.buffered(this, exchange, stale=stale, whole=self.feed)
        if fate.fault is Fault.LOST_AFTER:
            raise httpx.RemoteProtocolError("the server closed the connection", request=this.raw)
        if fate.fault is Fault.SILENCE:
            await trio.sleep_forever()
        await trio.sleep(fate.back_sec + (fate.after_sec if fate.fault is Fault.LATE else 0.0))
        await self.link.passable()
        response = _answer(this.raw, fate, exchange, body)
        if response.content == exchange.body:
            response.extensions["detail"] = detail  # need not be read out of it again
        return response

    async def _wait(self, this: _Request, fate: Fate, exchange: Exchange) -> None:
        """Wait for the answer, or for the loss of the connection."""
        if fate.fault is Fault.LOST_DURING:
            with trio.move_on_after(fate.after_sec):
                await exchange.over.wait()
            for _ in range(fate.after_steps):
                await trio.lowlevel.checkpoint()
            if not exchange.complete:
                raise httpx.ReadError("connection reset", request=this.raw)
        await exchange.over.wait()
        if not exchange.complete:
            raise httpx.RemoteProtocolError("the server process is gone", request=this.raw)

    def _record_arrival(self, this: _Request, process: int) -> None:
        each: dict[str, dict[str, Any]] = {}
        keys = self.memory.keys(this)
        for about in this.about:
            each[about] = {"lease": self.memory.lease(this, about), **keys.get(about, _NOTHING)}
            if about in this.seen:
                each[about]["seen"] = this.seen[about]
        self.record("network", "arrived", this, each, lease="", process=process)

    def record(
        self,
        who: str,
        what: str,
        this: _Request,
        each: Mapping[str, dict[str, Any]] = _NOTHING,
        **detail: Any,
    ) -> None:
        """Record an event for each rollout that the request is about, with the details of each."""
        for rollout_id in this.about:
            more = each.get(rollout_id)
            self.record_one(who, what, this, rollout_id, **(detail | more if more else detail))

    def record_one(
        self, who: str, what: str, this: _Request, rollout_id: str, **detail: Any
    ) -> None:
        """Record an event of a request for one rollout."""
        if self.client > 1:
            detail["client"] = self.client
        self.trace.add(who, what, rollout_id, route=str(this.route), request=this.number, **detail)


@define(eq=False, repr=False)
class _FeedStream(httpx.AsyncByteStream):
    """The answer to a request for a feed, chunk by chunk.

    Its lines are recorded where the server writes them, and where they arrive.

    Attributes:
        network: The network that it crosses.
        request: The request.
        fate: What happens on the way.
        exchange: Where the server puts what it sends.
        process: The number of the server process.
    """

    network: SimulatedTransport
    request: _Request
    fate: Fate
    exchange: Exchange
    process: int
    _token: str = ""
    _rest: bytes = b""
    _lost_at: float = math.inf
    _taken: int = 0
    _over: bool = False
    _lost: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.exchange.on_write = self._record_written
        if self.fate.fault is Fault.LOST_DURING:
            self._lost_at = trio.current_time() + self.fate.after_sec

    @property
    def _timeout_sec(self) -> float:
        return _timeout_sec(self.request.raw, "read")

    async def open(self) -> None:
        """Wait for the head of the answer, which a gateway in between may hold back.

        Raises:
            httpx.TransportError: No answer came in time.
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
            times = _TRICKLES if self.fate.fault is Fault.TRICKLE else 1.0
            held_sec = self.fate.after_sec * times
            await trio.sleep(min(held_sec, self._timeout_sec))
            if held_sec > self._timeout_sec:
                raise httpx.ReadTimeout("the answer is held back", request=self.request.raw)

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        """Yield what arrives.

        Raises:
            httpx.TransportError: What a real network would make of the fate.
        """
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                self._record_arrived(chunk)
                yield chunk

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                chunk = await self._next()
            except httpx.TransportError as error:
                self._end("failed", type(error).__name__)
                raise
            if chunk is None:
                self._end("failed", "ended")
                return
            cut = self.fate.fault is Fault.TRUNCATED and self._taken > 1
            yield chunk[: len(chunk) // 2] if cut else chunk
            if cut or (self.fate.fault is Fault.LOST_AFTER and self._taken == 1):
                self._end("failed", "RemoteProtocolError")
                self._leave()
                raise httpx.RemoteProtocolError("the answer broke off", request=self.request.raw)

    async def _next(self, *, head: bool = False) -> bytes | None:
        """Wait for the next chunk, ``None`` at the end; or for the head of the answer alone."""
        until = trio.current_time() + self._timeout_sec
        exchange, raw = self.exchange, self.request.raw
        await trio.lowlevel.checkpoint()
        while True:
            now = trio.current_time()
            if now >= self._lost_at:
                for _ in range(self.fate.after_steps):
                    await trio.lowlevel.checkpoint()
                self._leave()
                raise httpx.ReadError("connection reset", request=raw)
            healed = self.network.link.healed
            if self.fate.fault is not Fault.SILENCE and healed is None:
                if head and exchange.status:
                    return None
                if not head and self._taken < len(exchange.chunks):
                    self._taken += 1
                    return exchange.chunks[self._taken - 1]
                if exchange.over.is_set():
                    if exchange.complete:
                        return None
                    raise httpx.RemoteProtocolError("the server process is gone", request=raw)
            if now >= until:
                raise httpx.ReadTimeout("the server was silent", request=raw)
            exchange.moved = trio.Event()
            with trio.move_on_at(min(until, self._lost_at)):
                await (exchange.moved if healed is None else healed).wait()

    def _end(self, what: str, how: str) -> None:
        if not self._over:
            self._over = True
            attached = self.network.memory.attached(self._token) if what == "failed" else ()
            for about in self._about(self._lost or attached):
                self._record("client", what, about, error=how)

    def _about(self, attached: Iterable[str]) -> Iterable[str]:
        return dict.fromkeys((*self.request.about, *attached))

    def _leave(self) -> None:
        """Tell the server that the connection is gone, and forget the feed."""
        if self.exchange.over.is_set() or self.exchange.gone.is_set():
            return
        self._lost = list(self.network.memory.close(self._token))
        for about in self._about(self._lost):
            self._record("network", "disconnected", about, process=self.process)
        self.exchange.disconnect()

    async def aclose(self) -> None:
        """Close the connection; the server learns of it, unless nothing gets through."""
        self._end("gave-up", "closed")
        if self.fate.fault is not Fault.SILENCE:
            self._leave()
        await trio.lowlevel.checkpoint()

    # --- recording ----------------------------------------------------------------------------

    def _record_written(self, chunk: bytes) -> None:
        """Record what the server writes, for each rollout that it is about."""
        memory, status = self.network.memory, self.exchange.status
        if status != httpx.codes.OK:
            for rollout_id in self.request.many or ():
                self._record_answer(rollout_id)
            return
        for content, line in _lines(chunk):
            if "feed" in content:
                self._record_opening(content)
            for rollout_id in content.get("taken_over", ()):
                self._record_answer(rollout_id, taken_over=True)
            if "rollout_id" in content:
                rollout_id = content["rollout_id"]
                detail = _detail_of(status, line)
                if memory.is_earlier(self._token, rollout_id):
                    detail["earlier"] = True
                if "digest" in detail:
                    memory.detach(self._token, rollout_id)
                self._record_answer(rollout_id, **detail)

    def _record_opening(self, hello: dict[str, Any]) -> None:
        self._token = hello["feed"]
        self.network.memory.open(self._token, self.request.number)
        for rollout_id in self.request.many or ():
            refused = rollout_id in hello["refused"]
            if not refused:
                self.network.memory.attach(self._token, rollout_id)
            write_sec = self.exchange.write_sec
            self._record_answer(rollout_id, refused=refused, write_sec=write_sec)

    def _record_arrived(self, chunk: bytes) -> None:
        """Record what the client reads, for each rollout that it is about."""
        status = self.exchange.status
        if status != httpx.codes.OK:
            self.network.record("client", "answered", self.request, status=status)
            return
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for content, line in _lines(b"\n".join(lines)):
            if "feed" in content:
                for rollout_id in self.request.many or ():
                    refused = rollout_id in content["refused"]
                    self._record("client", "answered", rollout_id, status=status, refused=refused)
            elif "rollout_id" in content:
                detail = _detail_of(status, line)
                self._record("client", "told", content["rollout_id"], status=status, **detail)

    def _record_answer(self, rollout_id: str, **detail: Any) -> None:
        about = {"process": self.process, "status": self.exchange.status, **detail}
        self._record("network", "server-answered", rollout_id, **about)

    def _record(self, who: str, what: str, rollout_id: str, **detail: Any) -> None:
        self.network.record_one(who, what, self.request, rollout_id, **detail)


def _lines(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the lines of a feed, parsed and as they are; heartbeats are empty ones."""
    for line in data.splitlines():
        if line:
            yield json.loads(line), line


def _detail_of(status: int, body: bytes) -> dict[str, Any]:
    """Return the part of an answer, or of a line of a feed, that checks look at."""
    if status != httpx.codes.OK:
        return {}
    try:
        content = json.loads(body)
    except ValueError:
        return {"unreadable": True}
    if not isinstance(content, dict) or "status" not in content:
        return {}
    detail = {
        "state": content["status"],
        "started": content.get("agent_started_at"),
        "about": content.get("rollout_id"),
    }
    if content["status"] in _TERMINAL:
        detail["category"] = content.get("err_category")
        detail["digest"] = hashlib.sha256(body).hexdigest()[:12]
        detail["reward"] = (content.get("sample") or {}).get("reward")
    return detail


def _nobody_listens(request: httpx.Request) -> httpx.ConnectError:
    """Return the error of a connection to a machine on which no server runs."""
    error = httpx.ConnectError("connection refused", request=request)
    error.__cause__ = ConnectionRefusedError()
    return error


def _timeout_sec(request: httpx.Request, which: str) -> float:
    """Return how long the client lets a ``connect`` or a ``read`` take."""
    timeout_sec = request.extensions.get("timeout", {}).get(which)
    return math.inf if timeout_sec is None else float(timeout_sec)


def _headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer, without the length of a body that faults may cut."""
    return [(name, value) for name, value in exchange.headers if name != b"content-length"]


def _describe(request: httpx.Request, body: bytes, number: int) -> _Request:
    raw_path = request.url.raw_path.decode("ascii").partition("?")[0]
    parts = [unquote(part) for part in raw_path.strip("/").split("/")]
    route, rollout_id = Route.OTHER, ""
    many: dict[str, str] | None = None
    feed = ""
    seen, keys = _NO_SEEN, _NO_KEYS
    if parts == ["health"]:
        route = Route.HEALTH
    elif parts == ["rollout", "cancel"]:
        content = json.loads(body)
        route = Route.CANCEL
        rollout_id = ",".join(content.get("ids") or [])
        keys = content.get("admission_keys") or _NO_KEYS
    elif parts == ["rollout"]:
        content = json.loads(body)
        route, rollout_id = Route.ADMIT, content["rollout_id"]
        keys = _keys([content])
    elif len(parts) == 3:  # noqa: PLR2004 - rollout, id, result
        route, rollout_id = Route.POLL, parts[1]
        seen = {rollout_id: request.headers.get(SEEN_STATE_HEADER)}
    elif parts == ["rollouts"]:
        content = json.loads(body)
        route, feed = Route.BATCH, content.get("feed") or ""
        many = {item["rollout_id"]: "" for item in content["rollouts"]}
        keys = _keys(content["rollouts"])
    elif parts == ["rollouts", "start"]:
        leases = json.loads(body)["rollouts"]
        route = Route.START
        many = {lease["rollout_id"]: lease["polling_lease_token"] for lease in leases}
    elif parts == ["rollouts", "feed"]:
        leases = json.loads(body)["leases"]
        route = Route.FEED
        many = {lease["rollout_id"]: lease["polling_lease_token"] for lease in leases}
        seen = {lease["rollout_id"]: lease["seen"] for lease in leases}
    elif parts == ["rollouts", "renew"]:
        route, feed = Route.RENEW, json.loads(body)["feed"] or ""
    token = request.headers.get(POLLING_LEASE_HEADER, "")
    return _Request(request, body, number, route, rollout_id, token, many, feed, seen, keys)


def _keys(requests: Iterable[dict[str, Any]]) -> Mapping[str, str]:
    """Return the admission keys of requests, by rollout."""
    return {
        item["rollout_id"]: item["admission_key"] for item in requests if item.get("admission_key")
    }


def _tokens(this: _Request, status: int, body: bytes) -> dict[str, str]:
    """Return the lease tokens in the answer to an admission, by rollout."""
    if this.route is Route.ADMIT and status == httpx.codes.ACCEPTED:
        admissions = [json.loads(body)]
    elif this.route is Route.BATCH and status == httpx.codes.OK:
        outcomes = json.loads(body)["outcomes"]
        admissions = [outcome["admission"] for outcome in outcomes if "admission" in outcome]
    else:
        return {}
    return {admission["rollout_id"]: admission["polling_lease_token"] for admission in admissions}


def _outcomes(
    this: _Request, status: int, body: bytes, opened_by: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the outcome of each rollout, out of the answer to a request about many.

    For a batch that is its status, and which feed reports it from then on, if one does.
    """
    if this.route not in {Route.BATCH, Route.CANCEL, Route.START} or status != httpx.codes.OK:
        return {}
    try:
        answer = json.loads(body)
        if this.route is Route.CANCEL:
            return {this.rollout_id: {"dispositions": answer["dispositions"]}}
        outcomes = answer["outcomes"]
    except (ValueError, KeyError):
        return {}
    feed = (opened_by or {}).get(this.feed) if answer.get("attached") else None
    more = {} if feed is None else {"feed": feed}
    return {
        rollout_id: {"status": outcome["status_code"], **more}
        for rollout_id, outcome in zip(this.many or (), outcomes, strict=True)
    }


def _scope(request: httpx.Request) -> dict[str, Any]:
    path, _, query = request.url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("simulated", 0),
        "server": (request.url.host, request.url.port),
        "extensions": {},
    }


def _gateway(request: httpx.Request, fate: Fate) -> httpx.Response:
    if fate.fault is Fault.BUSY:
        headers = {} if fate.retry_after is None else {"Retry-After": fate.retry_after}
        return httpx.Response(429, headers=headers, content=b"{}", request=request)
    content, kind = _GATEWAY_BODIES[fate.body]
    return httpx.Response(
        fate.status, headers={"Content-Type": kind}, content=content, request=request
    )


def _answer(
    request: httpx.Request, fate: Fate, exchange: Exchange, content: bytes
) -> httpx.Response:
    if fate.fault is Fault.TRUNCATED:
        content = content[: len(content) // 2]
    elif fate.fault is Fault.FOREIGN:
        content = _FOREIGN
    return httpx.Response(
        exchange.status, headers=_headers(exchange), content=content, request=request
    )
