"""Start the three pieces, run the rollouts, stop the pieces."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import hypercorn.trio
import trio
from attrs import field, frozen
from hypercorn.config import Config
from quart_trio import QuartTrio

from rollout._groups import sole_error
from rollout.client import RolloutClient
from rollout.demo.arithmetic import Problem, ScriptedModel, make_problems
from rollout.demo.chat import create_chat_app
from rollout.demo.report import DemoReport
from rollout.demo.server import create_demo_server
from rollout.errors import InvalidFieldError
from rollout.server import RolloutServer, serve
from rollout.types import RolloutStatus
from rollout.types._fields import is_whole_from_one

__all__ = ["DemoObserver", "DemoPlan", "run_demo"]

_LOOPBACK = "127.0.0.1:0"
_KEY_BYTES = 16


def _count(_: Any, attribute: Any, value: Any) -> None:
    if not is_whole_from_one(value):
        raise InvalidFieldError(attribute.name, "must be a whole number from 1 up")


@frozen(kw_only=True)
class DemoPlan:
    """What to run.

    Attributes:
        rollouts: How many rollouts.
        max_in_flight: How many of them at a time.
        model: The scripted model; its seed also makes the questions.

    Raises:
        InvalidFieldError: A count is no whole number from 1 up.
    """

    rollouts: int = field(default=32, validator=_count)
    max_in_flight: int = field(default=8, validator=_count)
    model: ScriptedModel = field(factory=ScriptedModel)


class DemoObserver(Protocol):
    """Told how a run goes on."""

    def changed(self, report: DemoReport, in_flight: Counter[RolloutStatus]) -> None:
        """Take the results so far, and how many rollouts are in which phase."""


async def run_demo(plan: DemoPlan, report: DemoReport, observer: DemoObserver) -> None:
    """Run the demo, adding up results in *report*.

    Everything listens on loopback on free ports, behind keys made up for this run, and
    nothing is left behind: no process, no file.

    Raises:
        RolloutServerError: A piece cannot listen.
        RolloutProtocolError: The server answered outside of the protocol.
        httpx.TransportError: The client cannot reach the server.

    Cancelling this cancels all rollouts at once; the report keeps the results so far.
    """
    try:
        await _run(plan, report, observer)
    except BaseExceptionGroup as group:
        plain = sole_error(group)
        if isinstance(plain, Exception) and not isinstance(plain, ExceptionGroup):
            raise plain from None
        raise


async def _run(plan: DemoPlan, report: DemoReport, observer: DemoObserver) -> None:
    chat_key, server_key = (secrets.token_urlsafe(_KEY_BYTES) for _ in range(2))
    app = create_demo_server(max_concurrent=plan.max_in_flight, api_key=server_key)
    async with (
        _chat_endpoint(create_chat_app(plan.model, chat_key)) as chat_url,
        _rollout_server(app) as server_url,
        RolloutClient(url=server_url, api_key=server_key) as client,
    ):
        run = _Run(client, f"{chat_url}/v1", chat_key, report, observer)
        problems = enumerate(make_problems(plan.rollouts, plan.model.seed))
        started = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(min(plan.max_in_flight, plan.rollouts)):
                    nursery.start_soon(run.work, problems)
        finally:
            report.elapsed_sec = trio.current_time() - started


class _Run:
    """The client's side: workers that share one supply of problems."""

    def __init__(
        self,
        client: RolloutClient,
        chat_url: str,
        chat_key: str,
        report: DemoReport,
        observer: DemoObserver,
    ) -> None:
        self._client = client
        self._chat_url = chat_url
        self._chat_key = chat_key
        self._report = report
        self._observer = observer
        self._in_flight: Counter[RolloutStatus] = Counter()

    async def work(self, problems: Iterator[tuple[int, Problem]]) -> None:
        """Run one rollout after another until the supply is used up."""
        await trio.lowlevel.checkpoint()
        for number, problem in problems:
            await self._rollout(number, problem)

    async def _rollout(self, number: int, problem: Problem) -> None:
        started = trio.current_time()
        handle = await self._client.run_rollout_async(
            initial_messages=[{"role": "user", "content": problem.question}],
            chat_completions_url=self._chat_url,
            rollout_id=f"demo-{number}",
            llm_api_key=self._chat_key,
            label=problem.answer,
        )
        phase: RolloutStatus | None = None
        async with handle.statuses() as statuses:
            async for status in statuses:
                self._move(phase, status)
                phase = status
        result = await handle
        self._report.add(result, trio.current_time() - started)
        self._move(phase, None)

    def _move(self, old: RolloutStatus | None, new: RolloutStatus | None) -> None:
        if old is not None:
            self._in_flight[old] -= 1
        if new is not None:
            self._in_flight[new] += 1
        self._observer.changed(self._report, self._in_flight)


@asynccontextmanager
async def _chat_endpoint(app: QuartTrio) -> AsyncGenerator[str, None]:
    """Serve the chat endpoint for the length of the block; yields its URL."""
    config = Config()
    config.bind = [_LOOPBACK]
    config.accesslog = None
    config.errorlog = None
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(
            partial(hypercorn.trio.serve, app, config, shutdown_trigger=stop.wait)
        )
        yield urls[0]
        stop.set()


@asynccontextmanager
async def _rollout_server(app: RolloutServer) -> AsyncGenerator[str, None]:
    """Serve the rollout server for the length of the block, then shut it down in stages."""
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, app, bind=_LOOPBACK, handle_signals=False))
        yield urls[0]
        app.request_shutdown()
