"""What a pool brings and costs: a front over two workers against one plain server.

    python benchmarks/pool.py --rollouts 4000 --rounds 5 --most 10000

Rollouts that do nothing, 256 in flight, go through a plain server and through a front over two
workers, in turns: rollouts per second, and the processor time of the plain server and of the
front's process. Agents of 20 ms of processor time run on a front with one and with two workers.
Then very many sleep at the same time on two workers. Linux alone, since it reads /proc. Exits
with 1 if a rollout does not succeed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from server_process import Server

from rollout import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, LocalBackend
from rollout.client import RolloutClient
from rollout.pool import PoolBackend
from rollout.server import create_rollout_server, serve
from rollout.types import RolloutStatus

IN_FLIGHT = 256
AGENT_SEC = 0.02
SLEEP_SEC = 5.0


class Agent(AgentWorkflow[Any]):
    """Computes and sleeps as long as its prompt says."""

    async def run(self, ctx: Any) -> Any:
        message = ctx.prompt[0] if ctx.prompt else {}
        until = time.thread_time() + message.get("compute", 0.0)
        while time.thread_time() < until:
            pass
        if "sleep" in message:
            await trio.sleep(message["sleep"])
        return [*ctx.prompt, {"role": "assistant", "content": "42"}]


async def run_server(bind: str, workers: list[str], slots: int | None) -> None:
    if workers:
        backend: Any = PoolBackend(workers)
    else:
        config = AgentWorkflowConfig(
            name="agent", concurrency=ConcurrencyConfig(max_concurrent=slots)
        )
        backend = LocalBackend(workflow=Agent, workflow_config=config, artifact_root=False)
    app = create_rollout_server(backend=backend)
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(serve, app, bind=bind))
        if workers:  # they are up once a rollout has ended
            async with RolloutClient(url=url) as client:
                await client.run_rollout([], "http://unused/v1", "first", grade=False)
        print(url, flush=True)


@contextmanager
def server(bind: str, *, workers: list[str] | None = None, slots: int = 0) -> Iterator[Server]:
    command = [sys.executable, __file__, f"--serve={bind}", f"--slots={slots}"]
    command += [f"--worker={each}" for each in workers or ()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            yield Server(url, process.pid)
        finally:
            process.terminate()


@contextmanager
def pool(folder: Path, count: int, *, slots: int = 0) -> Iterator[tuple[Server, list[Server]]]:
    """A front over so many workers."""
    with ExitStack() as stack:
        binds = [f"unix:{folder}/{slots}-{number}-of-{count}" for number in range(count)]
        workers = [stack.enter_context(server(bind, slots=slots)) for bind in binds]
        yield stack.enter_context(server("127.0.0.1:0", workers=binds)), workers


async def run_many(url: str, rollouts: int, in_flight: int, prefix: str, **script: float) -> float:
    """Run rollouts, so many in flight at a time; return the seconds."""
    numbers = iter(range(rollouts))
    prompt = [{"role": "user", "content": "What is 6 * 7?", **script}]

    async def some(client: RolloutClient) -> None:
        for number in numbers:
            rollout_id = f"{prefix}-{number}"
            result = await client.run_rollout(prompt, "http://unused/v1", rollout_id, grade=False)
            if result.status is not RolloutStatus.SUCCESS:
                raise SystemExit(f"{rollout_id}: {result.err_message}")

    async with RolloutClient(url=url) as client:
        await client.run_rollout(prompt, "http://unused/v1", f"{prefix}-first", grade=False)
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            for _ in range(min(in_flight, rollouts)):
                nursery.start_soon(some, client)
        return time.monotonic() - began


def middle(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def nothing(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rollouts that do nothing, on a plain server and through a front, in turns."""
    rates: dict[str, list[float]] = {"plain": [], "front": []}
    cpu_ms: dict[str, list[float]] = {"plain": [], "front": [], "extra": []}
    with server("127.0.0.1:0") as plain, pool(folder, 2) as (front, _):
        pair = [("plain", plain), ("front", front)]
        for name, each in pair:
            trio.run(partial(run_many, each.url, 500, IN_FLIGHT, f"warm-{name}"))
        for number in range(options.rounds):
            for name, each in pair if number % 2 == 0 else reversed(pair):
                before = each.cpu_sec()
                wall = trio.run(
                    partial(run_many, each.url, options.rollouts, IN_FLIGHT, f"{name}-{number}")
                )
                rates[name].append(options.rollouts / wall)
                cpu_ms[name].append(1000 * (each.cpu_sec() - before) / options.rollouts)
            cpu_ms["extra"].append(cpu_ms["front"][-1] - cpu_ms["plain"][-1])
    return {
        "rollouts_per_sec": {name: middle(values) for name, values in rates.items()},
        "cpu_ms_per_rollout": {name: middle(values) for name, values in cpu_ms.items()},
    }


def computing(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Agents that compute, on one and on two workers, in turns."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stack:
        fronts = {count: stack.enter_context(pool(folder, count, slots=8))[0] for count in rates}
        for number in range(options.rounds):
            for count in rates if number % 2 == 0 else reversed(rates):
                wall = trio.run(
                    partial(
                        run_many,
                        fronts[count].url,
                        options.agents,
                        32,
                        f"{count}-{number}",
                        compute=AGENT_SEC,
                    )
                )
                rates[count].append(options.agents / wall)
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {
        "rollouts_per_sec": {count: middle(values) for count, values in rates.items()},
        "two_by_one": middle(ratios),
    }


def very_many(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Very many rollouts that sleep at the same time on two workers."""
    with pool(folder, 2) as (front, workers):
        run = partial(run_many, front.url, options.most, options.most, "many", sleep=SLEEP_SEC)
        wall = trio.run(run)
        return {
            "in_flight": options.most,
            "sleep_sec": SLEEP_SEC,
            "wall_sec": round(wall, 2),
            "front_cpu_sec": round(front.cpu_sec(), 2),
            "front_mib": round(front.memory_mib()),
            "workers_mib": [round(worker.memory_mib()) for worker in workers],
        }


MEASURES = {"nothing": nothing, "computing": computing, "many": very_many}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=4000, help="that do nothing, each round")
    parser.add_argument("--agents", type=int, default=400, help="that compute, each round")
    parser.add_argument("--most", type=int, default=10_000, help="in flight at the same time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(run_server, options.serve, options.worker, options.slots or None)
        return 0
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pool-") as folder:
        for name in options.measures.split(","):
            report[name] = MEASURES[name](Path(folder), options)
            print(json.dumps({name: report[name]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
