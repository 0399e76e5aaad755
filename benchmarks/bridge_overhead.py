"""What a call through the bridge to asyncio costs, and how late trio's loop is meanwhile.

    python benchmarks/bridge_overhead.py
    python benchmarks/bridge_overhead.py --calls 20000 --busy-ms 2

Prints microseconds for each way over the bridge: a call that does nothing, many of them at once,
a cancelled call, an item of a stream, a callback into trio, a hook. Then some asyncio tasks keep
their loop busy, in slices of ``--busy-ms``, while a trio task measures how late it wakes up: what
is left is the price of one interpreter lock for two loops. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import trio

from rollout.integrations.asyncio_bridge import AsyncioBridge, open_asyncio_bridge, run_in_trio

TICK_SEC = 0.002


async def nothing() -> None:
    """What costs nothing by itself."""


async def one_by_one(bridge: AsyncioBridge, count: int) -> None:
    for _ in range(count):
        await bridge.run(nothing)


async def at_once(bridge: AsyncioBridge, count: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(bridge.run, nothing)


async def cancelled(bridge: AsyncioBridge, count: int) -> None:
    async def wait(scope: trio.CancelScope) -> None:
        bridge.call_trio_soon(scope.cancel)
        await asyncio.Event().wait()

    for _ in range(count):
        with trio.CancelScope() as scope:
            await bridge.run(wait, scope)


async def streamed(bridge: AsyncioBridge, count: int) -> None:
    async def items():
        for number in range(count):
            yield number

    async with bridge.iterate(items) as stream:
        async for _ in stream:
            pass


async def called_back(bridge: AsyncioBridge, count: int) -> None:
    async def tools() -> None:
        for _ in range(count):
            await run_in_trio(trio.lowlevel.checkpoint)

    await bridge.run(tools)


async def hooked(bridge: AsyncioBridge, count: int) -> None:
    async def hooks() -> None:
        for number in range(count):
            bridge.call_trio_soon(int, number)
            if number % 100 == 0:
                await asyncio.sleep(0)

    await bridge.run(hooks)


WAYS: dict[str, Callable[[AsyncioBridge, int], Awaitable[None]]] = {
    "calls, one by one": one_by_one,
    "calls, at once": at_once,
    "cancelled calls": cancelled,
    "items of a stream": streamed,
    "callbacks": called_back,
    "hooks": hooked,
}


async def work(busy_sec: float, until: float) -> None:
    """Keep the asyncio loop busy in slices, as a framework does that parses and formats."""
    while time.perf_counter() < until:
        end = time.perf_counter() + busy_sec
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(0)


async def measure_lag(seconds: float) -> list[float]:
    late = []
    end = trio.current_time() + seconds
    while (now := trio.current_time()) < end:
        await trio.sleep(TICK_SEC)
        late.append(trio.current_time() - now - TICK_SEC)
    return late


def print_lag(label: str, late: list[float]) -> None:
    cuts = statistics.quantiles(late, n=100)
    print(
        f"{label:<20} {cuts[49] * 1e3:8.2f} {cuts[98] * 1e3:8.2f} {max(late) * 1e3:8.2f}  "
        f"({len(late)} ticks)"
    )


async def main(calls: int, tasks: int, busy_sec: float, seconds: float) -> None:
    async with open_asyncio_bridge() as bridge:
        print(f"{'way':<20} {'µs each':>8}   (of {calls})")
        await one_by_one(bridge, 100)  # warm
        for label, way in WAYS.items():
            start = time.perf_counter()
            await way(bridge, calls)
            print(f"{label:<20} {(time.perf_counter() - start) / calls * 1e6:8.0f}")
        print(f"\n{'lag of trio, ms':<20} {'median':>8} {'p99':>8} {'max':>8}")
        print_lag("idle", await measure_lag(seconds))
        async with trio.open_nursery() as nursery:
            until = time.perf_counter() + seconds + 0.2
            for _ in range(tasks):
                nursery.start_soon(bridge.run, work, busy_sec, until)
            print_lag(f"{tasks} busy tasks", await measure_lag(seconds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--tasks", type=int, default=50, help="how many asyncio tasks keep busy")
    parser.add_argument("--busy-ms", type=float, default=1.0, help="length of one slice of theirs")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long the lag is measured")
    chosen = parser.parse_args()
    trio.run(main, chosen.calls, chosen.tasks, chosen.busy_ms / 1000, chosen.seconds)
