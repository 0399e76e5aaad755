"""What calls of the model cost: a single one, recording it, and agents that make several.

    python benchmarks/model_calls.py
    python benchmarks/model_calls.py --measures agents --official-python path/to/venv/bin/python

A child process is the endpoint. Server and client share this process, so that one figure has all of
it: processor time, and rollouts per second. Nothing is asserted.

``calls``
    Rollouts of one call by httpx alone, by `chat` and by the OpenAI SDK. The first row calls no
    model: what a row has more is the price of its call or its grader.
``agents``
    Rollouts of four calls that the endpoint answers after 0.2 s each, 256 in flight. "SDK alone" is
    the same calls without any rollout; ``--workers 1,2`` adds fronts of one and of two worker
    processes, whose processor time is counted as well; ``--official-python`` names a Python that
    has ``osmosis-ai[server]`` and ``openai``, for the same work on the official package. All of
    them take turns, round by round.
``recording``
    Calls by the SDK, one after the other, recorded and not, in turns: the difference is the price
    of recording, the sample included.

All but the first rows of ``calls`` need the extra ``openai``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import trio
from server_process import Server

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    ExecutionBackend,
    Grader,
    LocalBackend,
    RolloutContext,
    RolloutInitRequest,
    get_rollout_context,
)
from rollout.client import RolloutClient
from rollout.gateway import ModelGateway
from rollout.integrations import openai
from rollout.integrations.chat import chat, share_connections
from rollout.pool import LocalWorkers, PoolBackend
from rollout.server import RolloutServer, create_rollout_server, serve

COMPARISON = Path(__file__).parent / "comparison"
AGENT_WORKER = f"{COMPARISON / 'agent_worker.py'}:app"
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
MEASURES = ("calls", "agents", "recording")
CALLS = 4
REPLY = {"role": "assistant", "content": "6 * 7 = 42"}
PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]

Spent = tuple[float, float]
"""Processor milliseconds of a rollout, and rollouts per second."""

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
    calls = 1

    async def run(self, ctx: Any) -> Any:
        history = await converse(openai.rollout_client(record=self.record), ctx.prompt, self.calls)
        return None if self.record else history


class SdkUnrecorded(Sdk):
    record = False


class Agent(Sdk):
    calls = CALLS


class Async(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(1.0)


class Plain(Grader):
    def grade(self, ctx: Any) -> None:
        ctx.set_reward(1.0)


async def converse(client: Any, prompt: Any, calls: int, **options: Any) -> list[Any]:
    """Call the model several times, each time with all that was said before."""
    history = list(prompt)
    for _ in range(calls):
        reply = await client.chat.completions.create(model="policy", messages=history, **options)
        if options.get("stream"):
            async with reply:
                said = [chunk.choices[0].delta.content or "" async for chunk in reply]
            text = "".join(said)
        else:
            text = reply.choices[0].message.content
        history.append({"role": "assistant", "content": text})
        history.append({"role": "user", "content": "And again?"})
    return history


@contextmanager
def endpoint() -> Iterator[Server]:
    """Start the endpoint."""
    command = [sys.executable, str(COMPARISON / "endpoint.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield Server(process.stdout.readline().decode().strip(), process.pid)
        finally:
            process.kill()


# --- rollouts --------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(_: RolloutServer) -> AsyncGenerator[None, None]:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=60)
    async with share_connections(), httpx.AsyncClient(limits=limits, timeout=60) as client:
        http.set(client)
        yield


def local_backend(
    workflow: type[AgentWorkflow[Any]], grader: type[Grader], artifact_root: str
) -> LocalBackend:
    config = AgentWorkflowConfig(name="agent", concurrency=ConcurrencyConfig(max_concurrent=None))
    return LocalBackend(
        workflow=workflow, workflow_config=config, grader=grader, artifact_root=artifact_root
    )


def serve_agents(backend: ExecutionBackend, gateway: ModelGateway | None = None) -> RolloutServer:
    return create_rollout_server(
        backend=backend, lifespan=lifespan, gateway=gateway, configure_logging=False
    )


async def measure(
    workflow: type[AgentWorkflow[Any]],
    grader: type[Grader],
    chat_url: str,
    rollouts: int,
    in_flight: int,
) -> Spent:
    with tempfile.TemporaryDirectory(prefix="rollout-bench-", dir=IN_MEMORY) as root:
        backend = local_backend(workflow, grader, root)
        return await measure_backend(backend, chat_url, rollouts, in_flight)


async def measure_backend(
    backend: ExecutionBackend,
    chat_url: str,
    rollouts: int,
    in_flight: int,
    gateway: ModelGateway | None = None,
    *,
    warm_up: bool = True,
) -> Spent:
    app = serve_agents(backend, gateway)
    async with trio.open_nursery() as nursery:
        serving = partial(serve, app, bind="127.0.0.1:0", handle_signals=False)
        urls = await nursery.start(serving)
        async with RolloutClient(url=urls[0]) as client:

            async def work(count: int) -> None:
                await run(client, chat_url, count, in_flight)

            children = partial(processes_of, backend)
            if warm_up:
                await work(in_flight + 1)
            spent = await timed(work, rollouts, children=children)
        app.request_shutdown()
    return spent


def processes_of(backend: ExecutionBackend) -> list[Server]:
    """The workers of a pool."""
    return [Server("", each["pid"]) for each in backend.health().get("processes", ())]


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


async def timed(
    work: Callable[[int], Awaitable[None]],
    rollouts: int,
    *,
    children: Callable[[], list[Server]] = list,
) -> Spent:
    busy = children()
    began, spent = time.perf_counter(), time.process_time() + sum(map(Server.cpu_sec, busy))
    await work(rollouts)
    spent = time.process_time() + sum(map(Server.cpu_sec, busy)) - spent
    return spent / rollouts * 1e3, rollouts / (time.perf_counter() - began)


def measure_calls(url: str, options: argparse.Namespace) -> None:
    ways: list[tuple[str, type[AgentWorkflow[Any]], type[Grader]]] = [
        ("no call", Nothing, Async),
        ("no call, a plain def grader", Nothing, Plain),
        ("httpx alone", Httpx, Async),
        ("chat", Chat, Async),
    ]
    if importlib.util.find_spec("openai"):
        ways += [("OpenAI SDK, record=False", SdkUnrecorded, Async), ("OpenAI SDK", Sdk, Async)]
    print(f"{'one rollout':30} {'processor ms':>12} {'more':>6} {'rollouts/s':>11}")
    base = None
    for name, workflow, grader in ways:
        chat_url = f"{url}/short/0/v1"
        spent, rate = trio.run(
            measure, workflow, grader, chat_url, options.rollouts, options.in_flight
        )
        base = spent if base is None else base
        print(f"{name:30} {spent:12.2f} {spent - base:6.2f} {rate:11.0f}", flush=True)


# --- agents ----------------------------------------------------------------------------------


async def measure_sdk_alone(chat_url: str, rollouts: int, in_flight: int) -> Spent:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=chat_url, api_key="none") as client:

        async def work(count: int) -> None:
            left = iter(range(count))

            async def some() -> None:
                for _ in left:
                    await converse(client, PROMPT, CALLS)

            async with trio.open_nursery() as nursery:
                for _ in range(min(count, in_flight)):
                    nursery.start_soon(some)

        await work(in_flight + 1)  # to warm up
        return await timed(work, rollouts)


def measure_official(python: str, chat_url: str, rollouts: int, in_flight: int) -> Spent:
    with tempfile.TemporaryDirectory(prefix="rollout-bench-", dir=IN_MEMORY) as root:
        arguments = [chat_url, str(rollouts), str(in_flight), str(CALLS)]
        done = subprocess.run(
            [python, str(COMPARISON / "official_agents.py"), *arguments],
            stdout=subprocess.PIPE,
            check=True,
            env={**os.environ, "_OSMOSIS_ROLLOUT_ARTIFACT_ROOT": root},
        )
    said = json.loads(done.stdout.splitlines()[-1])
    return said["spent_sec"] / rollouts * 1e3, rollouts / said["took_sec"]


def measure_agents(url: str, options: argparse.Namespace) -> None:
    chat_url = f"{url}/short/0.2/v1"
    work = (chat_url, options.agents, options.agents_in_flight)
    ways: dict[str, Callable[[], Spent]] = {
        "ours": lambda: trio.run(measure, Agent, Async, *work),
        "SDK alone": lambda: trio.run(measure_sdk_alone, *work),
    }
    for count in options.workers:
        ways[f"ours, workers: {count}"] = lambda count=count: trio.run(
            measure_backend, PoolBackend(LocalWorkers(AGENT_WORKER, count)), *work
        )
    if options.official_python:
        ways["official"] = lambda: measure_official(options.official_python, *work)
    rounds: list[dict[str, Spent]] = []
    for number in range(options.rounds):
        names = list(ways) if number % 2 == 0 else list(ways)[::-1]
        rounds.append({name: ways[name]() for name in names})
    title = f"agent of {CALLS} calls of 0.2 s"
    print(f"{title:30} {'processor ms':>12} {'rollouts/s':>11} {'ours : it':>10}")
    for name in ways:
        spent, rate = (median(each[name][place] for each in rounds) for place in (0, 1))
        ratio = median(each["ours"][1] / each[name][1] for each in rounds)
        print(f"{name:30} {spent:12.2f} {rate:11.1f} {ratio:10.2f}", flush=True)


# --- recording -------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two numbers, and says what comes of it.",
        "parameters": {
            "type": "object",
            "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
        },
    },
}
CALLED = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": "{}"}}
TURN = [
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "word " * 100},
]
Shape = tuple[str, str, list[dict[str, Any]], dict[str, Any]]
"""A name, what the endpoint answers, the history, and further arguments of the call."""
SHAPES: list[Shape] = [
    ("a short answer", "short", PROMPT, {}),
    ("a long answer, ten tools", "long", PROMPT, {"tools": [TOOL] * 10}),
    ("a history of 60 messages", "long", PROMPT + TURN * 30, {"tools": [TOOL] * 10}),
    ("4,400 token ids", "ids", PROMPT, {}),
    ("400 log probabilities of five", "logprobs", PROMPT, {}),
    ("a stream of 400 pieces", "stream", PROMPT, {"stream": True}),
]


async def converse_often(url: str, shape: Shape, agents: int, *, record: bool) -> float:
    """Return the processor milliseconds of a call."""
    _, answer, prompt, options = shape
    began = time.process_time()
    for _ in range(agents):
        with RolloutContext(chat_completions_url=f"{url}/{answer}/0/v1") as rollout:
            await converse(openai.rollout_client(record=record), prompt, CALLS, **options)
            await rollout.get_sample()
    return (time.process_time() - began) / agents / CALLS * 1e3


async def measure_recording(url: str, agents: int, rounds: int) -> None:
    print(f"{'one call':30} {'processor ms':>12} {'recorded':>9} {'more : it':>10}")
    async with share_connections():
        for shape in SHAPES:
            once = partial(converse_often, url, shape, agents)
            await once(record=True)
            pairs = [(await once(record=False), await once(record=True)) for _ in range(rounds)]
            bare, recorded = (median(pair[place] for pair in pairs) for place in (0, 1))
            ratio = median(each / without - 1 for without, each in pairs)
            print(f"{shape[0]:30} {bare:12.2f} {recorded:9.2f} {ratio:10.2f}", flush=True)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--measures", default=",".join(MEASURES), help="what to measure, with commas in between")
    add("--rollouts", type=int, default=1000, help="of each way to call")
    add("--in-flight", type=int, default=64, help="rollouts at a time, for the ways to call")
    add("--agents", type=int, default=1024, help="rollouts of several calls, in each round")
    add("--agents-in-flight", type=int, default=256)
    add("--workers", type=numbers, default=(), help="pools of so many workers for agents, as 1,2")
    add("--recorded-agents", type=int, default=10, help="of each shape, in each round")
    add("--rounds", type=int, default=5, help="of agents, and of recording")
    add("--official-python", metavar="PATH", help="has osmosis-ai[server] and openai installed")
    options = parser.parse_args()
    measures = options.measures.split(",")
    if unknown := set(measures).difference(MEASURES):
        parser.error(f"no such measure: {', '.join(sorted(unknown))}")
    if measures != ["calls"] and importlib.util.find_spec("openai") is None:
        parser.error('agents and recording need pip install "trio-rollout[openai]"')
    with endpoint() as model:
        url = model.url
        if "calls" in measures:
            measure_calls(url, options)
        if "agents" in measures:
            measure_agents(url, options)
        if "recording" in measures:
            gc.freeze()  # garbage is looked for as in a process of `rollout serve`
            gc.set_threshold(5000, *gc.get_threshold()[1:])
            trio.run(measure_recording, url, options.recorded_agents, options.rounds)


if __name__ == "__main__":
    main()
