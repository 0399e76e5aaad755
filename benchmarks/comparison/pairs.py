"""Which client talks to which server, and how their processes are started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from comparison.job import Job
from comparison.process import Child, environment, started, watched

_ANSWER_SEC = 15.0
"""How long a client may take to give up and close its connections after a job's limit."""


@frozen
class Pair:
    """A client of one system on a server of one system.

    Attributes:
        wide: Whether the official client is handed an HTTP client with connections for all. Its
            own one is httpx as it comes: 100 connections, and a rollout that has waited 5 s for
            one of them fails.
        files: Whether our server keeps the files of rollouts, as both systems do by default.
    """

    key: str
    title: str
    client: str
    server: str
    wide: bool = False
    files: bool = True

    @property
    def needs_official(self) -> bool:
        return "official" in {self.client, self.server}

    @property
    def bounded(self) -> bool:
        """Whether the client's connections bound how many rollouts can be in flight."""
        return self.client == "official" and not self.wide


PAIRS = {
    pair.key: pair
    for pair in (
        Pair("ours", "ours", "ours", "ours"),
        Pair("ours-no-files", "ours, no files", "ours", "ours", files=False),
        Pair("official", "official", "official", "official"),
        Pair("official-wide", "official, wide", "official", "official", wide=True),
        Pair("official-on-ours", "official client, our server", "official", "ours"),
        Pair("ours-on-official", "our client, official server", "ours", "official"),
    )
}


@frozen
class Launcher:
    """Makes the commands of the processes.

    Attributes:
        official_python: A Python that has the official package, if there is one.
        many: Whether our client is to use `RolloutClient.run_rollouts` on our server.
    """

    official_python: Path | None = None
    many: bool = False

    def command(self, system: str, role: str, *options: str) -> list[str]:
        python = sys.executable if system == "ours" else str(self.official_python)
        # -P: import what is installed, not what lies in the current directory.
        return [python, "-P", "-m", f"comparison.{system}", role, *options]

    @asynccontextmanager
    async def running(
        self,
        pair: Pair,
        *,
        server_options: tuple[str, ...] = (),
        client_options: tuple[str, ...] = (),
    ) -> AsyncGenerator[RunningPair, None]:
        """Run server and client of a pair for the length of the block."""
        if self.many and pair.key == "ours":
            client_options = (*client_options, "--many")
        if not pair.files:
            server_options = (*server_options, "--no-files")
        if pair.wide:
            client_options = (*client_options, "--wide")
        server_command = self.command(pair.server, "serve", *server_options)
        client_command = self.command(pair.client, "client", *client_options)
        async with (
            started(f"the {pair.server} server", server_command) as server,
            started(f"the {pair.client} client", client_command) as client,
        ):
            yield RunningPair(pair, server, client)

    async def run_once(
        self, pair: Pair, who: str, options: tuple[str, ...], job: Job
    ) -> dict[str, Any]:
        """Run one job with options for one side, ``"server"`` or ``"client"``; return its report.

        Raises:
            ChildError: A process failed.
        """
        async with self.running(
            pair,
            server_options=options if who == "server" else (),
            client_options=options if who == "client" else (),
        ) as running:
            await running.warm_up()
            return await running.run(job)


@define(eq=False)
class RunningPair:
    """The two processes of a pair.

    Attributes:
        dirty: Whether a job was cut short, so that the server may still be at its rollouts.
    """

    pair: Pair
    server: Child
    client: Child
    dirty: bool = False
    _number: int = field(default=0)

    @property
    def url(self) -> str:
        return str(self.server.hello["url"])

    async def warm_up(self) -> None:
        """Run a few rollouts, so that imports and caches are not measured."""
        await self.run(Job("warm-up", rollouts=32, in_flight=4, limit_sec=30.0))

    async def run(self, job: Job, *, url: str | None = None) -> dict[str, Any]:
        """Run one job; returns its report, and what both processes used meanwhile."""
        message = {"url": url or self.url, "job": job.to_json()}
        report, (server, client) = await watched(
            (self.server, self.client),
            lambda: self.client.call(message, limit_sec=job.limit_sec + _ANSWER_SEC),
        )
        self.dirty = self.dirty or report["cut"]
        return {**report, **server.to_json("server"), **client.to_json("client")}


def describe_python(python: Path | str, *modules: str) -> dict[str, str]:
    """Ask a Python for its version and those of some distributions.

    Raises:
        LookupError: It cannot be run, or one is not installed; the message says which.
    """
    question = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({'python': sys.version.split()[0], "
        f"**{{name: version(name) for name in {modules!r}}}}}))"
    )
    try:
        answer = subprocess.run(
            [str(python), "-P", "-c", question],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookupError(f"{python} cannot be run: {error}") from None
    if answer.returncode:
        raise LookupError(f"{python}: {answer.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(answer.stdout))
