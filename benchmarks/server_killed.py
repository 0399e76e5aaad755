"""Kill a rollout server with a state again and again under load, and check what its callers get.

The server runs in a process of its own. While one client keeps so many rollouts in flight, it
gets SIGKILL at random moments (drawn with a seed) and is started again on the same address and
state. Each workflow appends its rollout's id to a file, so that one that runs twice shows. Then:

- every rollout has ended with exactly one result at its caller, and without an error;
- no workflow ran twice for one id;
- what was reported once is reported again, the same, also after one more kill;
- `agent_started_at` is there for all whose workflow ran.

After that the state meets trouble: a second server on it, damaged pages, and a full disk (a small
tmpfs in a user namespace; left out where there is no such thing).

    python benchmarks/server_killed.py
    python benchmarks/server_killed.py --kills 3 --in-flight 20 --seed 7
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any

import trio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
)
from rollout.client import FinishedRollout, RolloutClient
from rollout.codec import parse_json, structure
from rollout.context import get_rollout_context
from rollout.errors import (
    InvalidLeaseError,
    RolloutServerError,
    StateUnavailableError,
    UnknownRolloutError,
)
from rollout.server import RolloutServer, create_rollout_server, serve
from rollout.server.admission_keys import lease_token
from rollout.types import RolloutInitRequest, RolloutResultResponse, RolloutStatus

RAN = "KILLED_RAN"
"""The variable that names the file to which workflows append."""

LEASE_SEC = 60.0
WAIT_SEC = 20.0
RETENTION_SEC = 3600.0
LONGEST_RUN_SEC = 0.5
KILL_AFTER_SEC = (0.2, 1.5)
"""How long a server that serves lives, at least and at most."""
DOWN_SEC = (0.0, 0.5)
ASKED_AGAIN = 50
"""How many results that were reported are asked for again after each restart."""
PAGE = 4096
DISK_MIB = 16
LOOK_SEC = 0.02


# --- the server -------------------------------------------------------------------------------


class Note(AgentWorkflow[Any]):
    """Appends the rollout's id to a file, works for a while, and answers with the id."""

    async def run(self, ctx: Any) -> Any:
        context = get_rollout_context()
        assert context is not None
        line = f"{context.rollout_id}\n".encode()
        descriptor = os.open(os.environ[RAN], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        await trio.sleep(ctx.prompt[0]["sleep"])
        text = context.rollout_id + "." * ctx.prompt[0]["padding"]
        return [*ctx.prompt, {"role": "assistant", "content": text}]


class Compare(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(float(ctx.sample.messages[-1]["content"].startswith(ctx.label)))


def make_app(state: Path) -> RolloutServer:
    backend = LocalBackend(
        workflow=Note,
        workflow_config=AgentWorkflowConfig(
            name="note", concurrency=ConcurrencyConfig(max_concurrent=None)
        ),
        grader=Compare,
        artifact_root=False,
    )
    return create_rollout_server(
        backend=backend,
        state=state,
        result_wait_timeout_sec=WAIT_SEC,
        polling_lease_timeout_sec=LEASE_SEC,
        result_retention_sec=RETENTION_SEC,
    )


async def run_server(state: Path, bind: str) -> None:
    """Wait for a line on stdin, then serve until a signal comes; both is said in a line."""
    app = make_app(state)
    print("ready", flush=True)
    sys.stdin.readline()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, app, bind=bind))
        print("serving", flush=True)


