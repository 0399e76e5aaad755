"""Background tasks of a block: whose error comes out, and how."""

from __future__ import annotations

import pytest
import trio

from rollout._tasks import background_tasks


async def fail(error, started=None):
    await trio.lowlevel.checkpoint()
    raise error


async def test_tasks_end_with_the_block():
    ended = []

    async def task():
        try:
            await trio.sleep_forever()
        finally:
            ended.append(1)

    async with background_tasks(task, task):
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
    assert ended == [1, 1]


async def test_the_error_of_a_task_comes_out_plain():
    error = LookupError("of a task")

    with pytest.raises(LookupError) as caught:
        async with background_tasks(lambda: fail(error), trio.sleep_forever):
            await trio.sleep_forever()
    assert caught.value is error


async def test_the_error_of_the_block_has_those_of_tasks_as_notes():
    mine, others = ValueError("mine"), LookupError("of a task")
    with pytest.raises(ValueError, match="mine") as caught:
        async with background_tasks(lambda: fail(others)):
            try:
                await trio.sleep_forever()
            finally:
                raise mine
    assert caught.value is mine
    assert mine.__notes__ == ["meanwhile: LookupError('of a task')"]


async def test_several_tasks_that_fail_come_out_together():
    async def at_once(error):
        raise error

    with pytest.raises(ExceptionGroup) as caught:
        async with background_tasks(lambda: at_once(LookupError()), lambda: at_once(ValueError())):
            await trio.sleep_forever()
    assert {type(error) for error in caught.value.exceptions} == {LookupError, ValueError}


async def test_a_group_of_the_block_that_holds_a_cancellation():
    """The cancellation belongs to a scope further out, and is not carried past it."""

    async def cancelled():
        await trio.sleep_forever()

    with pytest.raises(LookupError):
        with trio.CancelScope() as scope:
            async with background_tasks(trio.sleep_forever):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancelled)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
                    raise LookupError
    assert scope.cancel_called


async def test_cancelling_from_outside_leaves_nothing():
    with trio.CancelScope() as scope:
        async with background_tasks(trio.sleep_forever):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
