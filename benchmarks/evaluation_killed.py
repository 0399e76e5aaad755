"""Kill an evaluation again and again, resume it each time, and compare with one left alone.

A chat endpoint and a rollout server, both those of the demo, run in processes of their own.
The evaluation runs in another one, which gets SIGKILL once so many records are on the disk
(how many is drawn with a seed) and is started again, until it comes to its end. Then the
figures of its `metrics.json` have to be those of a run that nobody disturbed, and each attempt
has to be there exactly once.

    python benchmarks/evaluation_killed.py
    python benchmarks/evaluation_killed.py --rows 100 --n 2 --kills 5 --seed 7
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
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hypercorn.trio
import trio
from hypercorn.config import Config

from rollout.demo.arithmetic import ScriptedModel, make_problems
from rollout.demo.chat import create_chat_app
from rollout.evaluation import evaluate, final_records, load_config, read_records

CHAT_KEY = "killed-chat-key"
SERVER_KEY = "killed-server-key"
LOOK_SEC = 0.002

SERVER = f"""\
from rollout.demo.server import create_demo_server

app = create_demo_server(max_concurrent=64, api_key="{SERVER_KEY}")
"""

CONFIG = """\
[server]
url = "{server}"
api_key_env = "KILLED_SERVER_KEY"

[chat]
url = "{chat}/v1"
api_key_env = "KILLED_CHAT_KEY"
model = "scripted"

[dataset]
path = "problems.jsonl"

[run]
output = "{output}"
n = {n}
max_in_flight = {max_in_flight}
"""


# --- the processes ----------------------------------------------------------------------------


async def serve_chat(seed: int, think_sec: float) -> None:
    """Serve the chat endpoint until the process ends; print where."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.accesslog = config.errorlog = None
    app = create_chat_app(ScriptedModel(seed=seed, think_sec=think_sec), CHAT_KEY)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(hypercorn.trio.serve, app, config))
        print(f"listening on {urls[0]}", flush=True)


async def run_evaluation(path: str) -> None:
    """Run an evaluation, or go on with it."""
    async with evaluate(load_config(path)) as run:
        async for _ in run:
            pass


@contextmanager
def process(*command: str, cwd: Path) -> Generator[str, None, None]:
    """Run a server for the length of the block; yields its URL."""
    with subprocess.Popen(
        [sys.executable, *command], cwd=cwd, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def start(config: Path) -> subprocess.Popen[bytes]:
    keys = {"KILLED_CHAT_KEY": CHAT_KEY, "KILLED_SERVER_KEY": SERVER_KEY}
    command = [sys.executable, str(Path(__file__).resolve()), "--evaluate", str(config)]
    return subprocess.Popen(command, env={**os.environ, **keys})


# --- what is done -----------------------------------------------------------------------------


class Lines:
    """Counts the lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0
        self.count = 0

    def look(self) -> int:
        """Return how many there are by now."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.read)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self.read += whole
            self.count += data[:whole].count(b"\n")
        return self.count


def run_to_the_end(config: Path) -> float:
    started = time.monotonic()
    with start(config) as running:
        code = running.wait()
    if code:
        raise SystemExit(f"the evaluation of {config} ended with exit code {code}")
    return time.monotonic() - started


def run_killed(config: Path, folder: Path, targets: list[int]) -> list[int]:
    """Run with a SIGKILL at each target; return how many records there were then."""
    killed_at = []
    for target in targets:
        lines = Lines(folder / "events.jsonl")
        before = lines.look()
        with start(config) as running:
            # One line more than records is the head; one more than before, so that each
            # process gets to do something.
            while lines.look() < max(target + 1, before + 1) and running.poll() is None:
                time.sleep(LOOK_SEC)
            if running.poll() is not None:
                raise SystemExit(
                    f"the evaluation ended with exit code {running.returncode} before it was "
                    f"killed at {target} records"
                )
            running.send_signal(signal.SIGKILL)
            running.wait()
        killed_at.append(lines.look() - 1)
    return killed_at


def findings(folder: Path, calm: Path, expected: set[tuple[int, int]]) -> list[str]:
    """Say what is wrong with the run that was killed; nothing, if all is well."""
    found = []
    both = (folder, calm)
    results = [json.loads((each / "metrics.json").read_text())["results"] for each in both]
    if results[0] != results[1]:
        found.append(f"the results differ: {results[0]} and {results[1]}")
    counting = Counter(record.key for record in read_records(folder) if record.counts)
    if set(counting) != expected:
        found.append(f"attempts are missing or too many: {set(counting) ^ expected}")
    twice = [key for key, count in counting.items() if count > 1]
    if twice:
        found.append(f"attempts count twice: {twice}")
    outcomes = [
        [(record.key, record.outcome, record.reward) for record in final_records(each)]
        for each in both
    ]
    if outcomes[0] != outcomes[1]:
        found.append("attempts ended otherwise")
    if not (folder / "report.html").exists():
        found.append("there is no report")
    return found


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    with (work / "problems.jsonl").open("w") as file:
        for problem in make_problems(args.rows, args.seed):
            row = {"user_prompt": problem.question, "ground_truth": problem.answer}
            file.write(json.dumps(row) + "\n")
    (work / "server.py").write_text(SERVER)
    total = args.rows * args.n
    drawn = random.Random(args.seed).sample(range(total), args.kills)
    me = str(Path(__file__).resolve())
    chat_command = (me, "--chat", str(args.seed), "--think-sec", str(args.think_sec))
    serve = ("-m", "rollout.cli", "serve", "server.py:app", "--bind", "127.0.0.1:0")
    with (
        process(*chat_command, cwd=work) as chat,
        process(*serve, "--drain-sec", "0", "--delivery-sec", "0", cwd=work) as server,
    ):
        for name in ("calm", "killed"):
            (work / f"{name}.toml").write_text(
                CONFIG.format(
                    server=server,
                    chat=chat,
                    output=name,
                    n=args.n,
                    max_in_flight=args.max_in_flight,
                )
            )
        calm_sec = run_to_the_end(work / "calm.toml")
        killed_at = run_killed(work / "killed.toml", work / "killed", sorted(drawn))
        resumed_sec = run_to_the_end(work / "killed.toml")
    expected = {(row, attempt) for row in range(args.rows) for attempt in range(args.n)}
    metrics = json.loads((work / "killed" / "metrics.json").read_text())
    return {
        "rows": args.rows,
        "n": args.n,
        "seed": args.seed,
        "calm_sec": round(calm_sec, 2),
        "attempts_per_sec": round(total / calm_sec, 1),
        "killed_at": killed_at,
        "last_resumed_sec": round(resumed_sec, 2),
        "records": sum(1 for _ in read_records(work / "killed")),
        "passed": metrics["results"]["attempts"]["passed"],
        "findings": findings(work / "killed", work / "calm", expected),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-in-flight", type=int, default=48)
    parser.add_argument(
        "--think-sec", type=float, default=0.005, help="how long the model takes for an answer"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", type=Path, help="work in this folder, which is new, and keep it")
    parser.add_argument("--chat", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--evaluate", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.chat is not None:
        trio.run(serve_chat, args.chat, args.think_sec)
        return 0
    if args.evaluate is not None:
        trio.run(run_evaluation, args.evaluate)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        report = measure(args, work.resolve())
    if args.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:18} {value}")
        print("the same" if not report["findings"] else "NOT THE SAME")
    return bool(report["findings"])


if __name__ == "__main__":
    sys.exit(main())
