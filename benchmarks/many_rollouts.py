"""Many rollouts at once, through one client and one server: wall time and memory.

    python benchmarks/many_rollouts.py --rollouts 1000 --seconds 2

Starts a server process whose workflow sleeps, runs all rollouts at the same time in this
process, and prints the wall time, how much of it was not the sleep itself, and the peak
resident memory of both processes. Exits with 1 if any rollout does not succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import trio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
)
from rollout.client import RolloutClient
from rollout.server import create_rollout_server, serve

SERVE = "--serve"


class Sleep(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> Any:
        await trio.sleep(ctx.prompt[0]["sleep"])
        return [*ctx.prompt, {"role": "assistant", "content": "42"}]


class Compare(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))


async def run_server() -> None:
    backend = LocalBackend(
        workflow=Sleep,
        workflow_config=AgentWorkflowConfig(
            name="sleep", concurrency=ConcurrencyConfig(max_concurrent=None)
        ),
        grader=Compare,
    )

    async with trio.open_nursery() as nursery:

        async def run(
            *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
        ) -> None:
            await serve(
                create_rollout_server(backend=backend),
                bind="127.0.0.1:0",
                task_status=task_status,
            )

        urls = await nursery.start(run)
        print(urls[0], flush=True)


async def run_client(url: str, options: argparse.Namespace) -> dict[str, Any]:
    rollouts, seconds = options.rollouts, options.seconds
    outcomes: Counter[str] = Counter()
    latencies: list[float] = []

    async def one(client: RolloutClient, number: int) -> None:
        began = trio.current_time()
        prompt = [{"role": "user", "content": "What is 6 * 7?", "sleep": seconds}]
        try:
            result = await client.run_rollout(prompt, "http://unused/v1", f"r{number}", label="42")
        except Exception as error:  # noqa: BLE001 - every failure is counted by its type
            outcomes[type(error).__name__] += 1
            return
        reward = result.sample.reward if result.sample else None
        outcomes["success" if reward == 1.0 else str(result.status)] += 1
        latencies.append(trio.current_time() - began)

    began = trio.current_time()
    feed = not options.no_feed
    async with RolloutClient(url=url, feed=feed) as client, trio.open_nursery() as nursery:
        for number in range(rollouts):
            nursery.start_soon(one, client, number)
    wall = trio.current_time() - began
    latencies.sort()
    return {
        "rollouts": rollouts,
        "seconds_each": seconds,
        "outcomes": dict(outcomes),
        "wall_sec": round(wall, 2),
        "overhead_sec": round(wall - seconds, 2),
        "latency_p50_sec": round(latencies[len(latencies) // 2], 2) if latencies else None,
        "latency_max_sec": round(latencies[-1], 2) if latencies else None,
    }


def peak_mib(who: int) -> float:
    unit = 1024 * 1024 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(who).ru_maxrss / unit, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--no-feed", action="store_true", help="poll for each rollout alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(SERVE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(run_server)
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * options.rollouts + 200
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    command = [sys.executable, str(Path(__file__)), SERVE]
    with (
        tempfile.TemporaryDirectory(prefix="rollout-bench-") as kept,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"ROLLOUT_ARTIFACT_ROOT": kept},
        ) as server,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        report = trio.run(run_client, url, options)
        server.terminate()
        report["server_exit_code"] = server.wait()
    report["client_peak_mib"] = peak_mib(resource.RUSAGE_SELF)
    report["server_peak_mib"] = peak_mib(resource.RUSAGE_CHILDREN)
    if options.json:
        print(json.dumps(report))
    else:
        width = max(map(len, report))
        for name, value in report.items():
            print(f"{name:<{width}}  {value}")
    return 0 if report["outcomes"] == {"success": options.rollouts} else 1


if __name__ == "__main__":
    sys.exit(main())
