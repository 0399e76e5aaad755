"""A scripted server that offers the extensions, in place of the network."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from attrs import define, field

from rollout.client import RolloutClient

URL = "http://rollouts.test"
PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]
EXTENSIONS = ["batch-admission", "result-feed"]

Step = float | bytes | dict[str, Any] | Exception
Answer = httpx.Response | Exception | Callable[[Any], Awaitable[httpx.Response]]


@define(eq=False)
class Streamed(httpx.AsyncByteStream):
    """An answer that does one step after the other: waits, says a line, breaks.

    After its last step it ends, unless that is ``...``: then it is silent.
    """

    steps: list[Any]
    closed: bool = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for step in self.steps:
            if step is ...:
                await trio.sleep_forever()
            elif isinstance(step, int | float):
                await trio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            else:
                await trio.lowlevel.checkpoint()
                yield step if isinstance(step, bytes) else json.dumps(step).encode() + b"\n"

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


def hello(token: str = "feed-1", *refused: str) -> dict[str, Any]:
    return {"feed": token, "refused": list(refused), "heartbeat_sec": 30}


def line(status: str, rollout_id: str = "r", **more: Any) -> dict[str, Any]:
    return {"rollout_id": rollout_id, "status": status, **more}


def stream(*steps: Any) -> Answer:
    """A feed that says hello by its first step."""

    async def answer(_: Any) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        return httpx.Response(200, stream=Streamed(list(steps)))

    return answer


def json_answer(status: int, value: Any, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    return httpx.Response(status, json=value, headers=names)


def broken() -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError("the peer closed")


@define(eq=False)
class ScriptedServer(httpx.AsyncBaseTransport):
    """Answers each route from a script, item by item; the last item of a script repeats."""

    feeds: list[Answer] = field(factory=lambda: [stream(hello(), ...)])
    renewals: list[Answer] = field(factory=lambda: [json_answer(200, {"renewed": 1})])
    polls: list[Answer] = field(factory=lambda: [json_answer(404, {"detail": "unknown"})])
    batches: list[Answer] | None = None
    singles: list[Answer] | None = None
    wait: float = 30
    lease: float = 120
    leases: dict[str, float] = field(factory=dict)
    extensions: list[str] = field(factory=lambda: [*EXTENSIONS])
    calls: list[tuple[float, str, Any]] = field(factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = b"".join([data async for data in request.stream])  # type: ignore[union-attr]
        await trio.lowlevel.checkpoint()
        path = request.url.path
        body = json.loads(content) if content else None
        self.calls.append((trio.current_time(), f"{request.method} {path}", body))
        script = self._script(path)
        if script is None:
            return self.admitted(body)
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return httpx.Response(
                answer.status_code, headers=answer.headers, content=answer.content
            )
        return await answer(body)

    def _script(self, path: str) -> list[Answer] | None:
        if path.endswith("/result"):
            return self.polls
        return {
            "/rollouts/feed": self.feeds,
            "/rollouts/renew": self.renewals,
            "/rollouts": self.batches,
            "/rollout": self.singles,
        }[path]

    def admission(self, rollout_id: str) -> dict[str, Any]:
        return {
            "rollout_id": rollout_id,
            "status": "queued",
            "polling_lease_token": f"lease-of-{rollout_id}-{len(self.calls)}",
            "result_wait_timeout_sec": self.wait,
            "polling_lease_timeout_sec": self.leases.get(rollout_id, self.lease),
            "extensions": self.extensions,
        }

    def outcomes(self, body: Any, **other: dict[str, Any]) -> dict[str, Any]:
        """All admitted, but for *other* outcomes by id."""
        return {
            "outcomes": [
                other.get(
                    item["rollout_id"],
                    {"status_code": 202, "admission": self.admission(item["rollout_id"])},
                )
                for item in body["rollouts"]
            ],
            "attached": "feed" in body,
        }

    def admitted(self, body: Any) -> httpx.Response:
        if "rollouts" in body:
            return httpx.Response(200, json=self.outcomes(body))
        return httpx.Response(202, json=self.admission(body["rollout_id"]))

    def times(self, route: str) -> list[float]:
        return [at for at, called, _ in self.calls if called == route]

    def bodies(self, route: str) -> list[Any]:
        return [body for _, called, body in self.calls if called == route]

    @property
    def polled(self) -> list[str]:
        return [called.split("/")[2] for _, called, _ in self.calls if called.endswith("/result")]


FEED = "POST /rollouts/feed"
RENEW = "POST /rollouts/renew"
BATCH = "POST /rollouts"
SINGLE = "POST /rollout"


@asynccontextmanager
async def client_of(server: httpx.AsyncBaseTransport, **options: Any) -> Any:
    """An entered client of the scripted server, which must leave nothing in its tables."""
    with trio.fail_after(10_000):  # of simulated time: a test that hangs is to fail
        async with (
            httpx.AsyncClient(transport=server) as http,
            RolloutClient(url=URL, http_client=http, **options) as client,
        ):
            extensions = client._extensions
            yield client
    assert_empty(extensions)


def assert_empty(extensions: Any) -> None:
    """Nobody is followed, expected or queued."""
    assert not extensions._feed._followed
    assert not extensions._feed._missing
    assert not extensions._feed._expected
    assert not extensions._batcher._queue


async def run(client: RolloutClient, rollout_id: str = "r", **fields: Any) -> Any:
    return await client.run_rollout(PROMPT, "http://chat/v1", rollout_id, **fields)


async def start(client: RolloutClient, rollout_id: str = "r", **fields: Any) -> Any:
    return await client.run_rollout_async(PROMPT, "http://chat/v1", rollout_id, **fields)
