"""The watchdog names code that blocks the event loop, while it is still blocking it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import trio
from server.faults import served_http
from support import CHAT_URL, local_backend, make_app, prompt, served
from trio.testing import wait_all_tasks_blocked

from rollout import AgentWorkflow, Grader
from rollout.client import RolloutClient
from rollout.errors import InvalidBodyError
from rollout.server.watchdog import LoopWatchdog, describe_task
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
    text = describe_task([sys._getframe()])
    assert text.startswith(f"code at {__file__}:")
    assert "in test_a_stack_without_a_rollout_is_described_by_its_place" in text


@pytest.mark.parametrize("path", ["/rollout", "/rollouts/feed"])
async def test_a_request_that_blocks_is_named(warned, path, monkeypatch):
    def parse(data, **options):
        assert warned.first.wait(timeout=30)
        raise InvalidBodyError([])

    monkeypatch.setattr("rollout.server.asgi.parse_json", parse)
    warned.what = f"the request POST {path} of 127.0.0.1, at {__file__}"
    async with served_http(make_app(watchdog_sec=0.05)) as http:
        assert (await http.post(path, json={})).status_code >= 400
    assert warned.first.is_set()


async def test_a_call_that_holds_the_interpreter_lock_is_named_and_so_is_one_that_computes(warned):
    async def compute() -> None:
        since = time.thread_time()
        while time.thread_time() - since < 0.3:
            sum(range(10_000))

    async def hold() -> None:
        since = time.thread_time()
        while time.thread_time() - since < 0.3:
            sum(range(10_000_000))

    async with trio.open_nursery() as nursery:
        await nursery.start(LoopWatchdog(0.05).run)
        for task in (compute, hold):
            warned.first.clear()
            warned.what = f"in {task.__name__}"
            await task()
            assert await trio.to_thread.run_sync(warned.first.wait, 30)
        nursery.cancel_scope.cancel()


INNOCENT = """
import logging, os, signal, sys, time
import trio, trio.testing
from rollout.server.watchdog import LoopWatchdog

logging.basicConfig(stream=sys.stdout, format="%(message)s")

async def short(event):
    await event.wait()
    since = time.thread_time()
    while time.thread_time() - since < 0.002:
        pass

async def main():
    async with trio.open_nursery() as nursery:
        await nursery.start(LoopWatchdog(0.3).run)
        os.kill(os.getpid(), signal.SIGSTOP)
        await trio.sleep(0.1)
        print("stopped", flush=True)
        async with trio.open_nursery() as tasks:
            event = trio.Event()
            for _ in range(300):
                tasks.start_soon(short, event)
            await trio.testing.wait_all_tasks_blocked()
            event.set()
        nursery.cancel_scope.cancel()

trio.run(main)
"""


def test_a_stopped_process_blames_nobody_and_many_short_tasks_no_single_one():
    process = subprocess.Popen([sys.executable, "-c", INNOCENT], stdout=subprocess.PIPE, text=True)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    time.sleep(0.6)  # this is how long the machine has no time for it
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=60)
    before, _, after = said.partition("stopped\n")
    assert (process.returncode, before) == (0, "")
    assert "many tasks, none of them for long" in after
    assert " in short" not in after


async def test_a_watcher_for_which_the_machine_has_no_time_blames_no_single_one(
    warned, monkeypatch
):
    class Late(threading.Event):
        def wait(self, timeout=None):
            return super().wait(None if timeout is None else timeout + 0.1)

    async def short(event) -> None:
        await event.wait()
        if not warned.first.is_set():
            since = time.thread_time()
            while time.thread_time() - since < 0.001:
                pass
            time.sleep(0.006)  # it waits for the processor, too

    async with trio.open_nursery() as nursery:
        with monkeypatch.context() as patch:
            patch.setattr("rollout.server.watchdog.threading.Event", Late)
            await nursery.start(LoopWatchdog(0.1).run)
        async with trio.open_nursery() as tasks:
            event = trio.Event()
            for _ in range(500):
                tasks.start_soon(short, event)
            await wait_all_tasks_blocked()
            event.set()
        nursery.cancel_scope.cancel()
    assert "many tasks, none of them for long" in warned.messages[0]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_threshold_must_be_positive_and_finite(seconds):
    with pytest.raises(ValueError, match="watchdog_sec"):
        make_app(watchdog_sec=seconds)
