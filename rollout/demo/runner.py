"""Start the three pieces, run the rollouts, stop the pieces."""

from __future__ import annotations

import random
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

from rollout._settings import check_whole, setting
from rollout._tasks import sole_error
from rollout.client import RolloutClient
from rollout.demo.arithmetic import MODEL_NAME, Problem, ScriptedModel, make_problems, make_sums
from rollout.demo.chat import create_chat_app
from rollout.demo.groups import Groups
from rollout.demo.model import SMOLLM2, RealModel, model_server
from rollout.demo.report import DemoReport
from rollout.demo.server import create_demo_server
from rollout.errors import InvalidFieldError
from rollout.server import RolloutServer, serve
from rollout.types import RolloutStatus

__all__ = ["DemoObserver", "DemoPlan", "run_demo"]

_LOOPBACK = "127.0.0.1:0"
_KEY_BYTES = 16
_SEEDS = 2**31
_REPLY_TOKENS = 40
"""What a tool call takes, twice over."""


_count = setting(check_whole)


@frozen(kw_only=True)
class DemoPlan:
    """What to run.

    Attributes:
        rollouts: How many rollouts.
        max_in_flight: How many of them at a time.
        samples_per_question: How many of them ask the same question.
        model: The model; its seed also makes the questions.

    Raises:
        InvalidFieldError: A count is no whole number from 1 up, or the rollouts are no multiple
            of the samples.
    """

    rollouts: int = field(default=32, validator=_count)
    max_in_flight: int = field(default=8, validator=_count)
    samples_per_question: int = field(default=1, validator=_count)
    model: ScriptedModel | RealModel = field(factory=ScriptedModel)

    def __attrs_post_init__(self) -> None:
        if self.rollouts % self.samples_per_question:
            raise InvalidFieldError(
                "rollouts", f"must be a multiple of the {self.samples_per_question} samples"
            )

    @property
    def model_name(self) -> str:
        """The name that requests ask for."""
        return SMOLLM2 if isinstance(self.model, RealModel) else MODEL_NAME

    def samples(self) -> Iterator[DemoSample]:
        """Make the samples to draw; the same plan makes the same ones."""
        make = make_sums if isinstance(self.model, RealModel) else make_problems
        problems = make(self.rollouts // self.samples_per_question, self.model.seed)
        for question, problem in enumerate(problems):
            for sample in range(self.samples_per_question):
                yield DemoSample(question, sample, problem, self._draw(question, sample))

    def _draw(self, question: int, sample: int) -> int | None:
        """Return the seed of a sample; a script that is asked once needs none."""
        if self.samples_per_question == 1 and isinstance(self.model, ScriptedModel):
            return None
        draw = random.Random(f"sample {self.model.seed} {question} {sample}")  # noqa: S311 - repeatable on purpose
        return draw.randrange(_SEEDS)


@frozen
class DemoSample:
    """One rollout to run.

    Attributes:
        question: The number of its question.
        sample: Which sample of that question it is.
        problem: The question and its answer.
        seed: For the model to draw with, ``None`` to leave that to the model.
    """

    question: int
    sample: int
    problem: Problem
    seed: int | None


class DemoObserver(Protocol):
    """Told how a run goes on."""

    def changed(self, report: DemoReport, in_flight: Counter[RolloutStatus]) -> None:
        """Take the results so far, and how many rollouts are in which phase."""


async def run_demo(plan: DemoPlan, report: DemoReport, observer: DemoObserver) -> None:
    """Run the demo, adding up results in *report*.

    Everything listens on loopback on free ports, behind keys made up for this run, and
    nothing is left behind: no process, no file.

    Raises:
        RolloutServerError: A piece cannot listen, or the process of a real model ended.
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
    model, app = plan.model, _app(plan, server_key)
    if plan.samples_per_question > 1:
        report.groups = Groups(plan.samples_per_question)
    endpoint = (
        model_server(model, slots=plan.max_in_flight, api_key=chat_key)
        if isinstance(model, RealModel)
        else _chat_endpoint(create_chat_app(model, chat_key))
    )
    async with (
        endpoint as chat_url,
        _rollout_server(app) as server_url,
        RolloutClient(url=server_url, api_key=server_key) as client,
    ):
        run = _Run(client, f"{chat_url}/v1", chat_key, report, observer)
        samples = plan.samples()
        started = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(min(plan.max_in_flight, plan.rollouts)):
                    nursery.start_soon(run.work, samples)
        finally:
            report.elapsed_sec = trio.current_time() - started


def _app(plan: DemoPlan, api_key: str) -> RolloutServer:
    options: dict[str, Any] = {}
    if isinstance(plan.model, RealModel):
        options = {"temperature": plan.model.temperature, "max_tokens": _REPLY_TOKENS}
    return create_demo_server(
        max_concurrent=plan.max_in_flight,
        api_key=api_key,
        model=plan.model_name,
        by_tool=isinstance(plan.model, RealModel),
        options=options,
    )


class _Run:
    """The client's side: workers that share one supply of samples."""

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

    async def work(self, samples: Iterator[DemoSample]) -> None:
        """Run one rollout after another until the supply is used up."""
        await trio.lowlevel.checkpoint()
        for sample in samples:
            await self._rollout(sample)

    async def _rollout(self, sample: DemoSample) -> None:
        started = trio.current_time()
        handle = await self._client.run_rollout_async(
            initial_messages=[{"role": "user", "content": sample.problem.question}],
            chat_completions_url=self._chat_url,
            rollout_id=f"demo-{sample.question}-{sample.sample}",
            llm_api_key=self._chat_key,
            label=sample.problem.answer,
            metadata=None if sample.seed is None else {"seed": sample.seed},
        )
        phase: RolloutStatus | None = None
        async with handle.statuses() as statuses:
            async for status in statuses:
                self._move(phase, status)
                phase = status
        result = await handle
        self._report.add(result, trio.current_time() - started, sample.question)
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
