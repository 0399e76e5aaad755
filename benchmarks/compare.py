"""Our client and server against the official ones, interleaved in one run on the same work.

    python benchmarks/compare.py --official-python /path/to/venv/bin/python
    python benchmarks/compare.py --quick --pairs ours
    python benchmarks/compare.py --profile server
    python benchmarks/compare.py --layers server

Measures no-op rollouts per second, the latency of one alone, wall time and memory of many at
once, requests and bytes of a rollout, and the processor time of each process. Prints tables and
writes a JSON file and a plot to ``benchmarks/results/``. Everything stays on the loopback
interface. ``--official-python`` names a Python that has ``osmosis-ai[server]``; without one
only our own pair is measured. Exits with 1 if any job failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trio
from attrs import asdict, evolve
from comparison import plot
from comparison.job import Job
from comparison.layers import by_layer
from comparison.measures import Bench, Record, Settings
from comparison.pairs import PAIRS, Launcher, Pair, describe_python
from comparison.process import ChildError
from comparison.profiles import profile
from comparison.report import number, print_layers, print_profile, print_results
from comparison.summary import summarize, targets
from rich.console import Console

from rollout.client import RolloutClient

RESULTS = Path(__file__).parent / "results"
MEASURES = ("throughput", "traffic", "wall")
FORMAT = 1
OUR_PACKAGES = ("trio-rollout", "trio", "httpx", "hypercorn", "quart", "quart-trio", "h11")
OFFICIAL_PACKAGES = ("osmosis-ai", "httpx", "uvicorn", "fastapi", "starlette", "h11")
QUICK = Settings(
    levels=(1, 16),
    scale_levels=(),
    rollouts=30,
    at_least_sec=0.2,
    limit_sec=5.0,
    rounds=1,
    wall=((30, 0.3),),
    wall_limit_sec=5.0,
    traffic_rollouts=30,
)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def works(text: str) -> tuple[tuple[int, float], ...]:
    """Parse ``1000x5,10000x30``."""
    parts = [part.split("x") for part in text.split(",") if part]
    return tuple((int(count), float(sleep)) for count, sleep in parts)


def names(choices: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(part for part in text.split(",") if part)
        unknown = [name for name in chosen if name not in choices]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"choose from {', '.join(choices)}")
        return chosen

    return parse


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--official-python", type=Path, metavar="PATH", help="has osmosis-ai[server] installed")
    add("--pairs", type=names(tuple(PAIRS)), help=f"of {', '.join(PAIRS)}; default: all possible")
    add("--measures", type=names(MEASURES), default=MEASURES, help=f"of {', '.join(MEASURES)}")
    add("--quick", action="store_true", help="little work, within a minute; figures mean little")
    add("--run-rollouts", action="store_true", help="our client on our server: run_rollouts()")
    add("--output", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")
    add("--no-plot", action="store_true", help="do not draw the figures")
    amount = parser.add_argument_group("amount of work; the defaults depend on --quick")
    add = amount.add_argument
    add("--levels", type=numbers, help="rollouts in flight, as 1,16,64")
    add("--scale-levels", type=numbers, help="the same, for our pair alone")
    add("--rollouts", type=int, help="no-op rollouts of a job at least")
    add("--at-least-sec", type=float, help="how long a no-op job goes on at least")
    add("--limit-sec", type=float, help="when it is cut short")
    add("--rounds", type=int, help="how often each no-op job runs")
    add("--wall", type=works, help="rollouts at once and their seconds, as 1000x5,10000x30")
    add("--wall-limit-sec", type=float, help="when those are cut short, on top of the sleep")
    add("--wall-rounds", type=int, help="how often each of those runs")
    add("--official-most", type=int, help="most rollouts at once with an official side")
    add("--bounded-most", type=int, help="most rollouts at once with the official HTTP client")
    add("--traffic-rollouts", type=int, help="rollouts of the runs that count requests")
    profiling = parser.add_argument_group("profile instead of measuring")
    add = profiling.add_argument
    add("--profile", choices=("server", "client"), help="which of our processes; of one pair")
    add("--layers", choices=("server", "client"), help="its processor time by layer instead")
    add("--profile-in-flight", type=int, default=64, metavar="N")
    add("--profile-rollouts", type=int, default=1500, metavar="N")
    add("--profile-lines", type=int, default=15, metavar="N")
    options = parser.parse_args(arguments)
    if (options.profile or options.layers) and options.pairs and len(options.pairs) != 1:
        parser.error("--profile and --layers take one pair")
    needing = [PAIRS[name].title for name in options.pairs or () if PAIRS[name].needs_official]
    if needing and options.official_python is None:
        parser.error(f"--official-python is needed for: {', '.join(needing)}")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    given = {
        name: getattr(options, name)
        for name in asdict(Settings())
        if getattr(options, name) is not None
    }
    return evolve(QUICK if options.quick else Settings(), **given)


def pairs_of(options: argparse.Namespace) -> tuple[Pair, ...]:
    if options.pairs:
        return tuple(PAIRS[name] for name in options.pairs)
    if options.profile or options.layers:
        return (PAIRS["ours"],)
    return tuple(
        pair for pair in PAIRS.values() if options.official_python or not pair.needs_official
    )


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def describe(options: argparse.Namespace, settings: Settings, pairs: tuple[Pair, ...]) -> Record:
    """Say what is measured, on what.

    Raises:
        LookupError: The official package is not where it is said to be, or our client has no
            `run_rollouts`.
    """
    if options.run_rollouts and not hasattr(RolloutClient, "run_rollouts"):
        raise LookupError("--run-rollouts: the installed client has no run_rollouts()")
    official = None
    if any(pair.needs_official for pair in pairs):
        official = describe_python(options.official_python, *OFFICIAL_PACKAGES)
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "ours": describe_python(sys.executable, *OUR_PACKAGES),
        "official": official,
        "run_rollouts": options.run_rollouts,
        "settings": asdict(settings),
        "pairs": [pair.key for pair in pairs],
    }


def show_progress(console: Console, record: Record) -> None:
    if "wall_sec" not in record and "error" not in record:
        return
    what = f"{record['measure']:<10} {record['in_flight']:>6} in flight"
    if record["sleep_sec"]:
        what += f" x {record['sleep_sec']:g} s"
    result = "failed" if "error" in record else f"{number(record['rollouts_per_sec'])}/s"
    if record.get("cut"):
        result += f" (cut after {record['wall_sec']:.0f} s)"
    console.print(
        f"{what}, round {record['round'] + 1}: {PAIRS[record['pair']].title}: {result}",
        style="dim",
        highlight=False,
    )


async def measure(bench: Bench, measures: Sequence[str]) -> None:
    async with bench.open():
        for name in measures:
            await getattr(bench, name)()


def write(
    folder: Path, head: Record, bench: Bench, rows: list[Record], *, plotted: bool
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    files = [folder / f"{name}.json"]
    body = {
        **head,
        "summary": rows,
        "targets": [target.to_json() for target in targets(bench.records)],
        "left_out": bench.left_out,
        "records": bench.records,
    }
    files[0].write_text(json.dumps(body, indent=1) + "\n")
    if plotted:
        files.append(folder / f"{name}.png")
        plot.draw(files[1], bench.pairs, rows)
    return files


def run_profile(console: Console, options: argparse.Namespace, launcher: Launcher) -> int:
    (pair,) = pairs_of(options)
    who = options.profile or options.layers
    if getattr(pair, who) != "ours":
        console.print(f"the {who} of this pair is not ours", style="red")
        return 2
    job = Job(
        "profile",
        rollouts=options.profile_rollouts,
        in_flight=options.profile_in_flight,
        limit_sec=120.0,
    )
    if options.layers:
        print_layers(console, who, trio.run(by_layer, launcher, pair, who, job))
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    found = trio.run(profile, launcher, pair, who, job, options.output)
    print_profile(console, found, options.profile_lines)
    console.print(f"written: {options.output / who}.prof", soft_wrap=True)
    return 0


def run_comparison(console: Console, options: argparse.Namespace, launcher: Launcher) -> int:
    settings, pairs = settings_of(options), pairs_of(options)
    head = describe(options, settings, pairs)
    bench = Bench(settings, launcher, pairs, lambda record: show_progress(console, record))
    interrupted = False
    try:
        trio.run(measure, bench, options.measures)
    except KeyboardInterrupt:
        console.print("interrupted: this is what there is", style="yellow")
        interrupted = True
    rows = summarize(bench.records)
    print_results(console, pairs, rows, bench.left_out, targets(bench.records))
    reason = "no plot" if options.no_plot else plot.why_not()
    files = write(options.output, head, bench, rows, plotted=reason is None)
    if reason and not options.no_plot:
        console.print(reason, style="yellow")
    if not any(pair.needs_official for pair in pairs) and not options.pairs:
        console.print("only our own pair: --official-python adds the official ones")
    console.print("written: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
    if interrupted:
        return 130
    return 1 if any(row["errors"] or row["failed"] for row in rows) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    console = Console()
    raise_file_limit()
    launcher = Launcher(options.official_python, many=options.run_rollouts)
    try:
        run = run_profile if options.profile or options.layers else run_comparison
        return run(console, options, launcher)
    except (LookupError, ChildError) as error:
        console.print(str(error), style="red", markup=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
