"""What the report of a large run takes: to be written, and to be looked at.

The run is drawn, with one short conversation for each attempt, and lies in a folder as an
evaluation leaves it. Its report is written in a process of its own, which says how large it
was at most (its peak resident set) before and after. If playwright and Chromium are there,
the report is opened, sorted and searched as well; times are those of the page's own clock,
and its heap is what remains after a garbage collection.

    python benchmarks/report_size.py
    python benchmarks/report_size.py --attempts 4000 1000000 --dir /dev/shm
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rollout.codec import dump_json
from rollout.evaluation.folder.journal import encode_line, record_line
from rollout.evaluation.folder.outputs import summarize
from rollout.evaluation.records import AttemptOutcome, AttemptRecord
from rollout.evaluation.report import write_report

KIB_PER_UNIT = 1 if sys.platform != "darwin" else 1 / 1024
START = datetime(2026, 1, 1, tzinfo=UTC)
N = 4

# When the page can be used, by its own clock.
WATCH = """new MutationObserver((_, observer) => {
  if (!document.documentElement.dataset.ready) return;
  window.openedAfter = performance.now();
  observer.disconnect();
}).observe(document, { subtree: true, attributes: true })"""

# What people do with the table, and the milliseconds that each takes until it is drawn.
LOOK = """async () => {
  const drawn = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  const timed = async (action) => {
    const before = performance.now();
    action();
    await drawn();
    return performance.now() - before;
  };
  const by = (key) => () => document.querySelector(`th.k-${key} button`).click();
  const found = { ready: window.openedAfter };
  found.sort_figure = await timed(by("duration"));
  found.sort_text = await timed(by("text"));
  found.group = await timed(() => document.getElementById("grouped").click());
  return found;
}"""


def peak_mib() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB_PER_UNIT / 1024)


def drawn(rng: random.Random, row: int, attempt: int) -> AttemptRecord:
    reward = round(rng.betavariate(2, 1), 3)
    failed = rng.random() < 0.05
    ending: dict[str, Any] = {"reward": reward, "passed": reward >= 0.8}
    if failed:
        ending = {"err_category": "agent_error", "err_message": f"no answer after {reward} s"}
    return AttemptRecord(
        row=row,
        attempt=attempt,
        rollout_id=f"{rng.getrandbits(48):012x}-{row}-{attempt}-0",
        outcome=AttemptOutcome.FAILURE if failed else AttemptOutcome.SUCCESS,
        submitted_at=START + timedelta(seconds=(row * N + attempt) / 10),
        duration_sec=rng.lognormvariate(1, 0.6),
        prompt_tokens=rng.randint(50, 4000),
        completion_tokens=rng.randint(5, 700),
        trajectory=f"{row}-{attempt}-0.json",
        **ending,
    )


def conversation(record: AttemptRecord) -> dict[str, Any]:
    prompt = f"What is {record.row} + {record.row}? " + "Think about it before you answer. " * 4
    steps = [
        {"step_id": 1, "source": "user", "message": prompt},
        {"step_id": 2, "source": "agent", "message": f"It is {2 * record.row}."},
    ]
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "drawn"}, "steps": steps}


def write_run(folder: Path, attempts: int) -> None:
    rng = random.Random(attempts)
    (folder / "trajectories").mkdir(parents=True)
    manifest = {
        "schema": "rollout-evaluation/1",
        "run_id": "drawn",
        "created_at": "2026-01-01T00:00:00Z",
        "dataset": {"path": "drawn.jsonl", "selected": attempts // N},
        "server": {},
        "chat": {},
        "run": {"n": N, "pass_threshold": 0.8},
    }
    (folder / "manifest.json").write_bytes(dump_json(manifest))
    with (folder / "events.jsonl").open("wb") as file:
        file.write(encode_line({"schema": "rollout-events/1", "run_id": "drawn"}))
        for index in range(attempts // N * N):
            record = drawn(rng, *divmod(index, N))
            file.write(record_line(record))
            path = folder / "trajectories" / str(record.trajectory)
            path.write_bytes(dump_json(conversation(record)))
    summarize(folder)


def write(folder: Path) -> None:
    """Write the report in this process, and print what it took."""
    before, started = peak_mib(), time.monotonic()
    path = write_report(folder)
    report = {
        "write_sec": time.monotonic() - started,
        "peak_mib": {"before": before, "after": peak_mib()},
        "page_mib": path.stat().st_size / 2**20,
    }
    print(json.dumps(report))


def alone(*options: str) -> bytes:
    """Run a part in a process of its own; a process that is started inherits the peak."""
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def look(report: Path) -> dict[str, float] | None:
    """Open the report in a browser; ``None`` if there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if program is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_init_script(WATCH)
        page.goto(report.as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready]", state="attached", timeout=300_000)
        page.wait_for_selector(".attempts tbody tr")
        found: dict[str, float] = page.evaluate(LOOK)
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        usage = session.send("Runtime.getHeapUsage")
        found["heap_mib"] = (usage["usedSize"] + usage.get("backingStorageSize", 0)) / 2**20
        browser.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attempts", type=int, nargs="+", default=[2_000, 200_000])
    parser.add_argument("--dir", type=Path, help="where to keep the files while it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--draw", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draw is not None:
        write_run(args.draw, args.attempts[0])
        return 0
    if args.write is not None:
        write(args.write)
        return 0
    if args.look is not None:
        print(json.dumps(look(args.look)))
        return 0
    if not args.json:
        print("attempts  write s  peak MiB: before   after  page MiB", end="")
        print("  open s  sort by figure s  by text s  group s  heap MiB")
    reports = []
    for attempts in args.attempts:
        with tempfile.TemporaryDirectory(dir=args.dir) as temporary:
            folder = Path(temporary) / "run"
            alone("--draw", str(folder), "--attempts", str(attempts))
            written = json.loads(alone("--write", str(folder)))
            report = {"attempts": attempts, **written}
            report["browser"] = looked = json.loads(alone("--look", str(folder / "report.html")))
        reports.append(report)
        if args.json:
            continue
        peaks = report["peak_mib"]
        print(
            f"{attempts:8} {report['write_sec']:8.1f} {peaks['before']:17.1f} "
            f"{peaks['after']:7.1f} {report['page_mib']:9.1f}",
            end="",
        )
        if looked is None:
            print("  (no browser)", flush=True)
        else:
            print(
                f" {looked['ready'] / 1000:7.2f} {looked['sort_figure'] / 1000:17.2f} "
                f"{looked['sort_text'] / 1000:10.2f} {looked['group'] / 1000:8.2f} "
                f"{looked['heap_mib']:9.1f}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"runs": reports}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
