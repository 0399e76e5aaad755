"""A rollout server in place of the network that does as each test says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import trio
from attrs import define, field

import rollout.evaluation.run
from rollout.client import RolloutClient

STARTED = "2026-01-01T00:00:00Z"


@define(eq=False)
class Started:
    """One rollout that was admitted."""

    row: int
    attempt: int
    body: dict[str, Any]
    cancelled: trio.Event = field(factory=trio.Event)


@define(eq=False)
class FakeRollouts(httpx.AsyncBaseTransport):
    """Rollouts that end as `end` says.

    Attributes:
        admit: Given the body of an admission; ``None`` admits it.
        end: Given a rollout; the fields of its result, a whole answer, or an exception.
        healthy: The answer to the health check.
        tries: How often each attempt was asked for, by row and attempt.
        active: The rollouts that the server would still run.
        prefixes: The prefixes of all cancel requests.
    """

    admit: Callable[[dict[str, Any]], httpx.Response | Exception | None] = lambda _: None
    end: Callable[[Started], Awaitable[dict[str, Any] | httpx.Response | Exception]] | None = None
    healthy: httpx.Response | Exception | None = None
    tries: Counter[tuple[int, int]] = field(factory=Counter)
    active: dict[str, Started] = field(factory=dict)
    prefixes: list[str] = field(factory=list)
    admission: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        data = b"".join([data async for data in request.stream])
        match request.url.path.split("/")[1:]:
            case ["health"]:
                return answer(self.healthy or httpx.Response(200, json={"status": "ok"}))
            case ["rollout"]:
                await self.admission()
                return self._admit(json.loads(data))
            case ["rollout", "cancel"]:
                return self._cancel(json.loads(data)["prefix"])
            case ["rollout", rollout_id, "result"]:
                return await self._result(rollout_id)
        return httpx.Response(404, json={"detail": "no such route"})

    def _admit(self, body: dict[str, Any]) -> httpx.Response:
        row, attempt = map(int, body["rollout_id"].split("-")[2:4])
        self.tries[row, attempt] += 1
        refusal = self.admit(body)
        if refusal is not None:
            return answer(refusal)
        assert body["rollout_id"] not in self.active
        self.active[body["rollout_id"]] = Started(row, attempt, body)
        return httpx.Response(
            202,
            json={
                "rollout_id": body["rollout_id"],
                "status": "queued",
                "polling_lease_token": "token",
                "result_wait_timeout_sec": 600,
                "polling_lease_timeout_sec": 1200,
            },
        )

    def _cancel(self, prefix: str) -> httpx.Response:
        self.prefixes.append(prefix)
        hit = [key for key in self.active if key.startswith(prefix)]
        for key in hit:
            self.active.pop(key).cancelled.set()
        dispositions = dict.fromkeys(hit, "cancelled_running")
        return httpx.Response(200, json={"dispositions": dispositions})

    async def _result(self, rollout_id: str) -> httpx.Response:
        rollout = self.active.get(rollout_id)
        if rollout is None:
            return httpx.Response(404, json={"detail": "unknown rollout_id"})
        fields = success() if self.end is None else await self.end(rollout)
        if not isinstance(fields, dict):
            return answer(fields)
        self.active.pop(rollout_id, None)
        body = json.dumps({"rollout_id": rollout_id, **fields}).encode()
        return httpx.Response(200, content=body)


def answer(what: httpx.Response | Exception) -> httpx.Response:
    if isinstance(what, Exception):
        raise what
    return httpx.Response(what.status_code, headers=what.headers, content=what.content)


def success(reward: float = 1.0) -> dict[str, Any]:
    sample = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "42"}],
        "reward": reward,
        "metrics": {"tokens": 3},
    }
    return {"status": "success", "sample": sample, "agent_started_at": STARTED}


def failure(category: str = "agent_error", *, started: bool = True) -> dict[str, Any]:
    return {
        "status": "failure",
        "err_message": "it broke",
        "err_category": category,
        "agent_started_at": STARTED if started else None,
    }


def refused(status: int, detail: str = "no") -> httpx.Response:
    return httpx.Response(status, json={"detail": detail})


@pytest.fixture
def server(monkeypatch) -> FakeRollouts:
    """A fake server that every run of the test talks to, at whatever URL."""
    fake = FakeRollouts()

    class Client(RolloutClient):
        def __init__(self, **options: Any) -> None:
            super().__init__(http_client=httpx.AsyncClient(transport=fake), **options)

    monkeypatch.setattr(rollout.evaluation.run, "RolloutClient", Client)
    return fake
