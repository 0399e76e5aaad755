"""A scripted rollout server in place of the network, for tests on a MockClock."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from attrs import define, field, frozen

from rollout.client import RolloutClient
from rollout.types import POLLING_LEASE_HEADER, SEEN_STATE_HEADER

URL = "http://rollouts.test"
TOKEN = "the-lease-token"
PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]

Answer = httpx.Response | Exception | Callable[[httpx.Request], Awaitable[httpx.Response]]


@frozen
class Call:
    """One request, and when it came."""

    at: float
    method: str
    path: str
    headers: httpx.Headers
    body: bytes

    @property
    def seen(self) -> str | None:
        return self.headers.get(SEEN_STATE_HEADER)

    @property
    def token(self) -> str | None:
        return self.headers.get(POLLING_LEASE_HEADER)


@define(eq=False)
class FakeServer(httpx.AsyncBaseTransport):
    """Answers each route from a script, item by item; the last item of a script repeats.

    An item is a response, an exception to raise, or an async function of the request.
    """

    admissions: list[Answer] = field(factory=lambda: [admitted()])
    polls: list[Answer] = field(factory=lambda: [result("success")])
    cancels: list[Answer] = field(factory=lambda: [httpx.Response(200, json={"dispositions": {}})])
    healths: list[Answer] = field(factory=lambda: [healthy()])
    trajectories: list[Answer] = field(factory=lambda: [httpx.Response(200, json={})])
    calls: list[Call] = field(factory=list)
    closed: bool = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        call = Call(
            trio.current_time(),
            request.method,
            request.url.raw_path.decode(),
            request.headers,
            b"".join([data async for data in request.stream]),  # what would go over the wire
        )
        script = self._script(call)
        self.calls.append(call)
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            # A fresh one, since a response can be read once.
            return httpx.Response(
                answer.status_code, headers=answer.headers, content=answer.content
            )
        return await answer(request)

    def _script(self, call: Call) -> list[Answer]:
        path = call.path.split("/")[1:]
        if path[-1] == "trajectory":
            return self.trajectories
        if call.method == "GET":
            return self.healths if path == ["health"] else self.polls
        return self.cancels if path == ["rollout", "cancel"] else self.admissions

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()

    def times(self, route: str = "result") -> list[float]:
        """When the requests whose path ends like that came."""
        return [call.at for call in self.calls if call.path.endswith(route)]

    @property
    def poll_calls(self) -> list[Call]:
        return [call for call in self.calls if call.path.endswith("/result")]


@asynccontextmanager
async def client_of(server: FakeServer, **options: Any) -> AsyncGenerator[RolloutClient, None]:
    """An entered client that talks to the fake server."""
    async with (
        httpx.AsyncClient(transport=server) as http,
        RolloutClient(url=URL, http_client=http, **options) as client,
    ):
        yield client


def bare_client(server: httpx.AsyncBaseTransport, **options: Any) -> RolloutClient:
    """A client that is not entered."""
    return RolloutClient(url=URL, http_client=httpx.AsyncClient(transport=server), **options)


async def run(client: RolloutClient, rollout_id: str = "r", **fields: Any) -> Any:
    return await client.run_rollout(PROMPT, "http://chat/v1", rollout_id, **fields)


async def start(client: RolloutClient, rollout_id: str = "r", **fields: Any) -> Any:
    return await client.run_rollout_async(PROMPT, "http://chat/v1", rollout_id, **fields)


# --- answers --------------------------------------------------------------------------------


def admitted(rollout_id: str = "r", *, wait: Any = 30.0, lease: Any = 120.0, **more: Any) -> Any:
    return httpx.Response(
        202,
        json={
            "rollout_id": rollout_id,
            "status": "queued",
            "polling_lease_token": TOKEN,
            "result_wait_timeout_sec": wait,
            "polling_lease_timeout_sec": lease,
            **more,
        },
    )


def result(status: str, rollout_id: str = "r", **more: Any) -> httpx.Response:
    return httpx.Response(200, json={"rollout_id": rollout_id, "status": status, **more})


def refused(status: int, detail: Any = "no", **headers: str) -> httpx.Response:
    return httpx.Response(
        status,
        json={"detail": detail},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def healthy(active: int = 0, process_id: str = "p1", **more: Any) -> httpx.Response:
    return httpx.Response(
        200,
        json={
            "status": "ok",
            "instance_id": "i",
            "process_id": process_id,
            "lifecycle": {"accepting_rollouts": True, "active_rollouts": active},
            **more,
        },
    )


def after(seconds: float, answer: httpx.Response | Exception) -> Answer:
    """Answer (or raise) that long after the request came."""

    async def wait(_: httpx.Request) -> httpx.Response:
        await trio.sleep(seconds)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    return wait


async def silence(_: httpx.Request) -> httpx.Response:
    """Never answer."""
    await trio.sleep_forever()
    raise AssertionError


class _Trickle(httpx.AsyncByteStream):
    def __init__(self, content: bytes, gap_sec: float) -> None:
        self._content = content
        self._gap_sec = gap_sec

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for byte in self._content:
            await trio.sleep(self._gap_sec)
            yield bytes([byte])


def trickling(answer: httpx.Response, gap_sec: float) -> Answer:
    """Answer byte by byte."""

    async def trickle(_: httpx.Request) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        return httpx.Response(answer.status_code, stream=_Trickle(answer.content, gap_sec))

    return trickle
