"""Agents of the official package that call a model, with server and client in one process.

Runs under the Python that has the official package and the OpenAI SDK. Prints one JSON line: the
seconds that the rollouts took, and the processor time of them all.

    python official_agents.py CHAT_URL ROLLOUTS IN_FLIGHT CALLS
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from openai import AsyncOpenAI
from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
)
from osmosis_ai.rollout.client import RolloutClient
from osmosis_ai.rollout.server import create_rollout_server

sys.path.insert(0, str(Path(__file__).parent.parent))

from comparison.official import wide_http_client

CHAT_URL = sys.argv[1]
ROLLOUTS, IN_FLIGHT, CALLS = map(int, sys.argv[2:5])
PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]


class Agent(AgentWorkflow):
    model: AsyncOpenAI | None = None

    async def run(self, ctx: Any) -> Any:
        if Agent.model is None:  # one for all: making one costs tens of milliseconds
            Agent.model = AsyncOpenAI(base_url=CHAT_URL, api_key="none")
        history = list(ctx.prompt)
        for _ in range(CALLS):
            reply = await Agent.model.chat.completions.create(model="policy", messages=history)
            history.append({"role": "assistant", "content": reply.choices[0].message.content})
            history.append({"role": "user", "content": "And again?"})
        return history


class Reward(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(1.0)


class Server(uvicorn.Server):
    def __init__(self, app: Any, listening: asyncio.Future[str]) -> None:
        options = {"port": 0, "log_level": "warning", "timeout_graceful_shutdown": 1}
        super().__init__(uvicorn.Config(app, **options))
        self.listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()
        self.listening.set_result(f"http://{host}:{port}")


async def run(client: RolloutClient, name: str, rollouts: int) -> None:
    numbers = iter(range(rollouts))

    async def work() -> None:
        for number in numbers:
            result = await client.run_rollout(
                initial_messages=PROMPT,
                chat_completions_url=CHAT_URL,
                rollout_id=f"{name}-{number}",
                label="42",
            )
            if result.status.value != "success":
                raise SystemExit(f"a rollout did not succeed: {result}")

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(work())


async def main() -> None:
    config = AgentWorkflowConfig(name="agent", concurrency=ConcurrencyConfig(max_concurrent=None))
    backend = LocalBackend(workflow=Agent, workflow_config=config, grader=Reward)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = Server(create_rollout_server(backend=backend, configure_logging=False), listening)
    serving = asyncio.create_task(server.serve())
    async with wide_http_client() as http:
        client = RolloutClient(url=await listening, http_client=http)
        await run(client, "warm", IN_FLIGHT)
        began, spent = time.perf_counter(), time.process_time()
        await run(client, "measured", ROLLOUTS)
        result = {
            "took_sec": time.perf_counter() - began,
            "spent_sec": time.process_time() - spent,
        }
        await client.aclose()
    server.should_exit = True
    await serving
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
