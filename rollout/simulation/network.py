"""An httpx transport that delivers requests to a simulated server, with faults in between.

By default the network knows the routes of the protocol and delivers answers as a whole, like a
gateway that buffers them, and does not let through what a server offers beyond that. With feeds
it does: a feed is delivered chunk by chunk. A request that is about many rollouts is recorded
once for each of them.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import unquote

import httpx
import trio
from attrs import define, field

from rollout.simulation.faults import Fate, Fault, FaultPlan, Route
from rollout.simulation.news import FeedDelivery, news_of
from rollout.simulation.server import Exchange, SimulatedServer
from rollout.simulation.streams import TRICKLES, SimulatedStream
from rollout.simulation.trace import Trace
from rollout.types import POLLING_LEASE_HEADER, SEEN_STATE_HEADER

__all__ = ["SimulatedTransport"]

_FOREIGN = b'{"rollout_id":"somebody-elses","status":"running"}'
_NOTHING: Mapping[str, dict[str, Any]] = {}
_NO_SEEN: Mapping[str, str | None] = {}
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
    arrived_at: float = 0.0

    @property
    def about(self) -> Iterable[str]:
        """Which rollouts it is about; one empty id if about none."""
        return self.many or (self.rollout_id,)


@define(eq=False)
class _Memory:
    """What the network as a whole has seen.

    Attributes:
        numbers: Counts the requests.
        tokens: The lease token of each rollout, from its latest admission.
        polled: The body of the first good answer to a poll, for each rollout.
        admissions: How many admissions of each id there were.
        feeds: Which rollouts are attached to each open feed, by its token, and for each of
            them which admission of its id it comes from.
        opened_by: The request that opened each of those feeds, by its token.
        ended: When a feed told the end of a rollout, by its token and the id.
    """

    numbers: Iterator[int] = field(factory=lambda: itertools.count(1))
    tokens: dict[str, str] = field(factory=dict)
    polled: dict[str, bytes] = field(factory=dict)
    admissions: Counter[str] = field(factory=Counter)
    feeds: dict[str, dict[str, int]] = field(factory=dict)
    opened_by: dict[str, int] = field(factory=dict)
    ended: dict[tuple[str, str], float] = field(factory=dict)

    def lease(self, request: _Request, rollout_id: str) -> str:
        """Say whose lease token a request carries: its ``own``, an ``other``, or none."""
        if request.route is Route.RENEW:
            return "own" if rollout_id in self.attached(request.feed) else ""
        token = request.token if request.many is None else request.many[rollout_id]
        if not token:
            return ""
        return "own" if self.tokens.get(rollout_id) == token else "other"

    def attach(self, feed: str, rollout_id: str) -> None:
        """Note that a rollout is attached to a feed, and to no other one."""
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
        """Say whether what a feed tells of an id is about an earlier admission of it."""
        current = self.admissions[rollout_id]
        return self.feeds.get(feed, {}).get(rollout_id, current) < current

    def detach(self, feed: str, rollout_id: str) -> None:
        """Note that a feed told the end of a rollout, which it follows no further."""
        self.feeds.get(feed, {}).pop(rollout_id, None)
        self.ended[feed, rollout_id] = trio.current_time()

    def learn(self, request: _Request, exchange: Exchange) -> None:
        """Note the token that an admission was answered with."""
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
        self.tokens[admission["rollout_id"]] = admission["polling_lease_token"]
        self.admissions[admission["rollout_id"]] += 1
        self.polled.pop(admission["rollout_id"], None)

    def buffered(self, request: _Request, exchange: Exchange, *, stale: bool, whole: bool) -> bytes:
        """Return the body of an answer, or of the first one where it is to be stale."""
        if not whole and request.route is Route.ADMIT and b'"extensions"' in exchange.body:
            admission = json.loads(exchange.body)
            del admission["extensions"]
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
        self._memory = _Memory()

    def token_of_another(self, rollout_id: str) -> str | None:
        """Return the lease token of the latest rollout that is another one, if there is any."""
        others = (token for name, token in self._memory.tokens.items() if name != rollout_id)
        return next(reversed([*others]), None)

    def of_another_client(self) -> Self:
        """Return the same network, as another client process is connected to it."""
        other = copy.copy(self)
        other.client = self.client + 1
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
        this = _describe(request, body, next(self._memory.numbers))
        if this.route is Route.RENEW:
            this.many = dict.fromkeys(self._memory.attached(this.feed), "")
        fate = self.plan.fate(this.route)
        self._record("client", "sent", this, fault=str(fate.fault))
        try:
            if this.route is Route.FEED:
                return await self._open_feed(this, fate)
            response = await self._deliver(this, fate)
        except httpx.TransportError as error:
            self._record("client", "failed", this, error=type(error).__name__)
            raise
        except trio.Cancelled:
            self._record("client", "gave-up", this)
            raise
        news = response.extensions.get("news")
        if news is None:
            news = news_of(response.status_code, response.content)
        each = _outcomes(this, response.status_code, response.content)
        self._record("client", "answered", this, each, status=response.status_code, **news)
        return response

    async def _open_feed(self, this: _Request, fate: Fate) -> httpx.Response:
        """Deliver a request for a feed; its answer is delivered as it is read."""
        response = await self._reach(this, fate)
        if response is not None:
            self._record("client", "answered", this, status=response.status_code)
            return response
        exchange = Exchange(streamed=True, write_sec=fate.back_sec)
        if self.server.start(_scope(this.raw), this.body, exchange) is None:
            raise httpx.ConnectError("connection refused", request=this.raw)
        stream = self._stream(this, fate, exchange)
        await stream.open()
        headers = [(k, v) for k, v in exchange.headers if k.lower() != b"content-length"]
        return httpx.Response(exchange.status, headers=headers, stream=stream, request=this.raw)

    def _stream(self, this: _Request, fate: Fate, exchange: Exchange) -> SimulatedStream:
        """Record that a request for a feed arrives, and return the answer that begins."""
        delivery = FeedDelivery(self._memory, this.many or {}, exchange, this.number)
        number = self.server.number
        self._record_arrival(this, number)

        def written(chunk: bytes) -> None:
            for about, news in delivery.written(chunk):
                self._one("network", "server-answered", this, about, process=number, **news)

        def arrived(chunk: bytes) -> None:
            for what, about, news in delivery.arrived(chunk):
                self._one("client", what, this, about, **news)

        def gone() -> None:
            for about in dict.fromkeys((*this.about, *delivery.close())):
                self._one("network", "disconnected", this, about, process=number)

        def ended(how: str) -> None:
            what = "gave-up" if how == "closed" else "failed"
            self._record("client", what, this, error=how)

        exchange.on_write = written
        timeout_sec = trio_timeout(this.raw.extensions.get("timeout", {}).get("read"))
        return SimulatedStream(this.raw, exchange, fate, timeout_sec, arrived, ended, gone)

    async def _reach(self, this: _Request, fate: Fate) -> httpx.Response | None:
        """Bring a request to the server, or return what a gateway answers in its place."""
        await trio.sleep(fate.out_sec)
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
        timeout = this.raw.extensions.get("timeout", {}).get("read")
        response: httpx.Response | None = None
        with trio.move_on_after(trio_timeout(timeout)):
            response = await self._exchange(this, fate)
        if response is None:
            raise httpx.ReadTimeout("the server did not answer in time", request=this.raw)
        if fate.fault is Fault.TRICKLE:
            await trio.sleep(fate.after_sec * TRICKLES)
        return response

    async def _exchange(self, this: _Request, fate: Fate) -> httpx.Response:
        exchange = self.server.start(_scope(this.raw), this.body)
        if exchange is None:
            raise httpx.ConnectError("connection refused", request=this.raw)
        this.arrived_at = trio.current_time()
        number = self.server.number
        self._record_arrival(this, number)
        try:
            await self._wait(this, fate, exchange)
        finally:
            if not exchange.complete:
                self._record("network", "disconnected", this, process=number)
            exchange.disconnect()
        news = news_of(exchange.status, exchange.body)
        each = _outcomes(this, exchange.status, exchange.body, self._memory.opened_by)
        self._record(
            "network", "server-answered", this, each, status=exchange.status, process=number, **news
        )
        self._memory.learn(this, exchange)
        stale = fate.fault is Fault.STALE
        body = self._memory.buffered(this, exchange, stale=stale, whole=self.feed)
        if fate.fault is Fault.LOST_AFTER:
            raise httpx.RemoteProtocolError("the server closed the connection", request=this.raw)
        if fate.fault is Fault.SILENCE:
            await trio.sleep_forever()
        await trio.sleep(fate.back_sec + (fate.after_sec if fate.fault is Fault.LATE else 0.0))
        response = _answer(this.raw, fate, exchange, body)
        if response.content == exchange.body:
            response.extensions["news"] = news  # need not be read out of it again
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
        for about in this.about:
            each[about] = {"lease": self._memory.lease(this, about)}
            if about in this.seen:
                each[about]["seen"] = this.seen[about]
        self._record("network", "arrived", this, each, lease="", process=process)

    def _record(
        self,
        who: str,
        what: str,
        this: _Request,
        each: Mapping[str, dict[str, Any]] = _NOTHING,
        **detail: Any,
    ) -> None:
        """Record it for every rollout that the request is about, with what is said of each."""
        for rollout_id in this.about:
            more = each.get(rollout_id)
            self._one(who, what, this, rollout_id, **(detail | more if more else detail))

    def _one(self, who: str, what: str, this: _Request, rollout_id: str, **detail: Any) -> None:
        if self.client > 1:
            detail["client"] = self.client
        self.trace.add(who, what, rollout_id, route=str(this.route), request=this.number, **detail)


def trio_timeout(timeout_sec: float | None) -> float:
    """Return a timeout of httpx as trio takes it."""
    return float("inf") if timeout_sec is None else timeout_sec


def _describe(request: httpx.Request, body: bytes, number: int) -> _Request:
    raw_path = request.url.raw_path.decode("ascii").partition("?")[0]
    parts = [unquote(part) for part in raw_path.strip("/").split("/")]
    route, rollout_id = Route.OTHER, ""
    many: dict[str, str] | None = None
    feed = ""
    seen = _NO_SEEN
    if parts == ["health"]:
        route = Route.HEALTH
    elif parts == ["rollout", "cancel"]:
        route = Route.CANCEL
        rollout_id = ",".join(json.loads(body).get("ids") or [])
    elif parts == ["rollout"]:
        route, rollout_id = Route.ADMIT, json.loads(body)["rollout_id"]
    elif len(parts) == 3:  # noqa: PLR2004 - rollout, id, result
        route, rollout_id = Route.POLL, parts[1]
        seen = {rollout_id: request.headers.get(SEEN_STATE_HEADER)}
    elif parts == ["rollouts"]:
        content = json.loads(body)
        route, feed = Route.BATCH, content.get("feed") or ""
        many = {item["rollout_id"]: "" for item in content["rollouts"]}
    elif parts == ["rollouts", "feed"]:
        leases = json.loads(body)["leases"]
        route = Route.FEED
        many = {lease["rollout_id"]: lease["polling_lease_token"] for lease in leases}
        seen = {lease["rollout_id"]: lease["seen"] for lease in leases}
    elif parts == ["rollouts", "renew"]:
        route, feed = Route.RENEW, json.loads(body)["feed"] or ""
    token = request.headers.get(POLLING_LEASE_HEADER, "")
    return _Request(request, body, number, route, rollout_id, token, many, feed, seen)


def _outcomes(
    this: _Request, status: int, body: bytes, opened_by: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Pick what became of each rollout out of the answer to a batch or a cancel request.

    For a batch that is its status, and which feed reports it from then on, if one does.
    """
    if this.route not in {Route.BATCH, Route.CANCEL} or status != httpx.codes.OK:
        return {}
    try:
        answer = json.loads(body)
        if this.route is Route.CANCEL:
            return {this.rollout_id: {"dispositions": answer["dispositions"]}}
        outcomes = answer["outcomes"]
    except (ValueError, KeyError):
        return {}
    feed = (opened_by or {}).get(this.feed) if answer["attached"] else None
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
    headers = [(k, v) for k, v in exchange.headers if k.lower() != b"content-length"]
    return httpx.Response(exchange.status, headers=headers, content=content, request=request)
