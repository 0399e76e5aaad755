"""The watchdog names code that blocks the event loop, while it is still blocking it."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
import trio
from support import CHAT_URL, local_backend, make_app, prompt, served

from rollout import AgentWorkflow, Grader
from rollout.client import RolloutClient
from rollout.server.watchdog import LoopWatchdog, describe_blocker
from rollout.types import RolloutStatus

LOGGER = "rollout.server.watchdog"


class Warned(logging.Handler):
    """Sets an event when it is warned of *what*, so that blocking code can wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.what = ""
        self.messages: list[str] = []
        self.first = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if self.what in self.messages[-1]:
            self.first.set()


@pytest.fixture
def warned():
    handler = Warned()
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class BlockingWorkflow(AgentWorkflow):
    """Blocks the event loop until the watchdog has noticed."""

    warned: Warned

    async def run(self, ctx):
        assert self.warned.first.wait(timeout=30)
        return [*ctx.prompt, {"role": "assistant", "content": "42"}]


class BlockingGrader(Grader):
    warned: Warned

    async def grade(self, ctx):
        assert self.warned.first.wait(timeout=30)
        ctx.set_reward(1.0)


@pytest.mark.parametrize("phase", ["workflow", "grader"])
async def test_a_blocking_phase_is_named_with_its_rollout(warned, phase):
    BlockingWorkflow.warned = BlockingGrader.warned = warned
    warned.what = f"the {phase} of rollout culprit, at {__file__}"
    backend = (
        local_backend(workflow=BlockingWorkflow)
        if phase == "workflow"
        else local_backend(grader=BlockingGrader)
    )
    app = make_app(backend, watchdog_sec=0.05)
    async with served(app) as url, RolloutClient(url=url) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "culprit", label="42")
    assert result.status is RolloutStatus.SUCCESS
    message = next(text for text in warned.messages if warned.what in text)
    assert "has been blocked for" in message


async def test_the_end_of_a_blockade_is_reported_too(warned):
    watchdog = LoopWatchdog(0.05)
    ended = threading.Event()

    class Ended(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "was blocked for" in record.getMessage():
                ended.set()

    handler = Ended()
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(watchdog.run)
            assert warned.first.wait(timeout=30)  # blocks this very loop
            await trio.to_thread.run_sync(ended.wait, 30)
            nursery.cancel_scope.cancel()
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    assert ended.is_set()


def watchers():
    """The threads of watchdogs; those of earlier tests may be about to end."""
    return {thread for thread in threading.enumerate() if thread.name == "rollout-watchdog"}


async def test_the_thread_ends_with_its_task():
    before = watchers()
    async with trio.open_nursery() as nursery:
        await nursery.start(LoopWatchdog(0.05).run)
        (thread,) = watchers() - before
        nursery.cancel_scope.cancel()
    await trio.to_thread.run_sync(thread.join, 30)
    assert not thread.is_alive()


async def test_nothing_is_watched_under_a_mock_clock(autojump_clock):
    assert not LoopWatchdog.applies()
    app = make_app(watchdog_sec=0.05)
    before = watchers()
    async with app.serving():
        assert watchers() <= before


async def test_a_real_clock_is_watched():
    assert LoopWatchdog.applies()


def test_a_stack_without_a_rollout_is_described_by_its_place():
    text = describe_blocker(sys._getframe())
    assert text.startswith(f"code at {__file__}:")
    assert "in test_a_stack_without_a_rollout_is_described_by_its_place" in text


def test_a_stack_that_is_gone_is_no_error():
    assert describe_blocker(None) == "something that has ended by now"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_threshold_must_be_positive_and_finite(seconds):
    with pytest.raises(ValueError, match="watchdog_sec"):
        make_app(watchdog_sec=seconds)
