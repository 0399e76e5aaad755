"""A server with a model gateway, for calls from elsewhere.

It speaks in lines of JSON: for each URL of an endpoint it starts rollouts, and answers with the
base URL and the tokens that their agents were given. The rollouts before end then.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any
from uuid import uuid4

import trio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    LocalBackend,
    get_rollout_context,
)
from rollout.client import RolloutClient
from rollout.gateway import ModelGateway
from rollout.server import create_rollout_server, serve
from rollout.types import RolloutStatus

given, taken = trio.open_memory_channel[tuple[str, str | None]](0)
over = trio.Event()


class Wait(AgentWorkflow[Any]):
    """Hands its access to the model out, and waits for the end."""

    async def run(self, ctx: Any) -> Any:  # noqa: ARG002
        rollout = get_rollout_context()
        assert rollout is not None
        await given.send((rollout.chat_completions_url, rollout.api_key))
        await over.wait()


async def main() -> None:
    global over
    config = AgentWorkflowConfig(name="wait", concurrency=ConcurrencyConfig(max_concurrent=None))
    app = create_rollout_server(
        backend=LocalBackend(workflow=Wait, workflow_config=config),
        gateway=ModelGateway(),
        configure_logging=False,
    )
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, app, bind="127.0.0.1:0", handle_signals=False))
        print("{}", flush=True)
        async with RolloutClient(url=urls[0]) as client, trio.open_nursery() as rollouts:
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                over.set()
                over, job = trio.Event(), json.loads(line)
                for _ in range(job["rollouts"]):
                    rollouts.start_soon(run, client, job["url"])
                access = [await taken.receive() for _ in range(job["rollouts"])]
                keys = [key for _, key in access]
                print(json.dumps({"url": access[0][0], "keys": keys}), flush=True)
            over.set()
        app.request_shutdown()


async def run(client: RolloutClient, url: str) -> None:
    prompt = [{"role": "user", "content": "What is 6 * 7?"}]
    ended = await client.run_rollout(prompt, url, uuid4().hex, grade=False)
    assert ended.status == RolloutStatus.SUCCESS, ended


trio.run(main)
