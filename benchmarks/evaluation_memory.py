"""How much memory an evaluation takes for a small dataset and for one a hundred times as large.

The evaluating process talks to a server that answers at once, in a process of its own. Each
size runs in a fresh process, which says how large it has been at most (its peak resident set)
while it ran its attempts, and again once figures and report are written.

    python benchmarks/evaluation_memory.py
    python benchmarks/evaluation_memory.py --rows 1000 20000
    python benchmarks/evaluation_memory.py --resume   # all settled, so that only reading is left
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import trio

import rollout.evaluation.run
from rollout.client import RolloutClient
from rollout.evaluation import evaluate
from rollout.evaluation.config import parse_config

KIB_PER_UNIT = 1 if sys.platform != "darwin" else 1 / 1024
SAMPLE = {
    "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "42"}],
    "reward": 1.0,
    "metrics": {"completion_tokens": 3},
}


class AtOnce(httpx.AsyncBaseTransport):
    """A rollout server that admits everything and is done with it by the first poll."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        data = b"".join([data async for data in request.stream])
        parts = request.url.path.split("/")[1:]
        if parts == ["rollout"]:
            body = {
                "rollout_id": json.loads(data)["rollout_id"],
                "status": "queued",
                "polling_lease_token": "token",
                "result_wait_timeout_sec": 30,
                "polling_lease_timeout_sec": 120,
            }
            return httpx.Response(202, json=body)
        if parts[-1] == "result":
            body = {"rollout_id": parts[1], "status": "success", "sample": SAMPLE}
            body["agent_started_at"] = "2026-01-01T00:00:00Z"
            return httpx.Response(200, json=body)
        await trio.lowlevel.checkpoint()
        return httpx.Response(200, json={"status": "ok", "dispositions": {}})


class Client(RolloutClient):
    """A client of that server."""

    def __init__(self, **options: Any) -> None:
        super().__init__(http_client=httpx.AsyncClient(transport=AtOnce()), **options)


def peak_kib() -> int:
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB_PER_UNIT)


async def run(folder: Path, *, sync: bool) -> None:
    """Run one evaluation in this process, and print what it took."""
    rollout.evaluation.run.RolloutClient = Client  # type: ignore[misc]
    if not sync:
        os.fsync = lambda _: None  # type: ignore[assignment]
    config = parse_config(
        {
            "server": {"url": "http://at-once"},
            "chat": {"url": "http://nowhere/v1"},
            "dataset": {"path": str(folder / "rows.jsonl")},
            "run": {"output": str(folder / "out"), "max_in_flight": 32},
        }
    )
    write = rollout.evaluation.run._report  # noqa: SLF001 - to look before it
    reporting = []

    def report_of(*args: Any) -> None:
        reporting.append(peak_kib())
        write(*args)

    rollout.evaluation.run._report = report_of  # noqa: SLF001
    started = time.monotonic()
    before, count = peak_kib(), 0
    async with evaluate(config) as evaluation:
        opened = peak_kib()
        async for _ in evaluation:
            count += 1
        ran, ran_sec = peak_kib(), time.monotonic() - started
    report = {
        "attempts": evaluation.progress.settled,
        "ran": count,
        "run_sec": round(ran_sec, 1),
        "end_sec": round(time.monotonic() - started - ran_sec, 1),
        "peak_kib": {
            "before": before,
            "opened": opened,
            "ran": ran,
            "summarized": reporting[0],
            "reported": peak_kib(),
        },
    }
    print(json.dumps(report))


def write_rows(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for row in range(rows):
            prompt = f"What is {row} + {row}? " + "x" * 200
            file.write(json.dumps({"user_prompt": prompt, "ground_truth": str(2 * row)}) + "\n")


def measured(folder: Path, *options: str) -> dict[str, Any]:
    """Run one evaluation in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--folder", str(folder), *options],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the evaluation ended with exit code {done.returncode}")
    return json.loads(done.stdout)


@contextmanager
def dataset(rows: int, parent: Path | None) -> Generator[Path, None, None]:
    with tempfile.TemporaryDirectory(dir=parent) as temporary:
        write_rows(Path(temporary) / "rows.jsonl", rows)
        yield Path(temporary)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 200_000])
    parser.add_argument("--sync", action="store_true", help="sync files, which takes longer")
    parser.add_argument("--resume", action="store_true", help="then open each run once more")
    parser.add_argument("--dir", type=Path, help="where to keep the files while it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:

        async def this_one() -> None:
            await run(args.folder, sync=args.sync)

        trio.run(this_one)
        return 0
    options = ["--sync"] if args.sync else []
    reports = []
    if not args.json:
        print("    rows  attempts/s  peak MiB: before  opened     ran  summarized  reported")
    for rows in args.rows:
        with dataset(rows, args.dir) as folder:
            for _ in range(1 + args.resume):
                report = {"rows": rows, **measured(folder, *options)}
                reports.append(report)
                if not args.json:
                    peaks = [value / 1024 for value in report["peak_kib"].values()]
                    speed = report["ran"] / report["run_sec"]
                    print(
                        f"{rows:8} {speed:11.0f} {peaks[0]:17.1f} {peaks[1]:7.1f} "
                        f"{peaks[2]:7.1f} {peaks[3]:11.1f} {peaks[4]:9.1f}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps({"runs": reports}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
