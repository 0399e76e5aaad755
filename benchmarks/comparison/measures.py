"""What is measured: every figure is a record of one job of one pair in one round."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio
from attrs import define, field, frozen

from comparison.job import Job
from comparison.pairs import PAIRS, Launcher, Pair, RunningPair
from comparison.process import ChildError, ungrouped
from comparison.proxy import counting_proxy

Record = dict[str, Any]


@frozen(kw_only=True)
class Settings:
    """How much is measured.

    Attributes:
        levels: Rollouts in flight at which no-op throughput is measured.
        scale_levels: Two more such levels, for our pair alone.
        rollouts: Rollouts of a throughput job at least; twice those in flight if that is more.
        at_least_sec: How long a throughput job goes on at least.
        limit_sec: When a throughput job is cut short.
        rounds: How often each throughput job is run; the order of the pairs alternates.
        wall: How many rollouts that sleep run at once, and for how many seconds each.
        wall_limit_sec: When such a job is cut short, on top of the sleep.
        wall_rounds: How often.
        bounded_most: The most rollouts at once for the official client with its own HTTP client.
        official_most: The most rollouts at once for pairs with an official side in them.
        traffic_rollouts: Rollouts of the runs that count requests and bytes.
    """

    levels: tuple[int, ...] = (1, 16, 64, 256, 1000)
    scale_levels: tuple[int, ...] = (100, 10_000)
    rollouts: int = 200
    at_least_sec: float = 2.0
    limit_sec: float = 60.0
    rounds: int = 3
    wall: tuple[tuple[int, float], ...] = ((1000, 5.0), (1000, 30.0), (10_000, 30.0))
    wall_limit_sec: float = 120.0
    wall_rounds: int = 1
    bounded_most: int = 256
    official_most: int = 1000
    traffic_rollouts: int = 200


@define(eq=False)
class Bench:
    """Runs measures, and keeps their records.

    Attributes:
        records: One for each job that ran; `error` says why one failed.
        left_out: What was not measured, for which pair, and why.
    """

    settings: Settings
    launcher: Launcher
    pairs: tuple[Pair, ...]
    progress: Callable[[Record], None] = field(default=lambda _: None)
    records: list[Record] = field(factory=list)
    left_out: list[Record] = field(factory=list)
    _stables: dict[str, tuple[RunningPair, AsyncExitStack]] = field(factory=dict)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """End all processes at the end of the block."""
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):  # each of them ends within seconds
                for key in list(self._stables):
                    await self._stop(key)

    async def _start(self, pair: Pair) -> RunningPair:
        if pair.key in self._stables:
            running, _ = self._stables[pair.key]
            if not running.dirty:
                return running
            await self._stop(pair.key)
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(self.launcher.running(pair))
            await running.warm_up()
            self._stables[pair.key] = running, stack.pop_all()
        return running

    async def _stop(self, key: str) -> None:
        _, stack = self._stables.pop(key)
        await stack.aclose()

    async def _measure(
        self, record: Record, pair: Pair, job: Job, *, fresh: bool = False, proxy: bool = False
    ) -> None:
        """Run one job and record it; a process that fails costs this record alone."""
        record = {
            "pair": pair.key,
            "in_flight": job.in_flight,
            "sleep_sec": job.sleep_sec,
            **record,
        }
        self.progress(record)
        try:
            if fresh and pair.key in self._stables:
                await self._stop(pair.key)
            running = await self._start(pair)
            if proxy:
                with ungrouped():
                    async with counting_proxy(running.url) as (url, counts):
                        record |= await running.run(job, url=url)
                record |= counts.to_json()
            else:
                record |= await running.run(job)
        except ChildError as error:
            record["error"] = str(error)
        if pair.key in self._stables and (fresh or "error" in record):
            await self._stop(pair.key)
        self.records.append(record)
        self.progress(record)

    # --- measures -----------------------------------------------------------------------------

    async def throughput(self) -> None:
        """No-op rollouts per second, so many in flight; one in flight gives the latency."""
        settings = self.settings
        for level in settings.levels:
            await self._throughput_at("throughput", level, self.pairs)
        if PAIRS["ours"] in self.pairs:
            for level in settings.scale_levels:
                await self._throughput_at("scale", level, (PAIRS["ours"],))

    async def _throughput_at(self, measure: str, level: int, pairs: Iterable[Pair]) -> None:
        settings = self.settings
        chosen = self._choose(pairs, measure, level, 0.0)
        for number in range(settings.rounds):
            for pair in in_turn(chosen, number):
                job = Job(
                    f"{measure}-{level}-{number}",
                    rollouts=max(settings.rollouts, 2 * level),
                    in_flight=level,
                    at_least_sec=settings.at_least_sec,
                    limit_sec=settings.limit_sec,
                )
                await self._measure({"measure": measure, "round": number}, pair, job)

    async def traffic(self) -> None:
        """Requests and bytes of a rollout, counted by a proxy in runs of their own."""
        count = self.settings.traffic_rollouts
        for sleep_sec in (0.0, 1.0):
            for pair in self.pairs:
                job = Job(
                    f"traffic-{sleep_sec:g}",
                    rollouts=count,
                    in_flight=min(64, count),
                    sleep_sec=sleep_sec,
                    limit_sec=self.settings.limit_sec,
                )
                await self._measure({"measure": "traffic", "round": 0}, pair, job, proxy=True)

    async def wall(self) -> None:
        """Wall time and memory of many rollouts at once, in fresh processes."""
        for count, sleep_sec in self.settings.wall:
            chosen = self._choose(self.pairs, "wall", count, sleep_sec)
            for number in range(self.settings.wall_rounds):
                for pair in in_turn(chosen, number):
                    job = Job(
                        f"wall-{number}",
                        rollouts=count,
                        in_flight=count,
                        sleep_sec=sleep_sec,
                        limit_sec=sleep_sec + self.settings.wall_limit_sec,
                    )
                    record = {"measure": "wall", "round": number}
                    await self._measure(record, pair, job, fresh=True)

    def _choose(
        self, pairs: Iterable[Pair], measure: str, count: int, sleep_sec: float
    ) -> list[Pair]:
        """Leave out the pairs that are not up to so many rollouts at once, and note why."""
        chosen = []
        for pair in pairs:
            reason = self._reason_against(pair, count)
            if reason is None:
                chosen.append(pair)
                continue
            self.left_out.append(
                {
                    "measure": measure,
                    "pair": pair.key,
                    "in_flight": count,
                    "sleep_sec": sleep_sec,
                    "reason": reason,
                }
            )
        return chosen

    def _reason_against(self, pair: Pair, count: int) -> str | None:
        settings = self.settings
        if pair.bounded and count > settings.bounded_most:
            return (
                f"more than {settings.bounded_most} at once (--bounded-most): the official "
                "client's own HTTP client has 100 connections, and a rollout that has waited 5 s "
                "for one fails"
            )
        if not pair.needs_official or count <= settings.official_most:
            return None
        reason = f"more than {settings.official_most} at once (--official-most)"
        done = [
            record
            for record in self.records
            if record["measure"] == "wall" and record["pair"] == pair.key and "error" not in record
        ]
        if done:
            last = max(done, key=lambda record: record["in_flight"])
            overhead = last["wall_sec"] - last["sleep_sec"]
            reason += (
                f": {last['in_flight']} took {overhead:.0f} s on top of their sleep, and the time "
                "grows at least in proportion: "
                f"{overhead * count / last['in_flight']:.0f} s or more"
            )
        return reason


def in_turn(pairs: Iterable[Pair], number: int) -> list[Pair]:
    """The pairs in the order of that round: there, and back."""
    ordered = list(pairs)
    return ordered if number % 2 == 0 else ordered[::-1]
