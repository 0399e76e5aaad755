"""A cancellation at every single checkpoint leaves no task, no request and a usable client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import httpx
import trio
import trio.testing
from attrs import define, field
from client.fakes import (
    FakeServer,
    admitted,
    after,
    client_of,
    healthy,
    refused,
    result,
    run,
    start,
)
from client.sockets import RawRequest, id_of, raw_server

from rollout.client import RolloutClient, RolloutHandleCancelled
from rollout.types import RolloutStatus

MOST_STEPS = 500


@define(eq=False)
class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope once one of the tasks that matter has made that many steps."""

    scope: trio.CancelScope
    step: int
    names: tuple[str, ...]
    fired: bool = False
    steps: int = field(default=0, init=False)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not any(name in task.name for name in self.names):
            return
        self.steps += 1
        if self.steps > self.step and not self.fired:
            self.fired = True
            self.scope.cancel()


@define(eq=False)
class CountingServer(FakeServer):
    """Knows how many requests are under way."""

    under_way: int = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.under_way += 1
        try:
            return await super().handle_async_request(request)
        finally:
            self.under_way -= 1


async def admit_any(request: httpx.Request) -> httpx.Response:
    await trio.sleep(0.5)
    return admitted(json.loads(request.content)["rollout_id"])


def troubled_server() -> CountingServer:
    """A busy admission, then polls with every kind of wait in them."""
    return CountingServer(
        admissions=[refused(429), admit_any],
        polls=[
            result("queued"),  # is followed by a pause
            httpx.ReadError("reset"),
            after(2, refused(503)),
            after(30, result("running")),
            after(5, result("success")),
        ],
    )


def calm(server: CountingServer) -> None:
    """From here on everything succeeds."""
    server.admissions = [admitted("again")]
    server.polls = [result("success", "again")]


def at_every_step(main: Callable[[int], Awaitable[bool]]) -> None:
    """Run *main* with a cancellation at step 0, 1, ... until it says that none was left."""
    for step in range(MOST_STEPS):
        if not trio.run(main, step, clock=trio.testing.MockClock(autojump_threshold=0)):
            return
    raise AssertionError("it never came to its end")


@contextmanager
def cancelling(scope: trio.CancelScope, step: int, *names: str) -> Iterator[CancelAtStep]:
    instrument = CancelAtStep(scope, step, names)
    trio.lowlevel.add_instrument(instrument)
    try:
        yield instrument
    finally:
        trio.lowlevel.remove_instrument(instrument)


def test_run_rollout_cancelled_at_every_checkpoint():
    cut = []

    async def main(step: int) -> bool:
        server = troubled_server()
        async with client_of(server) as client:
            tasks = trio.lowlevel.current_statistics().tasks_living
            with trio.CancelScope() as scope, cancelling(scope, step, "main") as instrument:
                assert (await run(client)).status is RolloutStatus.SUCCESS
            cut.append(scope.cancelled_caught)
            assert server.under_way == 0
            assert trio.lowlevel.current_statistics().tasks_living == tasks
            assert not any("cancel" in call.path for call in server.calls)
            calm(server)
            assert (await run(client, "again")).status is RolloutStatus.SUCCESS
            assert client._handles == set()
        return instrument.fired

    at_every_step(main)
    assert sum(cut) >= 15


def test_run_rollout_async_cancelled_at_every_checkpoint():
    cut = []

    async def main(step: int) -> bool:
        server = troubled_server()
        async with client_of(server) as client:
            handle = None
            with trio.CancelScope() as scope, cancelling(scope, step, "main") as instrument:
                handle = await start(client)
            cut.append(scope.cancelled_caught)
            if handle is None:
                assert client._handles == set()
            else:
                assert (await handle).status is RolloutStatus.SUCCESS
            assert server.under_way == 0
            calm(server)
            assert (await (await start(client, "again"))).status is RolloutStatus.SUCCESS
        return instrument.fired

    at_every_step(main)
    assert sum(cut) >= 5


def test_the_whole_block_cancelled_at_every_step_of_its_polls():
    cut = []

    async def main(step: int) -> bool:
        server = troubled_server()
        tasks = trio.lowlevel.current_statistics().tasks_living
        handle = None
        with trio.CancelScope() as scope, cancelling(scope, step, "main", "poll r") as instrument:
            async with client_of(server) as client:
                handle = await start(client)
        cut.append(scope.cancelled_caught)
        assert server.under_way == 0
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        if handle is not None:
            assert handle.done()
            try:
                assert (await handle).status is RolloutStatus.SUCCESS
            except RolloutHandleCancelled:
                assert scope.cancelled_caught
        return instrument.fired

    at_every_step(main)
    assert sum(cut) >= 15


def test_handle_cancel_at_every_step_of_the_poll():
    ended = set()

    async def main(step: int) -> bool:
        server = troubled_server()
        async with client_of(server) as client:
            handle = await start(client)
            # A scope of no consequence: cancelled at that step, it wakes this task.
            with trio.CancelScope() as scope, cancelling(scope, step, "poll r") as instrument:
                await handle.wait_for_completion()
            was_polling = not handle.done()
            assert handle.cancel() is was_polling
            assert handle.cancel() is False
            try:
                assert (await handle).status is RolloutStatus.SUCCESS
                ended.add("success")
            except RolloutHandleCancelled:
                assert was_polling
                ended.add("cancelled")
            await trio.testing.wait_all_tasks_blocked()
            assert server.under_way == 0
            assert client._handles == set()
            calm(server)
            assert (await (await start(client, "again"))).status is RolloutStatus.SUCCESS
        return instrument.fired

    at_every_step(main)
    assert ended == {"success", "cancelled"}


async def test_on_a_real_socket_every_cancelled_request_gives_its_connection_back():
    async def handle(request: RawRequest) -> None:
        if request.path == "/health":
            await request.answer(healthy())
        elif request.path == "/rollout":
            await request.answer(admitted(id_of(request)))
        else:
            await request.answer(result("success", id_of(request)))

    limits = httpx.Limits(max_connections=1)
    cut = 0
    async with (
        raw_server(handle) as server,
        httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(10, pool=5)) as http,
        RolloutClient(url=server.url, http_client=http) as client,
    ):
        name = trio.lowlevel.current_task().name
        for step in range(MOST_STEPS):
            with trio.CancelScope() as scope, cancelling(scope, step, name) as instrument:
                await run(client)
            cut += scope.cancelled_caught
            # The only connection is needed for this; where it was lost, the pool times out.
            assert (await client.health())["status"] == "ok"
            if not instrument.fired:
                break
        else:
            raise AssertionError("it never came to its end")
    assert cut >= 10