class Server:
    """A server on one address and state, whose process can be killed and another started.

    That other process is at hand, with its imports done, and waits for its turn.
    """

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.ran = folder / "ran"
        self.ran.touch()
        self.log = folder / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.bind = f"127.0.0.1:{free.getsockname()[1]}"
        self.process = self.next = self._spawn()

    @property
    def url(self) -> str:
        return f"http://{self.bind}"

    def _spawn(self) -> subprocess.Popen[str]:
        self._is_ready = False
        command = [sys.executable, __file__, "--serve", str(self.state), "--bind", self.bind]
        with self.log.open("a") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, RAN: str(self.ran)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    async def ready(self) -> None:
        """Wait until the next process has done its imports."""
        assert self.next.stdout is not None
        if not self._is_ready:
            await trio.to_thread.run_sync(self.next.stdout.readline)
            self._is_ready = True

    async def start(self, *, prepare: bool = True) -> float:
        """Let the next process serve, and return how long it took to.

        Raises:
            SystemExit: It ended instead; with the last line that it wrote.
        """
        await self.ready()
        self.process = self.next
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        began = time.monotonic()
        stdin.write("go\n")
        stdin.flush()
        if not await trio.to_thread.run_sync(stdout.readline):
            await trio.to_thread.run_sync(self.process.wait)
            raise SystemExit(self.log.read_text().rstrip().rpartition("\n")[2])
        took_sec = time.monotonic() - began
        if prepare:
            self.next = self._spawn()
        return took_sec

    async def end(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process that serves, and wait for its end."""
        self.process.send_signal(number)
        await trio.to_thread.run_sync(self.process.wait)

    def close(self) -> None:
        """Kill what is left of its processes."""
        for process in (self.process, self.next):
            process.kill()
            process.communicate()


@asynccontextmanager
async def served(
    folder: Path, *, feed: bool = True
) -> AsyncGenerator[tuple[Server, RolloutClient], None]:
    """Provide a server that serves, and a client of it."""
    with closing(Server(folder)) as server:
        await server.start()
        async with RolloutClient(url=server.url, feed=feed) as client:
            yield server, client


# --- the load ---------------------------------------------------------------------------------


class Load:
    """Makes rollouts as long as it is open, and keeps what became of them."""

    def __init__(self, seed: int, padding: int = 200) -> None:
        self.random = random.Random(seed)
        self.padding = padding
        self.open = True
        self.requests: dict[str, RolloutInitRequest] = {}
        self.began: dict[str, float] = {}
        self.ended: dict[str, FinishedRollout] = {}
        self.longest_sec = 0.0
        self.findings: list[str] = []
        self.asked_again = 0

    @property
    def in_flight(self) -> int:
        return len(self.requests) - len(self.ended)

    def source(self, most: int | None = None) -> Iterator[RolloutInitRequest]:
        while self.open and (most is None or len(self.requests) < most):
            rollout_id = f"r{len(self.requests)}"
            sleep_sec = self.random.uniform(0, LONGEST_RUN_SEC)
            request = RolloutInitRequest(
                rollout_id=rollout_id,
                initial_messages=[
                    {"role": "user", "content": "?", "sleep": sleep_sec, "padding": self.padding}
                ],
                chat_completions_url="http://unused/v1",
                llm_api_key="a-key-of-nobody",
                label=rollout_id,
                admission_key=f"{self.random.getrandbits(128):032x}",
            )
            self.requests[rollout_id] = request
            self.began[rollout_id] = trio.current_time()
            yield request

    async def run(self, client: RolloutClient, in_flight: int, most: int | None = None) -> None:
        source = self.source(most)
        async with client.run_rollouts(source, max_in_flight=in_flight) as finished:
            async for ended in finished:
                rollout_id = ended.request.rollout_id
                if rollout_id in self.ended:
                    self.findings.append(f"{rollout_id} ended twice at its caller")
                self.ended[rollout_id] = ended
                waited_sec = trio.current_time() - self.began[rollout_id]
                self.longest_sec = max(self.longest_sec, waited_sec)

    async def has_ended(self, count: int) -> None:
        """Wait until so many rollouts have ended."""
        while len(self.ended) < count:  # noqa: ASYNC110
            await trio.sleep(LOOK_SEC)

    async def ask_again(self, client: RolloutClient, ids: Iterable[str]) -> None:
        """Ask for rollouts that have ended, which has to bring the results that they had."""
        requests = [self.requests[rollout_id] for rollout_id in ids]
        async with client.run_rollouts(requests, max_in_flight=200) as finished:
            async for request, outcome in finished:
                self.asked_again += 1
                before = self.ended[request.rollout_id].outcome
                if isinstance(before, RolloutResultResponse) and outcome != before:
                    self.findings.append(
                        f"{request.rollout_id} was reported as {before}, then as {outcome!r}"
                    )

    def check(self, ran: Path) -> None:
        """Compare what callers got with what ran."""
        lines = Counter(ran.read_text().split())
        found = self.findings
        found += [f"{each} ran {count} times" for each, count in lines.items() if count > 1]
        found += [f"{each} has no end" for each in self.requests if each not in self.ended]
        for rollout_id, (_, outcome) in self.ended.items():
            if not isinstance(outcome, RolloutResultResponse):
                found.append(f"{rollout_id} ended with {outcome!r}")
            elif (outcome.agent_started_at is not None) < (rollout_id in lines):
                found.append(f"{rollout_id} ran, but its result says that it did not: {outcome}")
            elif outcome.status is RolloutStatus.SUCCESS:
                sample = outcome.sample
                if sample is None or sample.reward != 1.0 or rollout_id not in lines:
                    found.append(f"{rollout_id} has a wrong result: {outcome}")

    def outcomes(self) -> dict[str, int]:
        counts = Counter(map(_kind, self.ended.values()))
        return dict(sorted(counts.items()))


def _kind(ended: FinishedRollout) -> str:
    if not isinstance(ended.outcome, RolloutResultResponse):
        return type(ended.outcome).__name__
    if ended.outcome.status is RolloutStatus.SUCCESS:
        return "succeeded"
    restarted = "restarted" in (ended.outcome.err_message or "")
    what = "ended by a restart" if restarted else str(ended.outcome.status)
    ran = "started" if ended.outcome.agent_started_at is not None else "not started"
    return f"{what}, agent {ran}"


# --- kills ------------------------------------------------------------------------------------


async def kill_again_and_again(
    folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    load = Load(options.seed)
    draw = random.Random(f"kills {options.seed}")
    restarts_sec: list[float] = []
    in_flight: list[int] = []
    async with served(folder, feed=not options.no_feed) as (server, client):
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run, client, options.in_flight)
            await load.has_ended(1)
            for _ in range(options.kills):
                await server.ready()
                await trio.sleep(draw.uniform(*KILL_AFTER_SEC))
                in_flight.append(load.in_flight)
                await server.end()
                await trio.sleep(draw.uniform(*DOWN_SEC))
                restarts_sec.append(await server.start())
                known = list(load.ended)
                ids = draw.sample(known, min(len(known), ASKED_AGAIN))
                nursery.start_soon(load.ask_again, client, ids)
            load.open = False
        wall_sec = trio.current_time() - began
        await server.end()
        restarts_sec.append(await server.start(prepare=False))
        await load.ask_again(client, load.ended)
        load.check(server.ran)
    return {
        "seed": options.seed,
        "kills": len(restarts_sec),
        "rollouts": len(load.requests),
        "in_flight_at_kills": f"{min(in_flight)} to {max(in_flight)}",
        **load.outcomes(),
        "asked_again": load.asked_again,
        "longest_wait_sec": round(load.longest_sec, 2),
        "restart_sec": f"{median(restarts_sec):.2f}, at most {max(restarts_sec):.2f}",
        "wall_sec": round(wall_sec, 1),
    }, load.findings


# --- trouble with the storage -----------------------------------------------------------------


async def second_server(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Start a second server on a state: it has to refuse, and to leave the first alone."""
    load = Load(0)
    found = load.findings
    async with served(folder) as (server, client):
        try:
            async with make_app(server.state).serving():
                found.append("a second server serves with the same state")
        except RolloutServerError as error:
            if f"is held by another process ({server.process.pid})" not in str(error):
                found.append(f"a second server was refused with: {error}")
        await load.run(client, 4, most=8)
        load.check(server.ran)
    return {"second server": "refused", **load.outcomes()}, found


async def damaged_pages(folder: Path, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Overwrite pages of a state: each result is then an error, or what it was before."""
    load = Load(seed, padding=3000)
    async with served(folder) as (server, client):
        await load.run(client, 100, most=200)
        await server.end(signal.SIGTERM)  # which merges its log into the file
        load.check(server.ran)
    whole = server.state.read_bytes()
    with closing(sqlite3.connect(server.state)) as database:
        ((secret,),) = database.execute("SELECT secret FROM server")
    draw = random.Random(seed)
    pages = [0, *sorted(draw.sample(range(1, len(whole) // PAGE), 7))]
    counts: Counter[str] = Counter()
    for page in pages:
        for what in ("zeros", "noise", "one byte"):
            data = bytearray(whole)
            begin = page * PAGE
            if what == "one byte":
                data[begin + draw.randrange(PAGE)] ^= 0x5A
            else:
                data[begin : begin + PAGE] = (
                    draw.randbytes(PAGE) if what == "noise" else bytes(PAGE)
                )
            replace(server.state, data)
            where = f"page {page}, {what}"
            try:
                counts.update(await read_all(server.state, secret, load, where))
            except RolloutServerError as error:
                counts["refused starts"] += 1
                if server.state.read_bytes() != data:
                    load.findings.append(f"{where}: the file was changed ({error})")
    return {"damages": 3 * len(pages), **counts}, load.findings


def replace(state: Path, data: bytearray) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{state}{suffix}").unlink(missing_ok=True)
    state.write_bytes(data)


async def read_all(state: Path, secret: bytes, load: Load, where: str) -> Counter[str]:
    """Serve a damaged state in this process, and poll all results of it."""
    counts: Counter[str] = Counter()
    app = make_app(state)
    async with app.serving():
        for rollout_id, (request, before) in load.ended.items():
            token = lease_token(secret, rollout_id, request.admission_key or "")
            try:
                body = await app.registry.wait_for_result(rollout_id, token, None)
            except StateUnavailableError:
                counts["read errors"] += 1
                continue
            except (UnknownRolloutError, InvalidLeaseError):
                counts["refused polls"] += 1
                continue
            counts["same results"] += 1
            if structure(parse_json(body), RolloutResultResponse) != before:
                load.findings.append(f"{where}: {rollout_id} was {before}, and is {body!r}")
    return counts


async def full_disk(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Fill the disk of the state under load, make room again, and restart the server.

    Args:
        folder: The small disk.
    """
    load = Load(0, padding=3000)
    ballast = folder / "ballast"
    async with served(folder) as (server, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run, client, 50)
            await load.has_ended(1)
            fill(ballast)
            while (health := await client.health())["state"]["status"] == "ok":  # noqa: ASYNC110
                await trio.sleep(LOOK_SEC)
            why = health["state"]["detail"]
            # What runs comes to its end all the same, and its caller learns of it.
            while (await client.health())["lifecycle"]["active_rollouts"]:  # noqa: ASYNC110
                await trio.sleep(LOOK_SEC)
            refusal = await trio.to_thread.run_sync(refused_admission, server.url)
            if refusal[0] != HTTPStatus.SERVICE_UNAVAILABLE or not refusal[1]:
                load.findings.append(f"an admission to a full disk was answered with {refusal}")
            await trio.sleep(1)
            meanwhile = len(load.ended)
            ballast.unlink()
            await load.has_ended(meanwhile + 100)
            load.open = False
        if (await client.health())["state"]["status"] != "ok":
            load.findings.append("the state has not recovered")
        await server.end()
        await server.start(prepare=False)
        await load.ask_again(client, load.ended)
        load.check(server.ran)
    return {"health said": why, **load.outcomes()}, load.findings


def fill(path: Path) -> None:
    """Fill the disk with a file."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(PAGE)):
            pass


def refused_admission(url: str) -> tuple[int, str | None]:
    """Send an admission; return the status of its answer, and when to come again."""
    body = {
        "rollout_id": "refused",
        "initial_messages": [{"role": "user", "content": "?"}],
        "chat_completions_url": "http://unused/v1",
    }
    request = urllib.request.Request(
        f"{url}/rollout", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"]


def on_small_disk() -> tuple[dict[str, Any], list[str]]:
    """Run `full_disk` in a process that has a small disk of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mount = f'mount -t tmpfs -o size={DISK_MIB}m none "$1"'
        shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        try:
            subprocess.run([*shell, mount, "sh", folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return {"left out": f"no small disk can be made: {error}"}, []
        run = f'{mount} && exec "$2" "$3" --full-disk "$1"'
        command = [*shell, run, "sh", folder, sys.executable, __file__]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        figures, found = json.loads(done.stdout)
        return figures, found


# --- command line -----------------------------------------------------------------------------


def in_folder(part: Callable[..., Any], *args: Any) -> tuple[dict[str, Any], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        figures, found = trio.run(part, Path(folder), *args)
        return figures, found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-feed", action="store_true", help="poll for each rollout alone")
    parser.add_argument("--no-trouble", action="store_true", help="kills alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--full-disk", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        trio.run(run_server, Path(options.serve), options.bind)
        return 0
    if options.full_disk is not None:
        print(json.dumps(trio.run(full_disk, options.full_disk)))
        return 0
    parts: dict[str, Callable[[], tuple[dict[str, Any], list[str]]]] = {
        "kills": partial(in_folder, kill_again_and_again, options)
    }
    if not options.no_trouble:
        parts |= {
            "a second server": partial(in_folder, second_server),
            "damaged pages": partial(in_folder, damaged_pages, options.seed),
            "a full disk": on_small_disk,
        }
    report: dict[str, Any] = {}
    findings: list[str] = []
    for name, part in parts.items():
        report[name], found = part()
        findings += found
    report["findings"] = findings
    if options.json:
        print(json.dumps(report))
    else:
        for name in parts:
            print(name)
            for what, value in report[name].items():
                print(f"  {what:40} {value}")
        print(*findings or ["nothing was lost, nothing ran twice"], sep="\n")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
