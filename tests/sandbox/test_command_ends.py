"""How commands in sandboxes end, and all that they started."""

from __future__ import annotations

import asyncio

import pytest
from sandbox_support import bash, others, says, until

from rollout.sandbox import CommandTimeoutError, NamespaceError

# Ends of commands

TREE = """
    (setsid sh -c 'echo $$ > /tmp/a; exec sleep 1000' &)
    env -i PATH=$PATH setsid sh -c 'echo $$ > /tmp/b; exec sleep 1000' &
    (trap '' TERM INT HUP; echo x > /tmp/c; sleep 1000) &
    (env -i setsid sh -c 'echo $$ > /tmp/d; exec sleep 1000' &)
    until [ -s /tmp/a ] && [ -s /tmp/b ] && [ -s /tmp/c ] && [ -s /tmp/d ]; do sleep 0.01; done
    echo x > /tmp/ready
    sleep 1000
"""


def numbers(box):
    return box._init.pid_namespace, box._init.pid


def test_a_timeout_kills_all_that_the_command_started(sandbox, run):
    async def main():
        async with sandbox() as box:
            with pytest.raises(CommandTimeoutError, match="timed out after 1 seconds") as caught:
                await bash(box, TREE, timeout_sec=1)
            assert not isinstance(caught.value, TimeoutError)
            assert others(numbers(box)) == []
            assert await says(box, "echo ok") == "ok\n"

    run(main)


def test_a_timeout_spares_what_other_commands_started(sandbox, run):
    async def main():
        async with sandbox() as box:
            await says(box, "sleep 1000 & echo $! > /tmp/kept")
            with pytest.raises(CommandTimeoutError):
                await bash(box, "sleep 1000", timeout_sec=0.05)
            await says(box, "kill -0 $(cat /tmp/kept)")

    run(main)


def test_a_timeout_kills_a_process_that_keeps_forking(sandbox, run):
    async def main():
        async with sandbox() as box:
            with pytest.raises(CommandTimeoutError):
                await bash(box, "f() { sleep 0.001; f & }; f; f; sleep 1000", timeout_sec=0.3)
            assert others(numbers(box)) == []

    run(main)


def test_a_cancellation_kills_all_that_the_command_started(sandbox, run):
    async def main():
        async with sandbox() as box:
            task = asyncio.create_task(bash(box, TREE))
            await until(box, "[ -s /tmp/ready ]")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert others(numbers(box)) == []

    run(main)


def test_a_command_cancelled_at_any_step_leaves_nothing(sandbox, run):
    async def main():
        async with sandbox() as box:
            for steps in range(40):
                task = asyncio.create_task(bash(box, "sleep 1000"))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert others(numbers(box)) == []
            assert box._commands == set()
            assert await says(box, "echo ok") == "ok\n"

    run(main)


def test_stop_ends_commands_that_run(sandbox, run):
    async def main():
        async with sandbox() as box:
            task = asyncio.create_task(bash(box, "echo x > /tmp/ready; sleep 1000"))
            await until(box, "[ -s /tmp/ready ]")
            await box.stop()
            with pytest.raises(NamespaceError, match="ended while"):
                await task

    run(main)


def test_stop_while_commands_start(sandbox, run):
    async def main():
        async with sandbox() as box:
            tasks = [asyncio.create_task(bash(box, "sleep 1000")) for _ in range(8)]
            for _ in range(3):
                await asyncio.sleep(0)
            await box.stop()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} == {NamespaceError}

    run(main)
