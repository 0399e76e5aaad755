"""What it costs an evaluation that its report is served while it fills.

One evaluation runs in a process of its own, against a server that answers at once: without a page,
with one that nobody looks at, and with one that is looked at from another process, which asks as a
browser does. The run is as fast as this process goes, so the share of the page is the largest that
there can be. CPU seconds are those of the evaluating process up to the last attempt.

    python benchmarks/live_report.py --rows 10000
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import trio
from evaluation_memory import Client, dataset

import rollout.evaluation.run
from rollout.cli.eval.live import live_page
from rollout.evaluation import evaluate
from rollout.evaluation.config import parse_config

KINDS = ("none", "unseen", "seen")


async def run(folder: Path, kind: str) -> None:
    """Run one evaluation in this process, and print what it took."""
    rollout.evaluation.run.RolloutClient = Client  # type: ignore[misc]
    os.fsync = lambda _: None  # type: ignore[assignment]
    config = parse_config(
        {
            "server": {"url": "http://at-once"},
            "chat": {"url": "http://nowhere/v1"},
            "dataset": {"path": str(folder / "rows.jsonl")},
            "run": {"output": str(folder / "out"), "max_in_flight": 32},
        }
    )
    count, updates = 0, 0
    async with AsyncExitStack() as stack:
        page = looker = None
        if kind != "none":
            page, url = await stack.enter_async_context(live_page("127.0.0.1:0"))
        async with evaluate(config) as evaluation:
            if page is not None:
                page.begin(evaluation)
            if kind == "seen":
                command = [sys.executable, __file__, "--look", url]
                looker = subprocess.Popen(command)  # noqa: ASYNC220 - before the clock starts
            started, cpu = time.monotonic(), time.process_time()
            async for _ in evaluation:
                count += 1
                if page is not None:
                    page.move()
            run_sec, cpu_sec = time.monotonic() - started, time.process_time() - cpu
            if page is not None and page._report is not None:  # noqa: SLF001 - to look on
                updates = page._report.version  # noqa: SLF001
        if looker is not None:
            looker.terminate()
            looker.wait()
            page._lookers.clear()  # type: ignore[union-attr] # noqa: SLF001 - nobody says bye
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"run_sec": run_sec, "cpu_sec": cpu_sec, "peak_mib": peak, "updates": updates}
    print(json.dumps({"attempts": count, **found}))


async def look(url: str) -> None:
    """Ask for what is new, and for the headline where it is, until killed."""
    start, version = 0, -1
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while True:
            answer = await http.get("/news", params={"page": "p", "from": start, "wait": ""})
            if answer.status_code != httpx.codes.OK:
                await http.get("/")
                await trio.sleep(0.2)
                continue
            state = json.loads(answer.text.partition("\n")[0])
            start = state["next"]
            if state["version"] != version:
                version = state["version"]
                await http.get("/")


def measured(folder: Path, kind: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--folder", str(folder), "--kind", kind]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dir", type=Path, help="where to keep the files while it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--look", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.look is not None:
        trio.run(look, args.look)
    if args.folder is not None:
        trio.run(run, args.folder, args.kind)
        return 0
    reports = []
    if not args.json:
        print("page    attempts  run s  CPU s  updates  peak MiB")
    for kind in KINDS:
        with dataset(args.rows, args.dir) as folder:
            report = {"page": kind, **measured(folder, kind)}
        reports.append(report)
        if not args.json:
            print(
                f"{kind:6} {report['attempts']:9} {report['run_sec']:6.1f} "
                f"{report['cpu_sec']:6.1f} {report['updates']:8} {report['peak_mib']:9.0f}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"runs": reports}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
