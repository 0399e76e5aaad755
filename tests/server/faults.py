"""Tools for tests that misuse a server: bodies, refusals, and proof that it still serves."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote

import httpx
from support import CHAT_URL, connected, fresh_id, prompt, served

from rollout.server import RolloutServer
from rollout.types import POLLING_LEASE_HEADER

API_KEY = "server-key-5f0c1e"
LLM_KEY = "llm-key-93ad77"

_tokens: list[str] = []


def admission(**fields: Any) -> dict[str, Any]:
    """The body of an admission that nothing is wrong with, but for *fields*."""
    return {
        "rollout_id": fresh_id(),
        "initial_messages": prompt(),
        "chat_completions_url": CHAT_URL,
        "llm_api_key": LLM_KEY,
        "label": "42",
        **fields,
    }


@asynccontextmanager
async def served_http(
    app: RolloutServer, **options: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A plain HTTP client of the application on a loopback port."""
    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=20, **options) as http,
    ):
        yield http


@asynccontextmanager
async def in_process_http(
    app: RolloutServer, **options: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A plain HTTP client of the application without a socket, for a simulated clock."""
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with (
        app.serving(),
        httpx.AsyncClient(transport=transport, base_url="http://test", **options) as http,
    ):
        yield http


def assert_refused(response: httpx.Response, status: int) -> Any:
    """A refusal is JSON with a detail and nothing else; returns the detail."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"detail"}
    if status == 422:
        assert body["detail"]
        assert all(set(problem) == {"loc", "msg", "type"} for problem in body["detail"])
    else:
        assert isinstance(body["detail"], str)
    assert "Traceback" not in response.text
    assert_no_secret(response.text)
    return body["detail"]


def problem_at(response: httpx.Response) -> list[list[Any]]:
    """The places that a 422 names."""
    return [problem["loc"] for problem in assert_refused(response, 422)]


async def admit(http: httpx.AsyncClient, **fields: Any) -> tuple[str, dict[str, str]]:
    """Admit a rollout; returns its id and the headers that poll it."""
    body = admission(**fields)
    response = await http.post("/rollout", content=json.dumps(body))
    assert response.status_code == 202, response.text
    token = response.json()["polling_lease_token"]
    _tokens.append(token)
    return body["rollout_id"], {POLLING_LEASE_HEADER: token}


async def poll(http: httpx.AsyncClient, rollout_id: str, headers: dict[str, str]) -> dict[str, Any]:
    """Poll once."""
    response = await http.get(result_path(rollout_id), headers=headers)
    assert response.status_code == 200, response.text
    assert_no_secret(response.text)
    answer = response.json()
    assert answer["rollout_id"] == rollout_id
    return answer


async def finished(
    http: httpx.AsyncClient, rollout_id: str, headers: dict[str, str]
) -> dict[str, Any]:
    """Poll until the rollout has ended; returns the result."""
    while True:
        answer = await poll(http, rollout_id, headers)
        if answer["status"] not in {"queued", "running", "grading"}:
            return answer


async def run(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Admit a rollout and poll it to its end."""
    return await finished(http, *await admit(http, **fields))


async def assert_serves(http: httpx.AsyncClient) -> None:
    """The server is well: it answers and runs a rollout from end to end."""
    health = await http.get("/health")
    assert health.status_code == 200
    assert health.json()["lifecycle"]["accepting_rollouts"] is True
    result = await run(http)
    assert (result["status"], result["sample"]["reward"]) == ("success", 1.0)


def result_path(rollout_id: str) -> str:
    """Where a rollout is polled."""
    return f"/rollout/{quote(rollout_id, safe='')}/result"


def assert_no_secret(text: str) -> None:
    for secret in (API_KEY, LLM_KEY, *_tokens):
        assert secret not in text


@contextmanager
def no_secret_in_logs() -> Iterator[list[str]]:
    """Nothing that is logged in the block, at any level, holds a secret; yields the lines."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    lines: list[str] = []
    handler = Keep()
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert_no_secret("\n".join(lines))
    _tokens.clear()


def request_bytes(
    method: str,
    path: str,
    body: bytes = b"",
    *,
    headers: dict[str, str] | None = None,
    length: int | None = None,
) -> bytes:
    """An HTTP/1.1 request as it goes over the wire, with a *length* that may be a lie."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body or length is not None:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def raw(url: Any, data: bytes) -> tuple[int, bytes]:
    """Send bytes on a new connection; returns status and body of the one answer."""
    async with connected(str(url)) as stream:
        await stream.send_all(data)
        return await read_answer(stream)


async def read_answer(stream: Any) -> tuple[int, bytes]:
    """Read one answer with a Content-Length off a stream."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = await stream.receive_some()
        assert piece, f"closed after {received!r}"
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        piece = await stream.receive_some()
        assert piece, "closed in mid-body"
        body += piece
    return int(head.split()[1]), body
