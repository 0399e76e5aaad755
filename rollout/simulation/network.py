"""An httpx transport that delivers requests to a simulated server, with faults in between.

The network knows the routes of the protocol and delivers answers as a whole, like a gateway that
buffers them. So it does not let through what a server offers beyond that.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import unquote

import httpx
import trio
from attrs import define, field

from rollout.simulation.faults import Fate, Fault, FaultPlan, Route
from rollout.simulation.server import Exchange, SimulatedServer
from rollout.simulation.trace import Trace
from rollout.types import POLLING_LEASE_HEADER

__all__ = ["SimulatedTransport"]

_TERMINAL = {"success", "failure", "cancelled"}
_TRICKLES = 10.0
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
    """

    raw: httpx.Request
    body: bytes
    number: int
    route: Route
    rollout_id: str
    token: str


@define(eq=False)
class _Memory:
    """What the network as a whole has seen.

    Attributes:
        numbers: Counts the requests.
        tokens: The lease token of each rollout, from its latest admission.
        polled: The body of the first good answer to a poll, for each rollout.
    """

    numbers: Iterator[int] = field(factory=lambda: itertools.count(1))
    tokens: dict[str, str] = field(factory=dict)
    polled: dict[str, bytes] = field(factory=dict)

    def lease(self, request: _Request) -> str:
        """Say whose lease token a request carries: its ``own``, an ``other``, or none."""
        if not request.token:
            return ""
        return "own" if self.tokens.get(request.rollout_id) == request.token else "other"

    def learn(self, request: _Request, exchange: Exchange) -> None:
        """Note the token that an admission was answered with."""
        if request.route is Route.ADMIT and exchange.status == httpx.codes.ACCEPTED:
            admission = json.loads(exchange.body)
            self.tokens[request.rollout_id] = admission["polling_lease_token"]
            self.polled.pop(request.rollout_id, None)

    def buffered(self, request: _Request, exchange: Exchange, *, stale: bool) -> bytes:
        """Return the body of an answer, or of the first one where it is to be stale."""
        if request.route is Route.ADMIT and b'"extensions"' in exchange.body:
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
        self._memory = _Memory()

    def of_another_client(self) -> Self:
        """Return the same network, as another client process is connected to it."""
        other = copy.copy(self)
        other.client = self.client + 1
        return other

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Deliver one request as its fate says.

        Raises:
            httpx.TransportError: What a real network would make of that fate.
        """
        body = await request.aread()
        this = _describe(request, body, next(self._memory.numbers))
        fate = self.plan.fate(this.route)
        self._record("client", "sent", this, fault=str(fate.fault))
        try:
            response = await self._deliver(this, fate)
        except httpx.TransportError as error:
            self._record("client", "failed", this, error=type(error).__name__)
            raise
        except trio.Cancelled:
            self._record("client", "gave-up", this)
            raise
        news = response.extensions.get("news")
        if news is None:
            news = _news_of(response.status_code, response.content)
        self._record("client", "answered", this, status=response.status_code, **news)
        return response

    async def _deliver(self, this: _Request, fate: Fate) -> httpx.Response:
        await trio.sleep(fate.out_sec)
        if fate.fault is Fault.REFUSED:
            raise httpx.ConnectError("connection refused", request=this.raw)
        if fate.fault is Fault.LOST_BEFORE:
            raise httpx.WriteError("connection reset", request=this.raw)
        if fate.fault in {Fault.GATEWAY, Fault.BUSY}:
            return _gateway(this.raw, fate)
        timeout = this.raw.extensions.get("timeout", {}).get("read")
        with trio.move_on_after(trio_timeout(timeout)) as scope:
            response = await self._exchange(this, fate)
        if scope.cancelled_caught:
            raise httpx.ReadTimeout("the server did not answer in time", request=this.raw)
        if fate.fault is Fault.TRICKLE:
            await trio.sleep(fate.after_sec * _TRICKLES)
        return response

    async def _exchange(self, this: _Request, fate: Fate) -> httpx.Response:
        exchange = self.server.start(_scope(this.raw), this.body)
        if exchange is None:
            raise httpx.ConnectError("connection refused", request=this.raw)
        number = self.server.number
        self._record("network", "arrived", this, lease=self._memory.lease(this), process=number)
        try:
            await self._wait(this, fate, exchange)
        finally:
            if not exchange.complete:
                self._record("network", "disconnected", this, process=number)
            exchange.disconnect()
        news = _news_of(exchange.status, exchange.body)
        self._record(
            "network", "server-answered", this, status=exchange.status, process=number, **news
        )
        self._memory.learn(this, exchange)
        body = self._memory.buffered(this, exchange, stale=fate.fault is Fault.STALE)
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

    def _record(self, who: str, what: str, this: _Request, **detail: Any) -> None:
        if self.client > 1:
            detail["client"] = self.client
        self.trace.add(
            who, what, this.rollout_id, route=str(this.route), request=this.number, **detail
        )


def trio_timeout(timeout_sec: float | None) -> float:
    """Return a timeout of httpx as trio takes it."""
    return float("inf") if timeout_sec is None else timeout_sec


def _describe(request: httpx.Request, body: bytes, number: int) -> _Request:
    raw_path = request.url.raw_path.decode("ascii").partition("?")[0]
    parts = [unquote(part) for part in raw_path.strip("/").split("/")]
    route, rollout_id = Route.OTHER, ""
    if parts == ["health"]:
        route = Route.HEALTH
    elif parts == ["rollout", "cancel"]:
        route = Route.CANCEL
        rollout_id = ",".join(json.loads(body).get("ids") or [])
    elif parts == ["rollout"]:
        route, rollout_id = Route.ADMIT, json.loads(body)["rollout_id"]
    elif len(parts) == 3:  # noqa: PLR2004 - rollout, id, result
        route, rollout_id = Route.POLL, parts[1]
    token = request.headers.get(POLLING_LEASE_HEADER, "")
    return _Request(request, body, number, route, rollout_id, token)


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
        content = b'{"rollout_id":"somebody-elses","status":"running"}'
    headers = [(k, v) for k, v in exchange.headers if k.lower() != b"content-length"]
    return httpx.Response(exchange.status, headers=headers, content=content, request=request)


def _news_of(status: int, body: bytes) -> dict[str, Any]:
    """Pick out of an answer what checks look at."""
    if status != httpx.codes.OK:
        return {}
    try:
        content = json.loads(body)
    except ValueError:
        return {"unreadable": True}
    if not isinstance(content, dict) or "status" not in content:
        return {}
    news = {
        "state": content["status"],
        "started": content.get("agent_started_at"),
        "about": content.get("rollout_id"),
    }
    if content["status"] in _TERMINAL:
        news["category"] = content.get("err_category")
        news["digest"] = hashlib.sha256(body).hexdigest()[:12]
        news["reward"] = (content.get("sample") or {}).get("reward")
    return news
