"""Our server and our client, each a process of its own, told what to do on standard input.

``python -m comparison.ours serve`` prints one JSON line with its URL and serves until its
standard input ends. ``python -m comparison.ours client`` runs one job for each line of JSON and
answers with a line. With ``--profile PATH`` either writes a profile of the whole run there, with
``--layers PATH`` its processor time by layer.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio

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
from comparison.layers import sampled
from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    LocalBackend,
)
from rollout.client import RolloutClient
from rollout.server import RolloutServer, create_rollout_server, serve
from rollout.types import RolloutInitRequest


class Sleep(AgentWorkflow[Any]):
    async def run(self, ctx: Any) -> Any:
        await trio.sleep(ctx.prompt[0]["sleep"])
        return [*ctx.prompt, {"role": "assistant", "content": ANSWER}]


class Compare(Grader):
    async def grade(self, ctx: Any) -> None:
        ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))


async def command_lines() -> AsyncIterator[bytes]:
    """The lines of standard input, until it ends."""
    buffer = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        async for data in stream:
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                yield line


# --- the server ------------------------------------------------------------------------------


def build_app(*, watchdog: bool, files: bool) -> RolloutServer:
    config = AgentWorkflowConfig(name="sleep", concurrency=ConcurrencyConfig(max_concurrent=None))
    return create_rollout_server(
        backend=LocalBackend(
            workflow=Sleep,
            workflow_config=config,
            grader=Compare,
            artifact_root=None if files else False,
        ),
        configure_logging=False,
        result_wait_timeout_sec=WAIT_SEC,
        polling_lease_timeout_sec=LEASE_SEC,
        watchdog_sec=1.0 if watchdog else None,
    )


async def run_server(*, watchdog: bool, files: bool) -> None:
    app = build_app(watchdog=watchdog, files=files)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, app, bind="127.0.0.1:0", handle_signals=False))
        say(json.dumps({"url": urls[0], **about()}))
        async for _ in command_lines():
            pass
        nursery.cancel_scope.cancel()


# --- the client ------------------------------------------------------------------------------


async def run_each(client: RolloutClient, tally: Tally) -> None:
    """Run the job with `RolloutClient.run_rollout`, one task for each place in flight."""
    ids = tally.rollout_ids()

    async def work() -> None:
        for rollout_id in ids:
            try:
                result = await client.run_rollout(**tally.job.request(rollout_id))
            except Exception as error:  # noqa: BLE001 - every failure is counted
                tally.ended(rollout_id, outcome_of_error(error))
            else:
                tally.ended(rollout_id, outcome_of(result))

    async with trio.open_nursery() as nursery:
        for _ in range(tally.job.in_flight):
            nursery.start_soon(work)


async def run_many(client: Any, tally: Tally) -> None:
    """Run the job with `RolloutClient.run_rollouts`."""

    def requests() -> Iterator[RolloutInitRequest]:
        for rollout_id in tally.rollout_ids():
            yield RolloutInitRequest(**tally.job.request(rollout_id))

    async with client.run_rollouts(requests(), max_in_flight=tally.job.in_flight) as results:
        async for request, result in results:
            failed = isinstance(result, BaseException)
            outcome = outcome_of_error(result) if failed else outcome_of(result)
            tally.ended(request.rollout_id, outcome)


async def run_job(url: str, job: Job, *, many: bool) -> dict[str, Any]:
    async with RolloutClient(url=url) as client:
        tally = Tally(job)
        with trio.move_on_after(job.limit_sec):
            await (run_many if many else run_each)(client, tally)
        return tally.report()


async def run_client(*, many: bool) -> None:
    say(json.dumps(about()))
    jobs, incoming = trio.open_memory_channel[bytes](1)

    async def work() -> None:
        async for line in incoming:
            command = json.loads(line)
            job = Job(**command["job"])
            say(json.dumps(await run_job(command["url"], job, many=many)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        async for line in command_lines():
            await jobs.send(line)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("serve", "client"))
    parser.add_argument("--profile", metavar="PATH")
    parser.add_argument("--layers", type=Path, metavar="PATH")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--no-files", action="store_true")
    options = parser.parse_args()
    logging.getLogger("rollout").setLevel(logging.ERROR)
    # A profile counts the time of all threads together, also that of a watchdog that waits.
    entry: Callable[[], Awaitable[None]] = partial(
        run_server, watchdog=options.profile is None, files=not options.no_files
    )
    if options.role == "client":
        entry = partial(run_client, many=options.many)
    if options.layers is not None:
        with sampled(options.layers):
            trio.run(entry)
        return
    if options.profile is None:
        trio.run(entry)
        return
    profiler = cProfile.Profile()
    try:
        profiler.runcall(trio.run, entry)
    finally:
        profiler.dump_stats(options.profile)


if __name__ == "__main__":
    main()
