"""The end of a bridge: nothing outlives it, and nothing holds it up for ever."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref

import pytest
import trio
import trio.testing

from rollout.errors import InvalidFieldError
from rollout.integrations.asyncio_bridge import BridgeError, open_asyncio_bridge, run_in_trio


def bridge_threads(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


async def current_loop():
    return asyncio.get_running_loop()


async def test_leaving_the_block_ends_thread_and_loop(caplog):
    async with open_asyncio_bridge(name="leaver") as bridge:
        loop = await bridge.run(current_loop)
        assert len(bridge_threads("leaver")) == 1
        assert "open" in repr(bridge)
    assert loop.is_closed()
    assert bridge_threads("leaver") == []
    assert "closed" in repr(bridge)
    assert caplog.records == []


async def test_use_after_the_end_explains_itself():
    async with open_asyncio_bridge() as bridge:
        pass
    with pytest.raises(BridgeError, match="closed"):
        await bridge.run(asyncio.sleep, 0)
    with pytest.raises(BridgeError, match="closed"):
        async with bridge.iterate(current_loop):
            raise AssertionError("not reached")
    with pytest.raises(BridgeError, match="closed"):
        bridge.call_trio_soon(print)


async def test_an_error_of_the_block_arrives_bare():
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with open_asyncio_bridge():
            raise error
    assert caught.value is error


async def test_a_group_of_the_block_arrives_as_it_is():
    error = ExceptionGroup("mine", [ValueError("a")])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_asyncio_bridge():
            raise error
    assert caught.value is error


async def test_calls_of_other_tasks_end_with_an_error_once_they_have_cleaned_up():
    events = []
    started = trio.Event()

    async def work(bridge):
        bridge.call_trio_soon(started.set)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    async def caller(bridge):
        with pytest.raises(BridgeError, match="work"):
            await bridge.run(work, bridge)
        events.append("error")

    async with trio.open_nursery() as nursery:
        async with open_asyncio_bridge() as bridge:
            nursery.start_soon(caller, bridge)
            await started.wait()
        assert "cleaned up" in events
    assert events == ["cleaned up", "error"]


async def test_a_cancelled_caller_and_the_end_of_the_bridge_cancel_a_task_once_only(mock_clock):
    """Two who want it to end at the same time leave its cleanup its grace period."""
    events = []
    started, cleaning, release = trio.Event(), trio.Event(), trio.Event()

    async def clean_up():
        cleaning.set()
        await release.wait()
        events.append("cleaned up")

    async def work(bridge):
        try:
            bridge.call_trio_soon(started.set)
            await asyncio.Event().wait()
        finally:
            await run_in_trio(clean_up)

    async def helper():
        await cleaning.wait()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):  # a second cancellation would need a turn of the loop or two
            turn = trio.Event()
            bridge._loop.call_soon_threadsafe(bridge.call_trio_soon, turn.set)
            await turn.wait()
        release.set()

    async def caller(bridge):
        with scope:
            await bridge.run(work, bridge)

    scope = trio.CancelScope()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(helper)
        async with open_asyncio_bridge() as bridge:
            nursery.start_soon(caller, bridge)
            await started.wait()
            scope.cancel()
            await cleaning.wait()
    assert scope.cancelled_caught
    assert events == ["cleaned up"]


async def test_tasks_that_were_left_over_are_cancelled_and_awaited(caplog):
    ended = []

    async def background():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            # One that starts another in its cleanup.
            tasks.append(asyncio.create_task(last()))
            ended.append("background")

    async def last():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("last")

    tasks = []

    async def spawn():
        tasks.append(asyncio.create_task(background()))
        await asyncio.sleep(0)

    async with open_asyncio_bridge() as bridge:
        await bridge.run(spawn)
    assert ended[0] == "background"
    assert len(tasks) == 2
    assert all(task.done() for task in tasks)
    assert caplog.records == []


async def test_what_a_left_over_task_fails_with_is_logged(caplog):
    tasks = []

    async def background():
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("left over")

    async def spawn():
        tasks.append(asyncio.create_task(background()))
        await asyncio.sleep(0)

    async with open_asyncio_bridge() as bridge:
        await bridge.run(spawn)
    [record] = caplog.records
    assert record.name == "rollout.integrations.asyncio_bridge"
    assert str(record.exc_info[1]) == "left over"


async def test_what_a_lost_task_failed_with_is_logged_not_printed(caplog, capsys):
    async def fail():
        raise OSError("nobody asked")

    async def spawn():
        task = asyncio.create_task(fail())
        await asyncio.wait([task])

    async def collect():
        gc.collect()

    async with open_asyncio_bridge() as bridge:
        await bridge.run(spawn)
        await bridge.run(collect)
    [record] = caplog.records
    assert "never retrieved" in record.message
    assert str(record.exc_info[1]) == "nobody asked"
    assert capsys.readouterr() == ("", "")


async def test_abandoned_generators_are_closed():
    closed = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    kept = []

    async def take_one():
        generator = numbers()
        kept.append(generator)
        return await anext(generator)

    async with open_asyncio_bridge() as bridge:
        assert await bridge.run(take_one) == 1
        assert closed == []
    assert closed == [True]


async def test_worker_threads_are_waited_for():
    let_go = threading.Event()
    started = trio.Event()
    ended = []

    def tool(bridge):
        bridge.call_trio_soon(started.set)
        let_go.wait()
        ended.append(True)

    scope = trio.CancelScope()

    async def caller(bridge):
        with scope:
            await bridge.run(asyncio.to_thread, tool, bridge)

    async with open_asyncio_bridge(name="worker") as bridge:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller, bridge)
            await started.wait()
            scope.cancel()
        # The call is over, its thread is not: a synchronous tool cannot be interrupted.
        assert scope.cancelled_caught
        assert ended == []
        let_go.set()
    assert ended == [True]
    assert bridge_threads("worker") == []


async def jump_when_blocked(clock, seconds, times=1):
    for _ in range(times):
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(seconds)


async def test_a_worker_thread_that_hangs_is_given_up(mock_clock, caplog):
    let_go = threading.Event()
    started = trio.Event()

    def tool(bridge):
        bridge.call_trio_soon(started.set)
        let_go.wait()

    async def spawn(bridge):
        asyncio.get_running_loop().run_in_executor(None, tool, bridge)

    try:
        async with trio.open_nursery() as nursery:
            async with open_asyncio_bridge(close_timeout_sec=30) as bridge:
                loop = await bridge.run(current_loop)
                await bridge.run(spawn, bridge)
                await started.wait()
                nursery.start_soon(jump_once_closing, bridge, mock_clock, 30)
        assert loop.is_closed()
    finally:
        let_go.set()
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "worker threads" in record.message


async def jump_once_closing(bridge, clock, seconds):
    """Jump once the end of the bridge waits for its executor."""
    executor = bridge._thread.executor
    while not executor._shutdown:
        await trio.lowlevel.checkpoint()
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(seconds)


class Stubborn:
    """A task that swallows a number of cancellations and says so."""

    def __init__(self, bridge, times):
        self.bridge = bridge
        self.left = times
        self.started = trio.Event()
        self.swallowed, self.next = trio.open_memory_channel(100)

    async def run(self):
        self.bridge.call_trio_soon(self.started.set)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.bridge.call_trio_soon(self.swallowed.send_nowait, None)
                self.left -= 1
                if self.left < 0:
                    raise


async def test_a_call_that_hangs_in_its_cleanup_is_cancelled_again_by_the_end(mock_clock):
    async with trio.open_nursery() as nursery:
        async with open_asyncio_bridge(grace_sec=10, close_timeout_sec=30) as bridge:
            task = Stubborn(bridge, 1)

            async def caller():
                with pytest.raises(BridgeError, match="closed"):
                    await bridge.run(task.run)

            async def helper():
                await task.next.receive()
                mock_clock.jump(10)
                await task.next.receive()

            nursery.start_soon(caller)
            nursery.start_soon(helper)
            await task.started.wait()
    assert task.left == -1


@pytest.mark.parametrize("as_call", [True, False])
async def test_a_task_that_never_ends_is_named_and_abandoned(mock_clock, caplog, as_call):
    async with trio.open_nursery() as nursery:
        async with open_asyncio_bridge(grace_sec=10, close_timeout_sec=30) as bridge:
            loop = await bridge.run(current_loop)
            task = Stubborn(bridge, 10_000)

            async def caller():
                with pytest.raises(BridgeError, match=r"Stubborn\.run"):
                    await bridge.run(task.run)

            async def spawn():
                tasks.append(asyncio.create_task(task.run(), name="Stubborn.run"))

            async def helper():
                for _ in range(3):
                    await task.next.receive()
                    mock_clock.jump(10)

            tasks = []
            if as_call:
                nursery.start_soon(caller)
            else:
                await bridge.run(spawn)
            await task.started.wait()
            nursery.start_soon(helper)
    assert loop.is_closed()
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert any("abandons them" in message for message in errors)
    assert any("Stubborn.run" in message for message in errors)
    tasks.clear()
    gc.collect()
    assert not any("destroyed" in record.message for record in caplog.records)


async def test_a_blocked_loop_is_left_behind_with_its_stack(mock_clock, caplog):
    let_go = threading.Event()
    held = trio.Event()

    async def hold_up_the_loop(bridge):
        bridge.call_trio_soon(held.set)
        let_go.wait()
        await run_in_trio(trio.lowlevel.checkpoint)

    async def caller(bridge):
        with pytest.raises(BridgeError, match="hold_up_the_loop"):
            await bridge.run(hold_up_the_loop, bridge)

    try:
        async with trio.open_nursery() as nursery:
            async with open_asyncio_bridge(
                name="blocked", grace_sec=10, close_timeout_sec=30
            ) as bridge:
                nursery.start_soon(caller, bridge)
                await held.wait()
                nursery.start_soon(jump_when_blocked, mock_clock, 10, 4)
        assert "hold_up_the_loop" in caplog.records[-1].message
        assert "left behind" in caplog.records[-1].message
    finally:
        let_go.set()
    [thread] = bridge_threads("blocked") or [None]
    if thread is not None:
        await trio.to_thread.run_sync(thread.join)
    assert bridge_threads("blocked") == []


async def test_functions_on_the_trio_side_end_with_a_loop_that_is_left_behind(mock_clock, caplog):
    """Their callers cannot cancel them any more, and the block must not wait for them for ever."""
    let_go = threading.Event()
    running, held = trio.Event(), trio.Event()
    ended = []

    async def function():
        running.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)

    async def hold_up_the_loop(bridge):
        bridge.call_trio_soon(held.set)
        let_go.wait()

    async def caller(bridge, fn, *args):
        with pytest.raises(BridgeError, match="was running"):
            await bridge.run(fn, *args)

    try:
        async with trio.open_nursery() as nursery:
            async with open_asyncio_bridge(
                name="left", grace_sec=10, close_timeout_sec=30
            ) as bridge:
                nursery.start_soon(caller, bridge, run_in_trio, function)
                await running.wait()
                nursery.start_soon(caller, bridge, hold_up_the_loop, bridge)
                await held.wait()
                nursery.start_soon(jump_when_blocked, mock_clock, 10, 4)
        assert ended == [True]
        assert "left behind" in caplog.text
    finally:
        let_go.set()
    for thread in bridge_threads("left"):
        await trio.to_thread.run_sync(thread.join)


async def test_a_stopped_loop_ends_the_bridge_and_wakes_everybody(caplog):
    cleaned_up = []

    async def wait(bridge, started):
        bridge.call_trio_soon(started.set)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(True)

    async def stop():
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()

    async def caller(*args):
        with pytest.raises(BridgeError, match="closed"):
            await bridge.run(*args)

    async with open_asyncio_bridge() as bridge:
        async with trio.open_nursery() as nursery:
            started = trio.Event()
            nursery.start_soon(caller, wait, bridge, started)
            await started.wait()
            nursery.start_soon(caller, stop)
        assert cleaned_up == [True]
        with pytest.raises(BridgeError, match="stopped by code"):
            await bridge.run(current_loop)
    assert "stopped by code" in caplog.text


async def test_a_loop_that_dies_wakes_everybody(caplog):
    async def wait(bridge, started):
        bridge.call_trio_soon(started.set)
        await asyncio.Event().wait()

    async def break_it():
        def fail(timeout):
            raise OSError("no more selecting")

        asyncio.get_running_loop()._selector.select = fail
        await asyncio.Event().wait()

    async def caller(*args):
        with pytest.raises(BridgeError, match="no more selecting"):
            await bridge.run(*args)

    async with open_asyncio_bridge() as bridge:
        async with trio.open_nursery() as nursery:
            started = trio.Event()
            nursery.start_soon(caller, wait, bridge, started)
            await started.wait()
            nursery.start_soon(caller, break_it)
        with pytest.raises(BridgeError, match="no more selecting"):
            await bridge.run(current_loop)
    gc.collect()
    assert "its event loop failed" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_an_exit_out_of_a_spawned_task_does_not_end_the_loop(caplog, error):
    async def leave():
        raise error

    async def spawn():
        await asyncio.create_task(leave())

    async with open_asyncio_bridge() as bridge:
        caught = None
        try:
            await bridge.run(spawn)
        except BaseException as arrived:
            caught = arrived
        assert caught is error
        assert await bridge.run(asyncio.sleep, 0, "alive") == "alive"
    [record] = caplog.records
    assert type(error).__name__ in record.message


async def test_bridges_open_again_and_side_by_side():
    loops = []

    async def user():
        async with open_asyncio_bridge() as bridge:
            loops.append(await bridge.run(current_loop))
            await trio.testing.wait_all_tasks_blocked(0.001)

    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(user)
    assert len(set(loops)) == 6
    assert all(loop.is_closed() for loop in loops)


async def test_an_error_leaves_no_cycle_behind():
    class Payload(Exception):
        pass

    async def fail():
        raise Payload

    gone = []

    async def once(bridge):
        try:
            await bridge.run(fail)
        except Payload as error:
            gone.append(weakref.ref(error))

    async with open_asyncio_bridge() as bridge:
        gc.disable()
        try:
            await once(bridge)
            await bridge.run(asyncio.sleep, 0)
        finally:
            gc.enable()
        assert gone[0]() is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("grace_sec", 0),
        ("grace_sec", float("nan")),
        ("abandon_after_sec", -1),
        ("close_timeout_sec", float("inf")),
        ("close_timeout_sec", float("nan")),
    ],
)
async def test_times_are_checked(option, value):
    with pytest.raises(InvalidFieldError, match=option):
        async with open_asyncio_bridge(**{option: value}):
            raise AssertionError("not reached")


def test_nothing_is_left_in_a_whole_process():
    """Warnings of asyncio and of the interpreter's end would show on stderr."""
    script = """
import asyncio, trio
from rollout.integrations.asyncio_bridge import open_asyncio_bridge

async def background():
    await asyncio.sleep(3600)

async def work():
    asyncio.create_task(background())
    await asyncio.to_thread(int)
    await asyncio.sleep(0)

async def main():
    async with open_asyncio_bridge() as bridge:
        await bridge.run(work)
        with trio.move_on_after(0.01):
            await bridge.run(asyncio.sleep, 3600)

trio.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
