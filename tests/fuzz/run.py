"""Fuzz a rollout server over loopback: its connections with broken HTTP, its routes by schema.

No input may cause a 5xx, a reset, a connection that stays open, a traceback in the log or a
descriptor that is never closed. ``--first N --inputs 1 --seed S`` repeats one input.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import httpx
import trio
from app import KEY
from attrs import field, frozen
from broken_http import Input, make_input

HERE = Path(__file__).parent
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
HANG_SEC = 20.0
CONNECTIONS_AT_ONCE = 24
_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3})")
_UNKNOWN_CODING = 501  # the one 5xx that says what is wrong with the request


class FuzzError(Exception):
    """An input that the server did not take as it should."""


@frozen
class Server:
    """The process that is fuzzed."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    descriptors: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "descriptors", self.open_files())

    def open_files(self) -> int:
        """How many descriptors it has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def check(self) -> None:
        """See that it is well, has forgotten all rollouts and has nothing open any more."""
        give_up_at = time.monotonic() + HANG_SEC
        while True:
            health = httpx.get(f"{self.url}/health", headers=AUTHORIZATION, trust_env=False).json()
            left = health["lifecycle"]["active_rollouts"], self.open_files() - self.descriptors
            if left[0] == 0 and left[1] <= 0:
                break
            if time.monotonic() > give_up_at:
                raise FuzzError(f"{left[0]} rollouts and {left[1]} descriptors are left")
            time.sleep(0.1)
        for sign in ("Traceback", "a connection failed", "ERROR"):
            if sign in (log := self.log.read_text(errors="replace")):
                raise FuzzError(
                    f"the server's log has {sign!r}:\n{log[log.index(sign) - 300 :][:3000]}"
                )


@contextmanager
def serving() -> Iterator[Server]:
    """Run the server as a process for the block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "rollout", "serve", str(HERE / "app.py") + ":app"]
        with (
            log.open("w") as stderr,
            subprocess.Popen(
                [*command, "--bind", "127.0.0.1:0", "--until-stdin-closes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "ROLLOUT_ARTIFACT_ROOT": ""},
            ) as process,
        ):
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise FuzzError(f"the server did not start:\n{log.read_text()}")
                url = line.split()[-1]
                httpx.get(f"{url}/health", headers=AUTHORIZATION, trust_env=False)
                yield Server(process, url, log)
            finally:
                process.terminate()


# --- bytes ------------------------------------------------------------------------------------


async def fuzz_bytes(url: str, seed: int, first: int, count: int) -> Counter[int]:
    """Send inputs, some at a time; return how often which status was answered."""
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    numbers = iter(range(first, first + count))
    port = int(url.rpartition(":")[2])

    async def work() -> None:
        for number in numbers:
            given = make_input(seed, number, KEY)
            try:
                received = await exchange(port, given)
                found = [int(status) for status in _STATUS.findall(received)]
                judge(given, received, found)
            except (FuzzError, OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
                what = f"input {number} of seed {seed}: {type(error).__name__}: {error}"
                failures.append(f"{what}\nsent {given.pieces}")
                nursery.cancel_scope.cancel()
                return
            statuses.update(found or [0])

    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS_AT_ONCE):
            nursery.start_soon(work)
    if failures:
        raise FuzzError("\n".join(failures))
    return statuses


async def exchange(port: int, given: Input) -> bytes:
    """Send one input; return all that comes back until the server closes."""
    received = bytearray()
    with trio.fail_after(HANG_SEC):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            for piece in given.pieces:
                await stream.send_all(piece)
                await trio.lowlevel.checkpoint()
            # What is complete is answered. Of the rest, some waits for more.
            patience = HANG_SEC if given.complete else 0.05
            with trio.move_on_after(patience):
                while data := await stream.receive_some():
                    received += data
                    if given.complete and _STATUS.search(received):
                        break
                else:
                    return bytes(received)
            await stream.send_eof()
            async for data in stream:
                received += data
    return bytes(received)


def judge(given: Input, received: bytes, statuses: list[int]) -> None:
    """Check the answers to one input."""
    if received and not received.startswith(b"HTTP/1.1 "):
        raise FuzzError(f"answered {received[:100]!r}")
    if given.complete and not statuses:
        raise FuzzError("a complete request was not answered")
    for status in statuses:
        if status >= 500 and status != _UNKNOWN_CODING:
            raise FuzzError(f"answered {received[:2000]!r}")


# --- schema -----------------------------------------------------------------------------------


def fuzz_schema(url: str, seed: int, examples: int) -> None:
    """Have schemathesis send what the schema allows and what it forbids, and follow its links."""
    command = ["schemathesis", "--config-file", str(HERE / "schemathesis.toml"), "run"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--no-color", f"--seed={seed}"]
    command += [f"--max-examples={examples}", "--generation-database=none"]
    done = subprocess.run(
        [*command, f"{url}/openapi.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=HERE,
    )
    lines = [
        line if len(line) < 2000 else f"{line[:2000]} ..." for line in done.stdout.splitlines()
    ]
    click.echo("\n".join(lines if done.returncode else lines[-20:]))
    if done.returncode:
        raise FuzzError("schemathesis has found failures; they are above")


def main() -> None:
    """Run both, and say how many inputs there were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=5_000, help="byte-level inputs")
    parser.add_argument("--examples", type=int, default=10, help="for each route; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    given = parser.parse_args()
    with serving() as server:
        started = time.monotonic()
        statuses = trio.run(fuzz_bytes, server.url, given.seed, given.first, given.inputs)
        server.check()
        click.echo(f"{given.inputs} inputs in {time.monotonic() - started:.0f} s, answered with")
        click.echo(
            ", ".join(f"{status or 'nothing'}: {statuses[status]}" for status in sorted(statuses))
        )
        if given.examples:
            fuzz_schema(server.url, given.seed, given.examples)
            server.check()


if __name__ == "__main__":
    main()
