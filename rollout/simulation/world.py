"""A world in which clients, a network with faults, and a server live in simulated time."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import trio
from attrs import define, field
from attrs.validators import in_

from rollout._checks import check_flag, check_number, check_whole, setting
from rollout.backend.base import ExecutionBackend
from rollout.client import RolloutClient
from rollout.server import RolloutServer, ShutdownBudget, create_rollout_server
from rollout.server.entry import Entry
from rollout.server.state import DURABILITIES, Durability
from rollout.simulation.determinism import current_mock_clock
from rollout.simulation.faults import FaultLevel, FaultPlan, RandomFaults, level_of
from rollout.simulation.network import SimulatedTransport
from rollout.simulation.server import SimulatedServer
from rollout.simulation.store import Disk, SimulatedStore
from rollout.simulation.trace import Trace
from rollout.simulation.workload import simulated_backend

__all__ = ["NoCookies", "ServerOptions", "SimulatedWorld", "server_of", "simulated_world"]

SIMULATED_EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
_TICKS_PER_LEASE = 30
_STEP_SEC = 1e-9
"""How much time passes with each step of the server: enough for order, too little for checks."""

URL = "http://rollout.invalid"

_places = setting(check_whole, none=True)
_above_zero = setting(check_number, above=0)


@define(kw_only=True)
class ServerOptions:
    """How the simulated server is set up.

    Attributes:
        max_concurrent: Slots of the backend; ``None`` for no limit.
        max_queue_depth: How many rollouts may wait for one; ``None`` for no bound.
        max_graders: How many graders run at a time; ``None`` for no limit but the slots.
        result_wait_timeout_sec: As for `create_rollout_server`.
        polling_lease_timeout_sec: As for `create_rollout_server`.
        result_retention_sec: As for `create_rollout_server`.
        shutdown: The budget of the staged shutdown.
        durable: Whether it has a state, which outlives its processes.
        durability: What that survives; see `rollout.server.create_rollout_server`.
    """

    max_concurrent: int | None = field(default=4, validator=_places)
    max_queue_depth: int | None = field(default=None, validator=_places)
    max_graders: int | None = field(default=None, validator=_places)
    result_wait_timeout_sec: float = field(default=30.0, validator=_above_zero)
    polling_lease_timeout_sec: float = field(default=120.0, validator=_above_zero)
    result_retention_sec: float = field(default=900.0, validator=setting(check_number, least=0))
    shutdown: ShutdownBudget = field(factory=ShutdownBudget)
    durable: bool = field(default=False, validator=setting(check_flag))
    durability: Durability = field(default="process", validator=in_(DURABILITIES))


class NoCookies(httpx.Cookies):
    """Cookies of a client whose server sets none: looking for them in each answer takes long."""

    def extract_cookies(self, response: httpx.Response) -> None:
        """Leave the answer unread."""


@define(eq=False)
class SimulatedWorld:
    """The world of a scenario: a server, clients that reach it through faults, and the trace.

    Attributes:
        seed: Where every draw comes from.
        generator: For the scenario's own draws.
        trace: What has happened so far.
        server: The simulated server.
        options: How it is set up.
        url: Its URL, as the world's clients know it.
    """

    seed: int
    generator: random.Random
    trace: Trace
    server: SimulatedServer
    plan: FaultPlan
    options: ServerOptions
    transport: SimulatedTransport = field(init=False)
    url: str = URL

    def __attrs_post_init__(self) -> None:
        self.transport = SimulatedTransport(self.server, self.plan, self.trace)

    @asynccontextmanager
    async def client(
        self,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        feed: bool = False,
        **options: Any,
    ) -> AsyncGenerator[RolloutClient, None]:
        """Enter a `RolloutClient` whose requests go through the simulated network.

        Args:
            transport: Another way to the server than `SimulatedWorld.transport`.
            feed: Whether that transport lets batches and the result feed through; another one
                does as it does.
            options: As for `RolloutClient`, without ``url`` and ``http_client``.
        """
        default = self.transport.with_feed() if feed else self.transport
        http = httpx.AsyncClient(transport=transport or default)
        if isinstance(http._transport, SimulatedTransport):  # noqa: SLF001
            http._cookies = NoCookies()  # noqa: SLF001
        async with (
            http,
            RolloutClient(url=self.url, http_client=http, **options) as client,
        ):
            yield client

    async def sleep(self, seconds: float) -> None:
        """Let simulated time pass."""
        await trio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        """Stop every process for a while: time passes, and nobody notices until it is over."""
        check_number("seconds", seconds, least=0)
        seconds = round(seconds, 3)
        self.trace.add("world", "paused", seconds=seconds)
        current_mock_clock().jump(seconds)

    def restart_server(self, *, down_sec: float = 1.0, power_cut: bool = False) -> None:
        """Kill the server process, and start a new one after a while.

        Its memory is lost. With `ServerOptions.durable`, what it had committed is kept; a power
        cut takes back the last commits, unless the durability is ``power``.

        Args:
            down_sec: How long it takes until the new one is up, in seconds.
            power_cut: Whether the power of its machine is cut.
        """
        check_number("down_sec", down_sec, least=0)
        self.server.crash(down_sec=down_sec, power_cut=power_cut)


def _observe(trace: Trace, process: Callable[[], int]) -> Callable[[str, Entry], None]:
    clock = current_mock_clock()

    def observer(what: str, entry: Entry) -> None:
        record = entry.record
        detail: dict[str, Any] = {"process": process(), "status": str(record.status)}
        if what == "finished" and record.result is not None:
            category = record.result.err_category
            detail["category"] = None if category is None else str(category)
            if record.result.err_source is not None:
                detail["source"] = record.result.err_source
        if what == "agent-started":
            detail["at"] = str(record.agent_started_at)
        trace.add("server", what, entry.rollout_id, **detail)
        clock.jump(_STEP_SEC)

    return observer


def server_of(
    trace: Trace,
    options: ServerOptions,
    backend: Callable[[Trace], ExecutionBackend] | None = None,
) -> SimulatedServer:
    """Make a server that records in a trace; nothing of it runs yet.

    Args:
        trace: Where to record.
        options: How it is set up.
        backend: Makes the execution backend of each of its processes; by default one whose
            rollouts do as their `RolloutPlan` says.
    """

    def build() -> RolloutServer:
        number = server.number + 1
        made = (
            backend(trace)
            if backend is not None
            else simulated_backend(
                trace,
                process=number,
                max_concurrent=options.max_concurrent,
                max_queue_depth=options.max_queue_depth,
                max_graders=options.max_graders,
            )
        )
        app = create_rollout_server(
            backend=made,
            configure_logging=False,
            result_wait_timeout_sec=options.result_wait_timeout_sec,
            polling_lease_timeout_sec=options.polling_lease_timeout_sec,
            result_retention_sec=options.result_retention_sec,
            watchdog_sec=None,
        )
        app.shutdown_stages.budget = options.shutdown
        if options.durable:
            app.registry.store = SimulatedStore(disk)
        # Here nothing but a pause of everything keeps the server from serving, and every tick
        # costs a step of the simulation.
        lease = options.polling_lease_timeout_sec
        app.registry._clock.tick_sec = lease / _TICKS_PER_LEASE  # noqa: SLF001
        app.registry.hooks.wall_clock = lambda: (
            SIMULATED_EPOCH + timedelta(seconds=trio.current_time() - trace.started)
        )
        app.registry.hooks.observers.append(_observe(trace, lambda: number))
        return app

    disk = Disk(trace, synced=options.durability == "power")
    server = SimulatedServer(build, trace, disk)
    return server


@asynccontextmanager
async def simulated_world(
    seed: int,
    *,
    faults: str | FaultLevel | FaultPlan = "mild",
    options: ServerOptions | None = None,
    backend: Callable[[Trace], ExecutionBackend] | None = None,
) -> AsyncGenerator[SimulatedWorld, None]:
    """Make a world for the length of the block; runs under `deterministic_run`.

    At the end of the block the server is shut down in stages.

    Args:
        seed: Where every draw comes from.
        faults: The name of a level, a level, or a plan.
        options: How the server is set up.
        backend: Makes the execution backend of each server process, given the trace; by
            default one whose rollouts do as their `RolloutPlan` says.
    """
    options = options or ServerOptions()
    generator = random.Random(seed)  # noqa: S311 - simulation, no secrets
    trace = Trace(started=trio.current_time())
    server = server_of(trace, options, backend)
    plan = _plan(faults, generator)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        try:
            yield SimulatedWorld(seed, generator, trace, server, plan, options)
        finally:
            server.stop()


def _plan(faults: str | FaultLevel | FaultPlan, generator: random.Random) -> FaultPlan:
    if isinstance(faults, (str, FaultLevel)):
        return RandomFaults(level_of(faults), generator)
    if not callable(getattr(faults, "fate", None)) or isinstance(faults, type):
        raise TypeError(f"faults must be a name, a FaultLevel or a plan, not {faults!r}")
    return faults
