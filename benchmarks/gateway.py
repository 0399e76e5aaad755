"""What the model gateway costs: against LiteLLM's proxy, and against recording in process.

    python benchmarks/gateway.py --litellm-python path/to/venv/bin/python
    python benchmarks/gateway.py --measures recording,many

Nothing but the success of every call and rollout is asserted.

``proxies``
    Calls of a scripted endpoint through our gateway, through LiteLLM's proxy where
    ``--litellm-python`` names a Python that has ``litellm[proxy]``, and without a proxy: several in
    flight, and one alone. Endpoint, load and proxies are a process each, and all ways take turns,
    round by round. Our server records each call for one of many rollouts, whose tokens take turns;
    LiteLLM runs one worker, quietly, and checks a master key.
``recording``
    Rollouts of four calls by the OpenAI SDK, recorded in process and by the gateway, plainly and
    with ``capture="tokens"``. Server, gateway, client and agents share one process, so that one
    figure has all of it.
``many``
    The same through the gateway, a thousand at once.

The last two need the extra ``openai``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import model_calls
import trio
from attrs import field, frozen
from comparison.process import Child, started
from server_process import Server

from rollout.gateway import ModelGateway

MEASURES = ("proxies", "recording", "many")
SHAPES = {"short": "whole", "pieces": "stream of 23 pieces"}
"""What the endpoint answers, and how that is called."""
KEY = "sk-benchmark"
LIMIT_SEC = 600.0
WARM_UP = 64
"""Calls, at most."""


@frozen
class Way:
    """A way to the endpoint."""

    name: str
    cpu_sec: Callable[[], float]
    access: Callable[[str], Awaitable[dict[str, Any]]]
    """For a shape, the base URL and the keys."""


@frozen
class Spent:
    """What a job took: calls per second, milliseconds of a call, processor milliseconds of each."""

    rate: float
    latency: float
    cpu: dict[str, float] = field(factory=dict)


@asynccontextmanager
async def through_gateway(endpoint: str, rollouts: int) -> AsyncGenerator[Way, None]:
    command = [sys.executable, str(model_calls.COMPARISON / "gateway_server.py")]
    async with started("the gateway", command) as child:

        async def access(shape: str) -> dict[str, Any]:
            job = {"url": f"{endpoint}/{shape}/0/v1", "rollouts": rollouts}
            given: dict[str, Any] = await child.call(job, limit_sec=LIMIT_SEC)
            return given

        yield Way("ours", lambda: used(child), access)


@asynccontextmanager
async def through_litellm(endpoint: str, python: str) -> AsyncGenerator[Way, None]:
    config = {
        "model_list": [
            {
                "model_name": shape,
                "litellm_params": {
                    "model": "openai/policy",
                    "api_base": f"{endpoint}/{shape}/0/v1",
                    "api_key": "none",
                },
                # Costs that it knows, so that no call fails to find them.
                "model_info": {"input_cost_per_token": 1e-6, "output_cost_per_token": 1e-6},
            }
            for shape in SHAPES
        ],
        "general_settings": {"master_key": KEY},
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
        path = Path(folder) / "config.json"  # YAML, too
        path.write_text(json.dumps(config))
        options = ["--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
        command = [str(Path(python).parent / "litellm"), *options, "--num_workers", "1"]
        log = (Path(folder) / "log").open("wb")
        with (
            subprocess.Popen(  # noqa: ASYNC220 - it is started once
                command, stdout=log, stderr=log, env=os.environ | quiet, cwd=folder
            ) as process,
            log,
        ):
            try:
                await wait_ready(f"{url}/health/readiness", process)

                async def access(_: str) -> dict[str, Any]:
                    return {"url": f"{url}/v1", "keys": [KEY]}

                yield Way("LiteLLM", Server(url, process.pid).cpu_sec, access)
            finally:
                process.kill()


async def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(3000):
            if process.poll() is not None:
                break
            try:
                if (await client.get(url)).is_success:
                    return
            except httpx.TransportError:
                pass
            await trio.sleep(0.1)
    raise SystemExit("LiteLLM's proxy did not start")


def used(child: Child) -> float:
    usage = child.usage()
    return 0.0 if usage is None else usage.cpu_sec


async def measure_proxies(endpoint: Server, options: argparse.Namespace) -> None:
    url = endpoint.url
    async with AsyncExitStack() as stack:
        load = await stack.enter_async_context(
            started("the load", [sys.executable, str(model_calls.COMPARISON / "load.py")])
        )

        async def direct(shape: str) -> dict[str, Any]:
            return {"url": f"{url}/{shape}/0/v1", "keys": ["none"]}

        ours = await stack.enter_async_context(through_gateway(url, options.tokens))
        ways = [ours]
        if options.litellm_python:
            litellm = through_litellm(url, options.litellm_python)
            ways.append(await stack.enter_async_context(litellm))
        ways.append(Way("no proxy", lambda: 0.0, direct))

        async def spent(way: Way, shape: str, in_flight: int, calls: int) -> Spent:
            body = {"model": shape, "messages": model_calls.PROMPT}
            if shape != "short":
                body["stream"] = True
            job = {**await way.access(shape), "body": body, "in_flight": in_flight}
            busy = {"load": lambda: used(load), "endpoint": endpoint.cpu_sec, "proxy": way.cpu_sec}
            before = {name: cpu_sec() for name, cpu_sec in busy.items()}
            done = await load.call({**job, "calls": calls}, limit_sec=LIMIT_SEC)
            cpu = {name: (cpu_sec() - before[name]) / calls * 1e3 for name, cpu_sec in busy.items()}
            return Spent(calls / done["took_sec"], median(done["latencies_sec"]) * 1e3, cpu)

        for shape, title in SHAPES.items():
            await compare_ways(ways, shape, title, spent, options)


async def compare_ways(
    ways: list[Way],
    shape: str,
    title: str,
    spent: Callable[[Way, str, int, int], Awaitable[Spent]],
    options: argparse.Namespace,
) -> None:
    head = f"{title}, in flight"
    print(f"{head:34} {'calls/s':>9} {'ms':>7} {'more ms':>8}   processor ms of a call")
    for in_flight in (1, *options.in_flight):
        calls = options.alone if in_flight == 1 else options.calls
        rounds = []
        for way in ways:  # to warm up
            await spent(way, shape, in_flight, min(in_flight, WARM_UP))
        for number in range(options.rounds):
            order = ways if number % 2 == 0 else ways[::-1]
            rounds.append({way.name: await spent(way, shape, in_flight, calls) for way in order})
        for way in ways:
            each = [done[way.name] for done in rounds]
            more = median(done[way.name].latency - done["no proxy"].latency for done in rounds)
            cpu = ", ".join(
                f"{name} {median(one.cpu[name] for one in each):.2f}" for name in each[0].cpu
            )
            rate, latency = median(one.rate for one in each), median(one.latency for one in each)
            line = f"{in_flight:4} {way.name:29} {rate:9.0f} {latency:7.2f} {more:8.2f}   {cpu}"
            print(line, flush=True)
        if len(ways) > 2:
            print_ratios(rounds, alone=in_flight == 1)


def print_ratios(rounds: list[dict[str, Spent]], *, alone: bool) -> None:
    if alone:
        what = "added latency, ours : LiteLLM"
        ratios = [
            (done["ours"].latency - done["no proxy"].latency)
            / (done["LiteLLM"].latency - done["no proxy"].latency)
            for done in rounds
        ]
    else:
        what = "calls/s, ours : LiteLLM"
        ratios = [done["ours"].rate / done["LiteLLM"].rate for done in rounds]
    print(f"     {what:29} {median(ratios):9.2f}   ({min(ratios):.2f} to {max(ratios):.2f})")


# --- recording -------------------------------------------------------------------------------

RECORDED = {"short": "a short answer", "tokens": "400 tokens after 4,000"}


async def agents(
    gateway: ModelGateway | None,
    chat_url: str,
    rollouts: int,
    in_flight: int,
    *,
    warm_up: bool = True,
) -> model_calls.Spent:
    with tempfile.TemporaryDirectory(prefix="rollout-bench-", dir=model_calls.IN_MEMORY) as root:
        backend = model_calls.local_backend(model_calls.Agent, model_calls.Async, root)
        return await model_calls.measure_backend(
            backend, chat_url, rollouts, in_flight, gateway=gateway, warm_up=warm_up
        )


def measure_recording(endpoint: Server, options: argparse.Namespace) -> None:
    gateways: dict[str, Callable[[], ModelGateway | None]] = {
        "in process": lambda: None,
        "gateway": ModelGateway,
        "gateway, capture tokens": lambda: ModelGateway(capture="tokens"),
    }
    print(f"{'agents of four calls':46} {'processor ms of a call':>22} {'rollouts/s':>11}")
    for shape, title in (
        ("short", "a short answer"),
        ("logprobs", "400 tokens, log probabilities"),
    ):
        rounds = []
        for number in range(options.rounds):
            names = list(gateways) if number % 2 == 0 else list(gateways)[::-1]
            work = (f"{endpoint.url}/{shape}/0/v1", options.rollouts, options.rollouts_in_flight)
            rounds.append({name: trio.run(agents, gateways[name](), *work) for name in names})
        for name in gateways:
            spent, rate = (median(each[name][place] for each in rounds) for place in (0, 1))
            line = f"{title}, {name}"
            print(f"{line:46} {spent / model_calls.CALLS:22.2f} {rate:11.1f}", flush=True)


def measure_many(endpoint: Server, options: argparse.Namespace) -> None:
    work = (f"{endpoint.url}/short/0.2/v1", options.many, options.many)
    spent, rate = trio.run(partial(agents, ModelGateway(), *work, warm_up=False))
    print(
        f"{options.many} rollouts of {model_calls.CALLS} calls of 0.2 s at once: all succeeded "
        f"in {options.many / rate:.1f} s, {spent:.1f} processor ms of each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--measures", default=",".join(MEASURES), help="what to measure, with commas in between")
    add("--litellm-python", metavar="PATH", help="has litellm[proxy] installed")
    add("--in-flight", type=model_calls.numbers, default=(64, 256), help="calls at a time")
    add("--calls", type=int, default=2000, help="of each way, in each round")
    add("--alone", type=int, default=300, help="calls one after the other, in each round")
    add("--tokens", type=int, default=256, help="rollouts whose tokens take turns")
    add("--rollouts", type=int, default=256, help="of each way to record, in each round")
    add("--rollouts-in-flight", type=int, default=64)
    add("--many", type=int, default=1000, help="rollouts at once")
    add("--rounds", type=int, default=5)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measures = options.measures.split(",")
    with model_calls.endpoint() as endpoint:
        if "proxies" in measures:
            trio.run(measure_proxies, endpoint, options)
        if "recording" in measures:
            measure_recording(endpoint, options)
        if "many" in measures:
            measure_many(endpoint, options)


if __name__ == "__main__":
    main()
