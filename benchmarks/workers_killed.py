"""Kill workers of a front again and again under load, and check what its callers get.

`rollout serve --workers` runs in processes of its own. While one client keeps so many rollouts in
flight, a random worker gets SIGKILL at random moments (drawn with a seed), whenever all workers but
one are up at least. Each workflow appends its rollout's id to a file, so that one that runs twice
shows. Then:

- every rollout has ended with exactly one result at its caller, and without an error;
- no workflow ran twice for one id, and each that ran has `agent_started_at` in its result;
- a rollout has succeeded, or its agent had started and its worker was lost;
- every slot of every worker is free, and so many rollouts at once run there again.

    python benchmarks/workers_killed.py
    python benchmarks/workers_killed.py --kills 5 --workers 2 --in-flight 50 --seed 7
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from server_killed import LOOK_SEC, RAN, Compare, Load, Note

from rollout import AgentWorkflowConfig, ConcurrencyConfig, LocalBackend
from rollout.client import RolloutClient
from rollout.server import RolloutServer, create_rollout_server
from rollout.types import WORKER_LOST, RolloutResultResponse, RolloutStatus

SLOTS = 50
"""How many rollouts each worker runs at a time."""

KILL_AFTER_SEC = (0.2, 2.0)
"""How long after the last kill the next one comes, at least and at most."""

END_SEC = 60.0
"""How long rollouts may take to end once nothing is killed any more."""


def make_app() -> RolloutServer:
    """Make the application that the workers serve."""
    concurrency = ConcurrencyConfig(max_concurrent=SLOTS)
    backend = LocalBackend(
        workflow=Note,
        workflow_config=AgentWorkflowConfig(name="note", concurrency=concurrency),
        grader=Compare,
        artifact_root=False,
    )
    return create_rollout_server(backend=backend)


@contextmanager
def front(folder: Path, workers: int) -> Iterator[str]:
    """Serve the application with workers for the block; yields the front's URL."""
    command = [sys.executable, "-m", "rollout.cli", "serve", f"{__file__}:make_app"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--bind", "127.0.0.1:0", "--workers", str(workers), "--quiet"],
            env={**os.environ, RAN: str(folder / "ran")},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit((folder / "log").read_text())
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


async def listening(client: RolloutClient, least: int) -> list[int]:
    """Wait until so many workers are up; return the process ids of all that listen."""
    while True:
        health = await client.health()
        if sum(worker["status"] == "up" for worker in health["workers"]) >= least:
            return [each["pid"] for each in health["processes"] if each["status"] == "listening"]
        await trio.sleep(LOOK_SEC)


async def run(options: argparse.Namespace, url: str, ran: Path) -> tuple[dict[str, Any], list[str]]:
    load = Load(options.seed)
    draw = random.Random(f"kills {options.seed}")
    in_flight: list[int] = []
    async with RolloutClient(url=url) as client:
        await listening(client, options.workers)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run, client, options.in_flight)
            await load.has_ended(1)
            for _ in range(options.kills):
                await trio.sleep(draw.uniform(*KILL_AFTER_SEC))
                pids = await listening(client, max(options.workers - 1, 1))
                in_flight.append(load.in_flight)
                os.kill(draw.choice(pids), signal.SIGKILL)
            load.open = False
            nursery.cancel_scope.deadline = trio.current_time() + END_SEC
        wall_sec = trio.current_time() - began
        counts = Counter(_kind(each.outcome) for each in load.ended.values())
        longest_sec, rollouts = load.longest_sec, len(load.requests)
        await listening(client, options.workers)
        health = await client.health()
        places = options.workers * SLOTS
        load.open = True
        with trio.move_on_after(END_SEC):
            await load.run(client, places, most=rollouts + places)
    findings = check(load, ran)
    free = health["concurrency"]
    if free != {"max_concurrent": places, "queued": 0, "running": 0}:
        findings.append(f"not every slot is free: {free}")
    after = list(load.ended.values())[rollouts:]
    succeeded = sum(_kind(each.outcome) == "succeeded" for each in after)
    if succeeded != places:
        findings.append(f"of {places} rollouts after the kills {succeeded} succeeded")
    return {
        "seed": options.seed,
        "workers": options.workers,
        "kills": len(in_flight),
        "restarts": health["restarts"],
        "rollouts": rollouts,
        "in_flight_at_kills": f"{min(in_flight)} to {max(in_flight)}",
        **dict(sorted(counts.items())),
        "longest_wait_sec": round(longest_sec, 2),
        "succeeded_at_once_afterwards": succeeded,
        "wall_sec": round(wall_sec, 1),
    }, findings


def check(load: Load, ran: Path) -> list[str]:
    """Compare what callers got with what ran."""
    lines = Counter(ran.read_text().split())
    found = load.findings
    found += [f"{each} ran {count} times" for each, count in lines.items() if count > 1]
    found += [f"{each} has no end" for each in load.requests if each not in load.ended]
    for rollout_id, (_, outcome) in load.ended.items():
        kind = _kind(outcome)
        if kind not in {"succeeded", WORKER_LOST}:
            found.append(f"{rollout_id} ended with {outcome!r}")
        elif isinstance(outcome, RolloutResultResponse) and outcome.agent_started_at is None:
            found.append(f"{rollout_id} has no start of its agent: {outcome}")
        elif kind == "succeeded" and rollout_id not in lines:
            found.append(f"{rollout_id} has succeeded, and never ran")
    return found


def _kind(outcome: RolloutResultResponse | Exception) -> str:
    if not isinstance(outcome, RolloutResultResponse):
        return type(outcome).__name__
    if outcome.status is RolloutStatus.SUCCESS:
        return "succeeded"
    return outcome.err_source or str(outcome.err_category)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, front(Path(folder), options.workers) as url:
        figures, findings = trio.run(run, options, url, Path(folder) / "ran")
    if options.json:
        print(json.dumps({**figures, "findings": findings}))
    else:
        for what, value in figures.items():
            print(f"  {what:40} {value}")
        print(
            *findings or ["each agent was started once at most, every caller got its end"], sep="\n"
        )
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
