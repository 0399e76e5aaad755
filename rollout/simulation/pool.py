"""The workers of a simulated pool, which crash, are cut off, join and leave.

The front is the server of the world, with a `PoolBackend`. Each worker is a server of its own, and
its link to the front is a network of its own, with faults as those between callers and the front.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import trio
from attrs import define

from rollout.client import RolloutClient
from rollout.pool import PoolBackend, Worker, WorkerAddress, Workers, WorkerSource
from rollout.pool.queue import FairQueue
from rollout.simulation.faults import FaultLevel, RandomFaults
from rollout.simulation.network import SimulatedTransport
from rollout.simulation.server import SimulatedServer
from rollout.simulation.store import COMMIT_MOMENTS
from rollout.simulation.trace import Trace
from rollout.simulation.world import NoCookies, ServerOptions, SimulatedWorld, server_of

__all__ = ["LONGEST_CUT_SEC", "SimulatedPool", "SimulatedWorker", "kill_at_some_moment"]

_FIRST_NUMBER = 1_000_000
"""The requests to each worker are numbered from a multiple of this."""

_MOST_STEPS = 40
_LONGEST_AWAY_SEC = 20.0
LONGEST_CUT_SEC = 200.0
_LATEST_SEC = 30.0
_SETTLE_SEC = 10.0
_WATCHED = 0.5
"""How likely it is that the source of the workers learns of a death by itself."""

_POWER_CUTS = 0.3


@define(eq=False)
class SimulatedWorker:
    """A worker: a server, and the network between it and the front.

    Attributes:
        address: Its name, and its URL.
        trace: What happens on it and on its network.
        server: The server.
        transport: The network.
        joins_at: When it joins the pool, in seconds.
        member: The worker as the running front sees it; ``None`` before it has joined.
    """

    address: WorkerAddress
    trace: Trace
    server: SimulatedServer
    transport: SimulatedTransport
    joins_at: float = 0.0
    member: Worker | None = None


class _RecordedQueue(FairQueue[Any]):
    """A queue that records what waits in it, and what is handed out."""

    def __init__(self, trace: Trace, process: int) -> None:
        super().__init__()
        self._trace = trace
        self._process = process

    def _record(self, what: str, run_name: str | None, item: Any) -> None:
        self._trace.add("pool", what, item.id, run=run_name, process=self._process)

    def push(self, run_name: str | None, item: Any) -> None:
        super().push(run_name, item)
        self._record("waits", run_name, item)

    def put_back(self, run_name: str | None, item: Any) -> None:
        super().put_back(run_name, item)
        self._record("put-back", run_name, item)

    def pop(self) -> Any:
        item = super().pop()
        if item is not None:
            self._record("handed-out", item.run, item)
        return item

    def discard(self, run_name: str | None, item: Any) -> bool:
        self._record("waits-no-longer", run_name, item)
        return super().discard(run_name, item)


class SimulatedPool(WorkerSource):
    """The workers of a pool, and the source that has them join the running front.

    Args:
        count: How many workers there are.
        options: How each of them is set up.
        max_queue_depth: How many rollouts may wait at the front; ``None`` for no bound.
        level: How often things go wrong between the front and the workers.
        draw: Where the draws come from.
        feed: Whether their networks let batches and the result feed through.
        latest_sec: When the last of them joins at the latest.

    Attributes:
        options: As above.
        members: The workers, once there was a front.
        whole: Everything that happened: on the front, on the workers and between them.
        front: What happened on the front, and between it and its callers.
        workers: The running front's view of the workers; ``None`` while no front runs.
    """

    def __init__(
        self,
        count: int,
        *,
        options: ServerOptions,
        max_queue_depth: int | None,
        level: FaultLevel,
        draw: random.Random,
        feed: bool = True,
        latest_sec: float = _LATEST_SEC,
    ) -> None:
        self.options = options
        self.members: list[SimulatedWorker] = []
        self.whole = Trace()
        self.front = self.whole
        self.workers: Workers | None = None
        self._count = count
        self._max_queue_depth = max_queue_depth
        self._level = level
        self._draw = draw
        self._feed = feed
        self._latest_sec = latest_sec
        self._fronts = 0
        self._nursery: trio.Nursery | None = None

    # --- the front ----------------------------------------------------------------------------

    def backend(self, trace: Trace) -> PoolBackend:
        """Make the backend of a new process of the front."""
        if not self.members:
            self.front = trace
            self.whole = trace.whole = Trace(started=trace.started)
            self.members = [self._make(number) for number in range(1, self._count + 1)]
        self._fronts += 1
        backend = PoolBackend(self, max_queue_depth=self._max_queue_depth)
        backend._make_client = partial(self._client, self._fronts)  # noqa: SLF001
        backend._queue = _RecordedQueue(trace, self._fronts)  # noqa: SLF001
        return backend

    def _make(self, number: int) -> SimulatedWorker:
        name = str(number)
        trace = Trace(started=self.whole.started, whole=self.whole, worker=name)
        server = server_of(trace, self.options)
        plan = RandomFaults(self._level, random.Random(self._draw.random()))  # noqa: S311
        transport = SimulatedTransport(server, plan, trace)
        transport.memory.numbers = itertools.count(number * _FIRST_NUMBER)
        if self._feed:
            transport = transport.with_feed()
        joins_at = self._draw.choice((0.0, self._draw.uniform(0, self._latest_sec)))
        address = WorkerAddress(name, f"http://worker-{name}.invalid")
        return SimulatedWorker(address, trace, server, transport, joins_at if number > 1 else 0.0)

    def _client(self, front: int, address: WorkerAddress) -> RolloutClient:
        (worker,) = (each for each in self.members if each.address == address)
        http = httpx.AsyncClient(transport=worker.transport.of_another_client(front))
        http._cookies = NoCookies()  # noqa: SLF001
        return RolloutClient(url=address.url, http_client=http)

    async def run(self, workers: Workers) -> None:
        """Have the workers join a new front."""
        async with trio.open_nursery() as nursery:
            self.workers, self._nursery = workers, nursery
            for worker in self.members:
                worker.member = None
                nursery.start_soon(self._join, worker, workers)
            try:
                await trio.sleep_forever()
            finally:
                self.workers = self._nursery = None

    async def _join(self, worker: SimulatedWorker, workers: Workers) -> None:
        await trio.sleep_until(self.whole.started + worker.joins_at)
        worker.member = workers.join(worker.address)

    # --- the workers --------------------------------------------------------------------------

    async def serve(self) -> None:
        """Run the servers of the workers until cancelled."""
        async with trio.open_nursery() as nursery:
            for worker in self.members:
                nursery.start_soon(worker.server.run)

    def stop(self) -> None:
        """Make the workers unreachable for good, before `serve` is cancelled."""
        for worker in self.members:
            if worker.server.app is not None:
                worker.trace.add("world", "server-down", process=worker.server.number)
                worker.server.vanish()

    async def trouble(self, draw: random.Random, *, times: int, horizon_sec: float) -> None:
        """Kill workers, cut them off, or drain them, so many times within some seconds."""
        moments = sorted(draw.uniform(0, horizon_sec) for _ in range(times))
        async with trio.open_nursery() as nursery:
            for moment in moments:
                await trio.sleep_until(self.whole.started + moment)
                own = random.Random(draw.random())  # noqa: S311 - simulation, no secrets
                act = draw.choice((self._kill, self._kill, self._cut, self._drain))
                nursery.start_soon(act, draw.choice(self.members), own)

    async def _kill(self, worker: SimulatedWorker, draw: random.Random) -> None:
        down_sec = round(draw.random() ** 2 * _LONGEST_AWAY_SEC, 3)
        kill = partial(
            self.kill, worker, down_sec, draw.random() < _POWER_CUTS, draw.random() < _WATCHED
        )
        moments = COMMIT_MOMENTS if self.options.durable else ()
        await kill_at_some_moment(worker.server, draw.choice(("any-step", *moments)), draw, kill)

    def kill(
        self,
        worker: SimulatedWorker,
        down_sec: float,
        power_cut: bool = False,
        watched: bool = False,
    ) -> None:
        """Kill the process of a worker; another one is up after a while.

        Args:
            worker: Which worker.
            down_sec: How long that takes, in seconds.
            power_cut: Whether the power of its machine is cut.
            watched: Whether the source of the workers learns of it at once, and has the worker
                join again; otherwise the front finds out.
        """
        worker.server.crash(down_sec=down_sec, power_cut=power_cut)
        workers, member = self.workers, worker.member
        if watched and workers is not None and member is not None:
            workers.lose(member, "its process has ended")
            worker.member = workers.join(worker.address)

    async def _cut(self, worker: SimulatedWorker, draw: random.Random) -> None:
        await self.cut(worker, round(draw.random() ** 2 * LONGEST_CUT_SEC, 3))

    async def cut(self, worker: SimulatedWorker, seconds: float) -> None:
        """Let nothing through between a worker and the front for a while."""
        worker.trace.add("world", "cut-off", seconds=seconds)
        worker.transport.link.cut()
        await trio.sleep(seconds)
        worker.transport.link.heal()

    async def _drain(self, worker: SimulatedWorker, draw: random.Random) -> None:
        away_sec = round(draw.random() ** 2 * _LONGEST_AWAY_SEC, 3)
        if self._nursery is not None and self.workers is not None and worker.member is not None:
            args = worker, worker.member, self.workers, away_sec
            self._nursery.start_soon(self._leave, *args)  # the front may die meanwhile
        await trio.lowlevel.checkpoint()

    async def _leave(
        self, worker: SimulatedWorker, member: Worker, workers: Workers, away_sec: float
    ) -> None:
        worker.trace.add("world", "drained")
        workers.drain(member)
        await workers.drained(member)
        if not member.draining:
            return  # it has joined again
        workers.lose(member, "it was drained")
        worker.server.crash(down_sec=away_sec)
        await trio.sleep(away_sec)
        worker.member = workers.join(worker.address)

    def pause(self, world: SimulatedWorld, seconds: float) -> None:
        """Stop every process for a while, those of the workers too."""
        world.pause(seconds)
        (paused,) = self.front.select("paused")[-1:]
        for worker in self.members:
            worker.trace.events.append(paused)

    # --- the end ------------------------------------------------------------------------------

    async def settle(self, world: SimulatedWorld, limit_sec: float) -> None:
        """Wait until nothing holds a place any more, and record what still does.

        Args:
            world: The world with the front.
            limit_sec: How long to wait at most, in seconds.
        """
        until = trio.current_time() + limit_sec
        while any(self._held(world)) and trio.current_time() < until:  # noqa: ASYNC110 - for good
            await trio.sleep(_SETTLE_SEC)
        for trace, held in zip(self._traces(), self._held(world), strict=True):
            trace.add("world", "places", held=held)

    def _traces(self) -> list[Trace]:
        return [self.front, *(worker.trace for worker in self.members)]

    def _held(self, world: SimulatedWorld) -> list[list[str]]:
        """Return what holds a place at the front, and on each worker."""
        front: list[str] = []
        app = world.server.app
        if app is not None and isinstance(app.backend, PoolBackend):
            runs = app.backend._queue.runs  # noqa: SLF001
            front = [
                *app.backend._rollouts,  # noqa: SLF001
                *(f"run {name}" for name, counts in runs.items() if any(counts)),
                *(f"worker {each.name}" for each in self.workers or () if each.in_flight),
            ]
        backends: list[Any] = [each.server.app and each.server.app.backend for each in self.members]
        return [front, *(list(backend.executions) if backend else [] for backend in backends)]


async def kill_at_some_moment(
    server: SimulatedServer, when: str, draw: random.Random, kill: Callable[[], None]
) -> None:
    """Kill a server at some step of the tasks, or when a commit has come that far."""
    if when not in COMMIT_MOMENTS:
        for _ in range(draw.randrange(_MOST_STEPS)):
            await trio.lowlevel.checkpoint()
        kill()
        return

    def reached(moment: str) -> None:
        if moment == when:
            server.disk.on_moment = None
            kill()

    server.disk.on_moment = reached
    await trio.lowlevel.checkpoint()
