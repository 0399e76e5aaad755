"""What it costs a server that somebody looks on.

A server in a process of its own has so many rollouts in flight, whose agents sleep. First nobody
looks on, then so many read ``GET /rollouts/live`` as the page does, then again nobody; each part
is as long. In the last two parts rollouts also end and are admitted at a rate. What looking on
costs is the difference of the server's CPU time, in percent of one core.

    python benchmarks/live_page.py
    python benchmarks/live_page.py --in-flight 1000 --ends-per-sec 20 --onlookers 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import trio
from server_process import Server

from rollout import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, LocalBackend
from rollout.client.wire import Wire
from rollout.codec import unstructure
from rollout.server import RolloutServer, create_rollout_server
from rollout.server.live import LIVE_PATH
from rollout.types import RolloutInitRequest


class Sleep(AgentWorkflow[Any]):
    """An agent that sleeps."""

    async def run(self, ctx: Any) -> Any:
        """Sleep for as long as its prompt says."""
        await trio.sleep(ctx.prompt[0]["sleep"])
        return [*ctx.prompt, {"role": "assistant", "content": "done"}]


def make_app() -> RolloutServer:
    """Make the application."""
    backend = LocalBackend(
        workflow=Sleep,
        workflow_config=AgentWorkflowConfig(
            name="sleep", concurrency=ConcurrencyConfig(max_concurrent=None)
        ),
        artifact_root=False,
    )
    return create_rollout_server(backend=backend, polling_lease_timeout_sec=600)


@contextmanager
def server() -> Iterator[Server]:
    """Serve the application for the block."""
    command = [sys.executable, "-m", "rollout.cli", "serve", f"{__file__}:make_app"]
    process = subprocess.Popen(
        [*command, "--bind", "127.0.0.1:0", "--quiet", "--drain-sec", "0", "--cleanup-sec", "5"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    assert process.stdout is not None
    try:
        yield Server(process.stdout.readline().split()[-1], process.pid)
    finally:
        process.kill()
        process.wait()


class Onlooker:
    """Reads the stream and counts what it is sent."""

    def __init__(self) -> None:
        self.rows = 0
        self.first = trio.Event()

    async def run(self, url: str) -> None:
        """Read until cancelled."""
        async with (
            httpx.AsyncClient(trust_env=False) as http,
            Wire(url, http).stream(LIVE_PATH, None, read_timeout_sec=60) as answer,
        ):
            left = b""
            async for data in answer.data:
                *lines, left = (left + data).split(b"\n")
                self.rows += sum(len(json.loads(line)["rows"]) for line in lines)
                if lines:
                    self.first.set()


def requests(count: int, sleep: float) -> list[RolloutInitRequest]:
    """Return admissions of rollouts that sleep; nobody polls, so a lease must outlast the run."""
    return [
        RolloutInitRequest(
            rollout_id=f"r-{sleep:g}-{os.urandom(6).hex()}",
            initial_messages=[{"role": "user", "content": "Sleep.", "sleep": sleep}],
            chat_completions_url="http://127.0.0.1:9/v1",
            grade=False,
            run="benchmark",
        )
        for _ in range(count)
    ]


async def admit(url: str, count: int, sleep: float) -> None:
    """Admit rollouts in batches."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for start in range(0, count, 1000):
            part = requests(min(1000, count - start), sleep)
            body = {"rollouts": [unstructure(each) for each in part]}
            answer = await http.post(f"{url}/rollouts", json=body)
            answer.raise_for_status()


async def churn(url: str, per_sec: float) -> None:
    """Admit rollouts that end soon, at a rate, until cancelled."""
    while per_sec:
        began = trio.current_time()
        await admit(url, max(1, round(per_sec)), 1.0)
        await trio.sleep_until(began + 1.0)


async def used(run: Server, seconds: float) -> float:
    """Return the CPU time that a server uses for a while, in percent of a core."""
    before, began = run.cpu_sec(), trio.current_time()
    await trio.sleep(seconds)
    return 100 * (run.cpu_sec() - before) / (trio.current_time() - began)


async def measure(run: Server, options: argparse.Namespace) -> None:
    """Take all measurements, in turns, and print them."""
    await admit(run.url, options.in_flight, 3600.0)
    print(f"{options.in_flight} rollouts in flight, {options.onlookers} onlooker(s)")
    for rate in (0.0, options.ends_per_sec):
        alone: list[float] = []
        watched: list[float] = []
        reader, first = Onlooker(), 0.0
        for _ in range(options.rounds):
            async with trio.open_nursery() as nursery:
                if rate:
                    nursery.start_soon(churn, run.url, rate)
                    await trio.sleep(3)
                alone.append(await used(run, options.seconds))
                for _ in range(options.onlookers):
                    reader, began = Onlooker(), trio.current_time()
                    nursery.start_soon(reader.run, run.url)
                    await reader.first.wait()
                    first = trio.current_time() - began
                watched.append(await used(run, options.seconds))
                nursery.cancel_scope.cancel()
        cost = sum(watched) / len(watched) - sum(alone) / len(alone)
        print(
            f"{rate:g} ends a second: {sum(alone) / len(alone):.2f} % of a core, "
            f"{sum(watched) / len(watched):.2f} % looked on: {cost:.2f} % more; "
            f"the first line took {1000 * first:.0f} ms, then "
            f"{(reader.rows - options.in_flight) / options.seconds:.0f} rows a second"
        )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--ends-per-sec", type=float, default=50.0)
    parser.add_argument("--onlookers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    with server() as run:
        trio.run(measure, run, options)


if __name__ == "__main__":
    main()
