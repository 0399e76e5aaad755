"""What the tests share: workflows that do as their prompt says, servers, raw connections."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import trio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
)
from rollout.client import RolloutClient
from rollout.server import RolloutServer, create_rollout_server, serve

CHAT_URL = "http://127.0.0.1:9/v1"

_ids = count()


def nest(folder: Path, name: str, levels: int) -> int:
    """Make folders within each other, deeper than a path can say; open the innermost one."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    return here


def fresh_id(prefix: str = "rollout") -> str:
    """A rollout id that no other test uses."""
    return f"{prefix}-{next(_ids)}"


class Script(AgentWorkflow[Any]):
    """Does what the first message says: ``sleep``, ``raise``, ``return``, else echoes."""

    async def run(self, ctx: Any) -> Any:
        script = ctx.prompt[0]
        if "sleep" in script:
            await trio.sleep(script["sleep"])
        if "raise" in script:
            raise RuntimeError(script["raise"])
        if "return" in script:
            return script["return"]
        return [*ctx.prompt, {"role": "assistant", "content": script.get("answer", "42")}]


class Compare(Grader):
    """Rewards an answer that equals the label; does what ``metadata["grader"]`` says before."""

    async def grade(self, ctx: Any) -> None:
        script = (ctx.metadata or {}).get("grader", {})
        if "sleep" in script:
            await trio.sleep(script["sleep"])
        if "raise" in script:
            raise RuntimeError(script["raise"])
        if script.get("silent"):
            return
        ctx.set_reward(1.0 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)


def prompt(**script: Any) -> list[dict[str, Any]]:
    """A prompt that tells `Script` what to do."""
    return [{"role": "user", "content": "What is 6 * 7?", **script}]


def local_backend(
    workflow: Any = Script,
    grader: Any = Compare,
    *,
    max_concurrent: int | None = 4,
    max_queue_depth: int | None = None,
) -> LocalBackend:
    """A LocalBackend around the scripted workflow and grader."""
    config = AgentWorkflowConfig(
        name="script", concurrency=ConcurrencyConfig(max_concurrent=max_concurrent)
    )
    return LocalBackend(
        workflow=workflow, workflow_config=config, grader=grader, max_queue_depth=max_queue_depth
    )


def make_app(backend: Any = None, **options: Any) -> RolloutServer:
    """A server application that does not touch the logging of the test run."""
    options.setdefault("configure_logging", False)
    return create_rollout_server(backend=backend or local_backend(), **options)


@asynccontextmanager
async def in_process(app: RolloutServer, **options: Any) -> AsyncGenerator[RolloutClient, None]:
    """A client that calls the application without a socket, for tests on a MockClock.

    Polls are answered in process, so a client-side timeout of httpx never fires here.
    """
    async with app.serving():
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
            # httpx's ASGI transport holds a response back until it is complete: no feed.
            RolloutClient(url="http://test", http_client=http, feed=False, **options) as client,
        ):
            yield client


@asynccontextmanager
async def served(app: RolloutServer, **options: Any) -> AsyncGenerator[str, None]:
    """Serve the application on a free loopback port for the length of the block; yields its URL.

    What still runs at the end of the block is cancelled.
    """
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(
            partial(serve, app, bind="127.0.0.1:0", handle_signals=False, **options)
        )
        yield urls[0]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[trio.SocketStream, None]:
    """A raw TCP connection to the server at *url*."""
    port = httpx.URL(url).port
    assert port is not None
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        yield stream


async def receive_until_closed(stream: trio.abc.ReceiveStream) -> bytes:
    """Everything that comes until the peer closes."""
    received = b""
    async for data in stream:
        received += data
    return received
