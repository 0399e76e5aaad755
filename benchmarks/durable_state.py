"""What a durable state costs: rollouts per second, latency, restarts and memory.

    python benchmarks/durable_state.py --rollouts 2000 --rounds 5 --results 100000

Two servers run at the same time, one with a state and one without, and get the same work in turns:
rollouts that do nothing, 256 in flight, then one alone. Processor time is that of the server's
process. Then a server starts on a state with many results, and polls some. Linux alone, since it
reads /proc. Exits with 1 if a rollout does not succeed.
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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import define
from server_process import Server

from rollout import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, LocalBackend
from rollout.client import RolloutClient
from rollout.server import create_rollout_server, serve
from rollout.server.entry import token_digest
from rollout.server.results import encode
from rollout.server.state import KeptRollout, SQLiteStore
from rollout.types import (
    POLLING_LEASE_HEADER,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

IN_FLIGHT = 256
POLLED = 1000
ROWS_AT_ONCE = 5000
PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]


class Nothing(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> Any:
        return [*ctx.prompt, {"role": "assistant", "content": "42"}]


async def run_server(state: str | None, durability: Any) -> None:
    config = AgentWorkflowConfig(name="no", concurrency=ConcurrencyConfig(max_concurrent=None))
    backend = LocalBackend(workflow=Nothing, workflow_config=config, artifact_root=False)
    app = create_rollout_server(
        backend=backend, state=state, durability=durability, result_retention_sec=3600
    )
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, app, bind="127.0.0.1:0"))
        print(urls[0], flush=True)


@define
class TimedServer(Server):
    """A server process that was timed as it started."""

    started_sec: float


@contextmanager
def server(state: Path | None, durability: str) -> Iterator[TimedServer]:
    command = [sys.executable, __file__, "--serve", f"--durability={durability}"]
    if state is not None:
        command.append(f"--state={state}")
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            httpx.get(f"{url}/health", trust_env=False).raise_for_status()
            yield TimedServer(url, process.pid, time.monotonic() - began)
        finally:
            process.terminate()


async def run_many(url: str, rollouts: int, prefix: str) -> None:
    """Run rollouts, so many in flight at a time."""
    numbers = iter(range(rollouts))

    async def some(client: RolloutClient) -> None:
        for number in numbers:
            rollout_id = f"{prefix}-{number}"
            result = await client.run_rollout(PROMPT, "http://unused/v1", rollout_id, grade=False)
            if result.status is not RolloutStatus.SUCCESS:
                raise SystemExit(f"{rollout_id}: {result.err_message}")

    async with RolloutClient(url=url) as client, trio.open_nursery() as nursery:
        for _ in range(min(IN_FLIGHT, rollouts)):
            nursery.start_soon(some, client)


async def one_at_a_time(urls: list[str], rollouts: int) -> list[float]:
    """Return the median seconds that one rollout takes alone, for each server, in turns."""
    taken: list[list[float]] = [[] for _ in urls]
    async with (
        RolloutClient(url=urls[0]) as first,
        RolloutClient(url=urls[1]) as second,
    ):
        for number in range(rollouts):
            for client, seconds in zip((first, second), taken, strict=True):
                began = time.perf_counter()
                await client.run_rollout(PROMPT, "http://unused/v1", f"alone-{number}", grade=False)
                seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in taken]


def work(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rates: list[list[float]] = [[], []]
    costs: list[list[float]] = [[], []]
    with server(None, "process") as without, server(folder / "work", options.durability) as durable:
        servers = (without, durable)
        for each in servers:
            trio.run(run_many, each.url, IN_FLIGHT, "warm")
        for turn in range(options.rounds):
            for index in (0, 1) if turn % 2 else (1, 0):
                cpu, began = servers[index].cpu_sec(), time.monotonic()
                trio.run(run_many, servers[index].url, options.rollouts, f"r{turn}")
                rates[index].append(options.rollouts / (time.monotonic() - began))
                costs[index].append((servers[index].cpu_sec() - cpu) / options.rollouts)
        alone = trio.run(one_at_a_time, [each.url for each in servers], options.rollouts // 5)
        memory = [each.memory_mib() for each in servers]
    rate = [statistics.median(each) for each in rates]
    cost = [statistics.median(each) for each in costs]
    pairs = [with_ / without_ for without_, with_ in zip(*rates, strict=True)]
    return {
        "rollouts_per_sec_without": round(rate[0]),
        "rollouts_per_sec_with": round(rate[1]),
        "ratio_of_rates": round(statistics.median(pairs), 2),
        "server_cpu_ms_without": round(1000 * cost[0], 2),
        "server_cpu_ms_with": round(1000 * cost[1], 2),
        "ratio_of_cpu": round(cost[0] / cost[1], 2),
        "alone_ms_without": round(1000 * alone[0], 2),
        "alone_ms_with": round(1000 * alone[1], 2),
        "memory_mib_after_work_without": round(memory[0], 1),
        "memory_mib_after_work_with": round(memory[1], 1),
    }


async def fill(path: Path, results: int) -> None:
    """Write a state with so many results."""
    store = SQLiteStore(path)
    await store.open()
    sample = RolloutSample(messages=[*PROMPT, {"role": "assistant", "content": "42 " * 300}])
    for start in range(0, results, ROWS_AT_ONCE):
        rows = [
            KeptRollout(
                number + 1,
                f"kept-{number}",
                token_digest(f"token-{number}"),
                status="success",
                until=3600.0,
                body=encode(
                    RolloutResultResponse(
                        rollout_id=f"kept-{number}", status=RolloutStatus.SUCCESS, sample=sample
                    )
                ),
            )
            for number in range(start, min(results, start + ROWS_AT_ONCE))
        ]
        await store.commit(rows, 0.0)
    await store.close()


async def open_sec(path: Path) -> float:
    """Return how long it takes to open a state."""
    store = SQLiteStore(path)
    began = time.perf_counter()
    await store.open()
    taken = time.perf_counter() - began
    await store.close()
    return taken


def restart(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trio.run(fill, folder / "kept", options.results)
    opened = trio.run(open_sec, folder / "kept")
    started: list[list[float]] = [[], []]
    memory: list[list[float]] = [[], []]
    for turn in range(options.rounds):
        for index, path in enumerate((folder / f"empty-{turn}", folder / "kept")):
            with server(path, options.durability) as each:
                started[index].append(each.started_sec)
                trio.run(run_many, each.url, IN_FLIGHT, f"after-{turn}")
                if index:
                    _poll(each.url, options.results)
                memory[index].append(each.memory_mib())
    return {
        "results_kept": options.results,
        "state_mib": round((folder / "kept").stat().st_size / 2**20, 1),
        "open_kept_ms": round(1000 * opened, 1),
        "start_sec_empty": round(statistics.median(started[0]), 2),
        "start_sec_kept": round(statistics.median(started[1]), 2),
        "memory_mib_empty": round(statistics.median(memory[0]), 1),
        "memory_mib_kept": round(statistics.median(memory[1]), 1),
    }


def _poll(url: str, results: int) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        for number in range(0, results, max(1, results // POLLED)):
            lease = {POLLING_LEASE_HEADER: f"token-{number}"}
            answer = http.get(f"/rollout/kept-{number}/result", headers=lease)
            if answer.json()["status"] != "success":
                raise SystemExit(f"kept-{number}: {answer.text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=int, default=100_000)
    parser.add_argument("--durability", default="process", choices=["process", "power"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--state", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(run_server, options.state, options.durability)
        return 0
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
        report = work(options, Path(folder)) | restart(options, Path(folder))
    if options.json:
        print(json.dumps(report))
    else:
        width = max(map(len, report))
        for name, value in report.items():
            print(f"{name:<{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
