"""A run of the demo: starts endpoint, server and client, runs the rollouts, stops all three."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import trio
from attrs import field, frozen

from rollout._checks import check_whole, setting
from rollout._tasks import sole_error
from rollout.client import RolloutClient
from rollout.demo.arithmetic import MODEL_NAME, Problem, ScriptedModel, make_problems, make_sums
from rollout.demo.chat import chat_server, create_chat_app
from rollout.demo.model import SMOLLM2, RealModel, model_server
from rollout.demo.report import DemoReport, Groups
from rollout.demo.server import RESPONSE_FORMAT, create_demo_server
from rollout.errors import InvalidFieldError
from rollout.server import serve
from rollout.types import RolloutStatus

__all__ = ["DemoPlan", "DemoSample", "run_demo"]

_LOOPBACK = "127.0.0.1:0"
_KEY_BYTES = 16
_SEEDS = 2**31
_REPLY_TOKENS = 40
"""Twice the length of a tool call."""

_count = setting(check_whole)


@frozen(kw_only=True)
class DemoPlan:
    """The rollouts to run.

    Attributes:
        rollouts: How many rollouts.
        max_in_flight: How many of them at a time.
        samples_per_question: How many of them ask the same question.
        model: The model; its seed also makes the questions.

    Raises:
        InvalidFieldError: A count is not a whole number from 1 up, or the rollouts are not a
            multiple of the samples.
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

    def request(self, seed: int | None) -> dict[str, Any]:
        """Return the fields of a request to the model, besides its messages."""
        fields: dict[str, Any] = {} if seed is None else {"seed": seed}
        if isinstance(self.model, RealModel):
            fields["temperature"] = self.model.temperature
            fields["max_tokens"] = _REPLY_TOKENS
            fields["response_format"] = RESPONSE_FORMAT
        return {"model": self.model_name, **fields}

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
        sample: The number of the sample among those of its question.
        problem: The question and its answer.
        seed: For the model to draw with, ``None`` to leave that to the model.
    """

    question: int
    sample: int
    problem: Problem
    seed: int | None


async def run_demo(
    plan: DemoPlan,
    report: DemoReport,
    changed: Callable[[DemoReport, Counter[RolloutStatus]], object],
) -> None:
    """Run the demo, adding up results in *report*.

    Everything listens on loopback on free ports, behind keys made up for this run, and
    nothing is left behind: no process, no file.

    Args:
        plan: The rollouts.
        report: Takes their results.
        changed: Called after each change, with the report and the number of rollouts in each
            phase.

    Raises:
        RolloutServerError: A part cannot listen, or the process of a real model ended.
        RolloutProtocolError: The server answered outside of the protocol.
        httpx.TransportError: The client cannot reach the server.

    Cancelling this cancels all rollouts at once; the report keeps the results so far.
    """
    try:
        await _run(plan, report, changed)
    except BaseExceptionGroup as group:
        plain = sole_error(group)
        if isinstance(plain, Exception) and not isinstance(plain, ExceptionGroup):
            raise plain from None
        raise


async def _run(
    plan: DemoPlan,
    report: DemoReport,
    changed: Callable[[DemoReport, Counter[RolloutStatus]], object],
) -> None:
    chat_key, server_key = (secrets.token_urlsafe(_KEY_BYTES) for _ in range(2))
    if plan.samples_per_question > 1:
        report.groups = Groups(plan.samples_per_question)
    in_flight: Counter[RolloutStatus] = Counter()
    samples = plan.samples()

    def move(old: RolloutStatus | None, new: RolloutStatus | None) -> None:
        if old is not None:
            in_flight[old] -= 1
        if new is not None:
            in_flight[new] += 1
        changed(report, in_flight)

    async def work() -> None:
        """Run one rollout after another until the samples are used up."""
        await trio.lowlevel.checkpoint()
        for sample in samples:
            started = trio.current_time()
            handle = await client.run_rollout_async(
                initial_messages=[{"role": "user", "content": sample.problem.question}],
                chat_completions_url=f"{chat_url}/v1",
                rollout_id=f"demo-{sample.question}-{sample.sample}",
                llm_api_key=chat_key,
                label=sample.problem.answer,
                metadata={"request": plan.request(sample.seed)},
            )
            phase: RolloutStatus | None = None
            async with handle.statuses() as statuses:
                async for status in statuses:
                    move(phase, status)
                    phase = status
            report.add(await handle, trio.current_time() - started, sample.question)
            move(phase, None)

    async with (
        _endpoint(plan, chat_key) as chat_url,
        _rollout_server(plan.max_in_flight, server_key) as server_url,
        RolloutClient(url=server_url, api_key=server_key) as client,
    ):
        started = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(min(plan.max_in_flight, plan.rollouts)):
                    nursery.start_soon(work)
        finally:
            report.elapsed_sec = trio.current_time() - started


def _endpoint(plan: DemoPlan, key: str) -> AbstractAsyncContextManager[str]:
    """Return the block in which the model's chat endpoint listens; it yields the URL."""
    if isinstance(plan.model, RealModel):
        return model_server(plan.model, slots=plan.max_in_flight, api_key=key)
    return chat_server(create_chat_app(plan.model, key), _LOOPBACK)


@asynccontextmanager
async def _rollout_server(max_concurrent: int, key: str) -> AsyncGenerator[str, None]:
    """Serve the rollout server for the length of the block, then shut it down in stages."""
    app = create_demo_server(max_concurrent=max_concurrent, api_key=key)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, app, bind=_LOOPBACK, handle_signals=False))
        yield urls[0]
        app.request_shutdown()
