"""Where workers come from, and which of them a pool has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import trio

from rollout._logs import get_logger
from rollout._telemetry.counts import numbers
from rollout._version import package_version
from rollout.client.client import RolloutClient
from rollout.errors import RolloutServerError
from rollout.pool.worker import WantedPolicy, Worker, WorkerAddress
from rollout.types import ADMISSION_KEYS, CONFIRMED_START

__all__ = ["WorkerSource", "Workers"]

logger = get_logger(__name__)


class WorkerSource(ABC):
    """Starts or finds the workers of a pool while the pool serves."""

    @abstractmethod
    async def run(self, workers: Workers) -> None:
        """Have workers join and leave; called once, and cancelled when the pool ends.

        It may return before. An exception ends the server, so a failure that may pass is
        for the source to survive.
        """

    def health(self) -> dict[str, Any]:
        """Return what the health of the pool says beside its workers, JSON types only."""
        return {}

    async def shutdown(self) -> None:
        """End the workers that it has started; called once no rollout is left.

        Cancelled when the backend's stage of the shutdown is over; `run` is cancelled then, too.
        """
        await trio.lowlevel.checkpoint()


class Workers:
    """The workers of a pool, for the source that has them join and leave.

    Iterating gives those that are not lost.

    Args:
        nursery: Where their tasks run.
        make_client: Makes the client of a worker.
        count_queued: Says how many rollouts wait for a worker.
        on_change: Called whenever a worker may have more room, or less.

    Attributes:
        application: What the workers serve: that of the first that is up. A worker that serves
            something else is refused while one of them is.
        wanted_policy: The state of the policy that the workers are to have.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        make_client: Callable[[WorkerAddress], RolloutClient],
        count_queued: Callable[[], int],
        on_change: Callable[[], None],
    ) -> None:
        self.application: str | None = None
        self.wanted_policy = WantedPolicy()
        self._nursery = nursery
        self._make_client = make_client
        self._count_queued = count_queued
        self._on_change = on_change
        self._workers: dict[str, Worker] = {}
        self._counts: dict[str, Mapping[str, float]] = {}
        self._changed: trio.Event | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    # --- for sources --------------------------------------------------------------------------

    def join(self, address: WorkerAddress) -> Worker:
        """Add a worker; it gets rollouts once it has answered.

        One that is there under the same name and URL already is returned, and is drained no
        longer.

        Raises:
            RolloutServerError: The name is that of another worker.
        """
        worker = self._workers.get(address.name)
        if worker is not None:
            if worker.address != address:
                raise RolloutServerError(f"two workers of the pool are called {address.name}")
            worker.drain(draining=False)
            return worker
        worker = Worker(address, self._make_client(address), self)
        self._workers[address.name] = worker
        self._nursery.start_soon(worker.run, name=f"worker {address.name}")
        self.notify()
        return worker

    def drain(self, worker: Worker) -> None:
        """Give a worker nothing new; what it has goes on."""
        if not worker.draining:
            logger.info("worker %s: it gets nothing new (%d left)", worker.name, worker.in_flight)
            worker.drain()

    async def drained(self, worker: Worker) -> None:
        """Return once a worker has no rollout left, or is lost. Cancelling this changes nothing.

        Its counts are then read once more, since it may be gone before the next look at them.
        """
        while worker.in_flight and worker.lost is None:
            await self.changed.wait()
        if worker.trouble is None and worker.lost is None:
            await worker.look()
        await trio.lowlevel.checkpoint()

    def lose(self, worker: Worker, reason: str) -> None:
        """Remove a worker that is gone for certain, or has been drained.

        What it had goes elsewhere if its agent had not started, and ends as a failure if it had.

        Args:
            worker: The worker.
            reason: Why it is gone, to go after "lost: ".
        """
        if self._workers.get(worker.name) is not worker:
            return
        del self._workers[worker.name]
        if worker.in_flight or not worker.draining:
            logger.warning(
                "worker %s is lost: %s (%d rollouts)", worker.name, reason, worker.in_flight
            )
        worker.lose(reason)

    @property
    def queued(self) -> int:
        """How many rollouts wait for a worker."""
        return self._count_queued()

    @property
    def in_flight(self) -> int:
        """How many rollouts the workers have."""
        return sum(worker.in_flight for worker in self)

    @property
    def changed(self) -> trio.Event:
        """An event that is set, and replaced, when the queue or a worker has changed."""
        if self._changed is None:
            self._changed = trio.Event()
        return self._changed

    # --- for workers and the pool -------------------------------------------------------------

    def count(self, process_id: str, counts: Mapping[str, float]) -> None:
        """Take what the process of a worker has counted since it started."""
        self._counts[process_id] = numbers(counts)

    @property
    def counts(self) -> dict[str, float]:
        """What all processes have counted that have been workers so far."""
        total: Counter[str] = Counter()
        for counts in self._counts.values():
            total.update(counts)
        return dict(total)

    def check(self, worker: Worker, health: dict[str, Any]) -> str | None:
        """Return why a worker with this health cannot be used; ``None`` if it can."""
        extensions = health.get("extensions")
        for needed in (CONFIRMED_START, ADMISSION_KEYS):
            if not isinstance(extensions, list) or needed not in extensions:
                return f"it does not announce {needed}: is it a server of this version?"
        own = package_version()
        if health.get("version") != own:
            return f"it runs version {health.get('version')} of trio-rollout, not {own}"
        process_id = health.get("process_id")
        for other in self:
            if other is not worker and other.process_id == process_id and other.refusal is None:
                return f"it is the same server as worker {other.name}"
        application = health.get("application")
        if application is None and not worker.slots:
            return None  # a front whose workers are not up yet
        if any(other is not worker and other.capacity for other in self):
            if application != self.application:
                return f"it serves {application}, and the other workers {self.application}"
        else:
            self.application = application if isinstance(application, str) else None
        return None

    def want_policy(self, wanted: WantedPolicy) -> None:
        """Have all workers take a state; those without it get no rollouts."""
        self.wanted_policy = wanted
        for worker in self:
            worker.wake_policy()

    def notify(self) -> None:
        """Hand out what waits, and wake who follows the queue."""
        self._on_change()
        self.wake()

    def wake(self) -> None:
        """Wake who follows the queue."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
