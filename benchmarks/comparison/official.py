"""The official server and client, each a process of its own, on the terms of `comparison.ours`.

Runs under the Python that has the official package; imports nothing of this project but
`comparison.job`. The client is as it comes, with the HTTP client that it makes for itself, or
with ``--wide`` it is handed one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
)
from osmosis_ai.rollout.client import RolloutClient
from osmosis_ai.rollout.server import create_rollout_server

from comparison.job import (
    ANSWER,
    LEASE_SEC,
    WAIT_SEC,
    Job,
    Tally,
    about,
    outcome_of,
    outcome_of_error,
    say,
)


class Sleep(AgentWorkflow):
    async def run(self, ctx: Any) -> Any:
        await asyncio.sleep(ctx.prompt[0]["sleep"])
        return [*ctx.prompt, {"role": "assistant", "content": ANSWER}]


class Compare(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))


async def stdin_reader() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


# --- the server ------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A uvicorn server that says where it listens.

    It binds the address itself, as ``uvicorn.run`` does: only then does asyncio turn off
    Nagle's algorithm for its connections, without which each answer takes 40 ms more.
    """

    def __init__(self, app: Any) -> None:
        options = {"port": 0, "log_level": "warning", "timeout_graceful_shutdown": 1}
        super().__init__(uvicorn.Config(app, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()
        say(json.dumps({"url": f"http://{host}:{port}", **about()}))


async def run_server() -> None:
    config = AgentWorkflowConfig(name="sleep", concurrency=ConcurrencyConfig(max_concurrent=None))
    app = create_rollout_server(
        backend=LocalBackend(workflow=Sleep, workflow_config=config, grader=Compare),
        configure_logging=False,
        result_wait_timeout_sec=WAIT_SEC,
        polling_lease_timeout_sec=LEASE_SEC,
    )
    server = Server(app)
    serving = asyncio.create_task(server.serve())
    reader = await stdin_reader()
    told_to_stop = asyncio.create_task(reader.read())
    await asyncio.wait({serving, told_to_stop}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = server.force_exit = True
    await serving


# --- the client ------------------------------------------------------------------------------


def wide_http_client() -> httpx.AsyncClient:
    """Make an HTTP client with a connection for every poll, as our client does by itself."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=4.0)
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(limits=limits), timeout=httpx.Timeout(60.0, pool=None)
    )


async def run_each(client: RolloutClient, tally: Tally) -> None:
    ids = tally.rollout_ids()

    async def work() -> None:
        for rollout_id in ids:
            try:
                result = await client.run_rollout(**tally.job.request(rollout_id))
            except Exception as error:  # noqa: BLE001 - every failure is counted
                tally.ended(rollout_id, outcome_of_error(error))
            else:
                tally.ended(rollout_id, outcome_of(result))

    async with asyncio.TaskGroup() as group:
        for _ in range(tally.job.in_flight):
            group.create_task(work())


async def within(limit_sec: float, work: Callable[[], Awaitable[None]]) -> None:
    """Run *work* for at most so long; what is left then is cancelled."""
    deadline = asyncio.timeout(limit_sec)
    try:
        async with deadline:
            await work()
    except TimeoutError:
        if not deadline.expired():
            raise


async def run_job(url: str, job: Job, *, wide: bool) -> dict[str, Any]:
    given = wide_http_client() if wide else None
    client = RolloutClient(url=url, http_client=given)
    tally = Tally(job)
    try:
        await within(job.limit_sec, lambda: run_each(client, tally))
        return tally.report()
    finally:
        await client.aclose()
        if given is not None:
            await given.aclose()


async def run_client(*, wide: bool) -> None:
    say(json.dumps(about()))
    reader = await stdin_reader()
    asking: asyncio.Task[bytes] = asyncio.create_task(reader.readline())
    while line := await asking:
        command = json.loads(line)
        job = asyncio.create_task(run_job(command["url"], Job(**command["job"]), wide=wide))
        asking = asyncio.create_task(reader.readline())
        await asyncio.wait({job, asking}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done() and not asking.result():
            job.cancel()
            return
        say(json.dumps(await job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("serve", "client"))
    parser.add_argument("--wide", action="store_true", help="give the client connections for all")
    options = parser.parse_args()
    asyncio.run(run_server() if options.role == "serve" else run_client(wide=options.wide))


if __name__ == "__main__":
    main()
