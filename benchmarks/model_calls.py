"""What a call of the model costs: httpx alone, `chat`, the OpenAI SDK; and a plain grader.

    python benchmarks/model_calls.py --rollouts 1000 --in-flight 64

A child process answers every call with the same completion at once. Server and client share this
process, so that one figure has all of it: the processor time of a rollout, and how many of them
there are in a second. The first row calls no model: what a row has more is the price of its call
or its grader. The SDK's rows need the extra ``openai``. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import hypercorn.trio
import trio
from hypercorn.config import Config
from quart import Response, request
from quart_trio import QuartTrio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
    RolloutInitRequest,
    get_rollout_context,
)
from rollout.client import RolloutClient
from rollout.integrations.chat import chat, share_connections
from rollout.server import RolloutServer, create_rollout_server, serve

ENDPOINT = "--endpoint"
REPLY = {"role": "assistant", "content": "6 * 7 = 42"}
PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]
COMPLETION = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": REPLY, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
    }
).encode()


async def serve_endpoint() -> None:
    app = QuartTrio("endpoint")

    @app.post("/v1/chat/completions")
    async def complete() -> Response:
        await request.get_data()
        return Response(COMPLETION, mimetype="application/json")

    config = Config()
    config.bind, config.errorlog = ["127.0.0.1:0"], None
    config.keep_alive_timeout = 60
    async with trio.open_nursery() as nursery:
        serving = partial(hypercorn.trio.serve, app, config, shutdown_trigger=trio.sleep_forever)
        urls = await nursery.start(serving)
        print(urls[0], flush=True)


http: trio.lowlevel.RunVar[httpx.AsyncClient] = trio.lowlevel.RunVar("http")


class Nothing(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> Any:
        return [*ctx.prompt, REPLY]


class Httpx(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> Any:
        rollout = get_rollout_context()
        assert rollout is not None
        url = f"{rollout.chat_completions_url}/chat/completions"
        response = await http.get().post(url, json={"model": "policy", "messages": ctx.prompt})
        return [*ctx.prompt, response.json()["choices"][0]["message"]]


class Chat(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> Any:
        await chat(ctx.prompt, model="policy")


class Sdk(AgentWorkflow[Any]):
    record = True

    async def run(self, ctx: Any) -> Any:
        from rollout.integrations.openai import rollout_client

        client = rollout_client(record=self.record)
        reply = await client.chat.completions.create(model="policy", messages=ctx.prompt)
        return None if self.record else [*ctx.prompt, reply.choices[0].message.model_dump()]


class SdkUnrecorded(Sdk):
    record = False


class Async(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(1.0)


class Plain(Grader):
    def grade(self, ctx: Any) -> None:
        ctx.set_reward(1.0)


Way = tuple[str, type[AgentWorkflow[Any]], type[Grader]]
WAYS: list[Way] = [
    ("no call", Nothing, Async),
    ("no call, a plain def grader", Nothing, Plain),
    ("httpx alone", Httpx, Async),
    ("chat", Chat, Async),
]
SDK_WAYS: list[Way] = [
    ("OpenAI SDK, record=False", SdkUnrecorded, Async),
    ("OpenAI SDK", Sdk, Async),
]


@asynccontextmanager
async def lifespan(_: RolloutServer) -> AsyncGenerator[None, None]:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=60)
    async with share_connections(), httpx.AsyncClient(limits=limits, timeout=60) as client:
        http.set(client)
        yield


async def measure(
    way: Way, chat_url: str, root: str, rollouts: int, in_flight: int
) -> tuple[float, float]:
    """Return processor milliseconds for a rollout, and rollouts per second."""
    name, workflow, grader = way
    config = AgentWorkflowConfig(name=name, concurrency=ConcurrencyConfig(max_concurrent=None))
    backend = LocalBackend(
        workflow=workflow, workflow_config=config, grader=grader, artifact_root=root
    )
    app = create_rollout_server(backend=backend, lifespan=lifespan, configure_logging=False)
    async with trio.open_nursery() as nursery:
        serving = partial(serve, app, bind="127.0.0.1:0", handle_signals=False)
        urls = await nursery.start(serving)
        async with RolloutClient(url=urls[0]) as client:
            await run(client, chat_url, in_flight, in_flight)
            started, spent = time.perf_counter(), time.process_time()
            await run(client, chat_url, rollouts, in_flight)
            spent = time.process_time() - spent
            took = time.perf_counter() - started
        app.request_shutdown()
    return spent / rollouts * 1e3, rollouts / took


async def run(client: RolloutClient, chat_url: str, rollouts: int, in_flight: int) -> None:
    requests = (
        RolloutInitRequest(
            rollout_id=f"{id(client)}-{rollouts}-{number}",
            initial_messages=PROMPT,
            chat_completions_url=chat_url,
            label="42",
        )
        for number in range(rollouts)
    )
    async with client.run_rollouts(requests, max_in_flight=in_flight) as finished:
        async for ended in finished:
            if not ended.succeeded:
                raise SystemExit(f"a rollout did not succeed: {ended.outcome}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=1000, help="of each way")
    parser.add_argument("--in-flight", type=int, default=64)
    arguments = parser.parse_args()
    ways = [*WAYS, *(SDK_WAYS if importlib.util.find_spec("openai") else [])]
    with (
        tempfile.TemporaryDirectory(prefix="rollout-bench-") as root,
        subprocess.Popen([sys.executable, __file__, ENDPOINT], stdout=subprocess.PIPE) as endpoint,
    ):
        try:
            assert endpoint.stdout is not None
            chat_url = f"{endpoint.stdout.readline().decode().strip()}/v1"
            print(f"{'one rollout':30} {'processor ms':>12} {'more':>6} {'rollouts/s':>11}")
            base = None
            for way in ways:
                spent, rate = trio.run(
                    measure, way, chat_url, root, arguments.rollouts, arguments.in_flight
                )
                base = spent if base is None else base
                print(f"{way[0]:30} {spent:12.2f} {spent - base:6.2f} {rate:11.0f}")
        finally:
            endpoint.kill()


if __name__ == "__main__":
    if sys.argv[1:] == [ENDPOINT]:
        trio.run(serve_endpoint)
    else:
        main()
