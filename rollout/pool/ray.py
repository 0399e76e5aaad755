"""Workers on a Ray cluster: an actor each, whose process serves the application.

Theory of operation: Ray places the actors, and says when one is lost; no rollout is a call of Ray.
Each worker has a task that creates its actor, has it join the pool once it listens, and waits for
its end. All calls of Ray are made in one thread that lives as long as the pool: they may block, and
a cluster that this process has started ends with the thread that started it. What a call refers to
comes as a future, whose callback wakes the task. `Starts` decides when an actor that has ended is
created again, `Scaling` how many there are.
"""

from __future__ import annotations

import importlib
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio
from attrs import define, field

from rollout._checks import backend_settings, check_number, check_whole
from rollout._files.atomic import reason_of
from rollout._logs import get_logger, printable
from rollout._tasks import background_tasks, sole_error
from rollout.backend.failures import wants_tracebacks
from rollout.errors import BackendConfigurationError, InvalidFieldError, RolloutServerError
from rollout.pool.local import Starts, after_end, until_silent
from rollout.pool.scaling import Scaling
from rollout.pool.source import Workers, WorkerSource
from rollout.pool.worker import Worker, WorkerAddress

__all__ = ["RayPool"]

logger = get_logger(__name__)

_STORE_BYTES = 80 * 2**20
"""The object store of a cluster that is started here; workers put nothing there."""

_REACH_SEC = 5.0
_CONNECT_SEC = 60.0
"""How long Ray may take to connect; a cluster that is started here takes 5 to 15 seconds."""

_STOP_SEC = 5.0
"""How long actors may take to end where no stage of a shutdown says it."""

_LOOK_SEC = 1.0
_PLACE_SEC = 30.0
_WAIT_SEC = 60.0
"""How long one call waits for the end of a worker, which frees what a lost call holds."""

_CALLS = 8
"""How many calls an actor answers at a time."""

_KEY_BYTES = 32
_LONGEST_REASON = 300
_STARTED_HERE = ("auto", "local")


class RayPool(WorkerSource):
    """Workers that are actors of a Ray cluster, created and watched by the pool.

    Each actor serves the application in a thread, on its node's address and a free port, with a key
    of the pool's. Actors are spread over the nodes. One that is lost is created again, after a
    delay that grows with each end in a row.

    Args:
        app: What they serve: ``MODULE:APP`` or ``FILE.py:APP``, as the processes on the nodes find
            it. Without a ``working_dir`` in *runtime_env*, the path of a ``FILE.py`` is that on
            this machine, so it has to be the same on the nodes.
        address: ``host:port`` of a cluster that this machine is a node of, ``ray://host:port`` of
            any other, ``local`` for one that this process starts and ends, ``auto`` for the one
            that this machine is a node of, else a local one. A process that is connected to a
            cluster already stays with that one.
        workers: How many there are at least.
        max_workers: How many there are at most; ``None`` for as many as *workers*. In between, the
            number follows the rollouts that the pool has.
        idle_sec: For how long fewer workers must have sufficed before one is drained and ended.
        worker_resources: What one worker takes of a node, as Ray names it: ``CPU`` (1 if it is not
            given), ``GPU``, ``memory``, and resources of the cluster's own.
        runtime_env: The runtime environment of the workers, as Ray takes it.
        silence_sec: A worker that has not answered for so long is killed and created again.

    Raises:
        BackendConfigurationError: One of these cannot be used, or Ray is not installed.

    The pool ends with a `rollout.errors.RolloutServerError` if the cluster cannot be reached, or
    if no worker comes up. When it ends, in whatever way, its actors are killed.
    """

    def __init__(
        self,
        app: str,
        address: str = "auto",
        *,
        workers: int = 1,
        max_workers: int | None = None,
        idle_sec: float = 60.0,
        worker_resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        silence_sec: float = 120.0,
    ) -> None:
        with backend_settings():
            self._env = _mapping("runtime_env", runtime_env)
            self._app = _app(app, move="working_dir" in self._env)
            check_whole("workers", workers, least=0)
            check_whole("max_workers", max_workers, least=max(workers, 1), none=workers > 0)
            check_number("idle_sec", idle_sec, above=0)
            check_number("silence_sec", silence_sec, above=0)
            self._endpoint = _endpoint(address)
            self._resources = _resources(worker_resources)
        self._address = address
        self._silence_sec = silence_sec
        self._ray = _import_ray()
        self._scaling = Scaling(workers, max_workers or workers, idle_sec)
        self._key = secrets.token_urlsafe(_KEY_BYTES)
        self._caller = _Caller()
        self._slots: dict[str, _Slot] = {}
        self._capacity = float("inf")
        self._connected = False
        self._connected_here = False
        self._was_up = False
        self._closing = trio.Event()
        self._over: trio.Event | None = None

    def health(self) -> dict[str, Any]:
        """Return the actors, and how often they were created again."""
        return {
            "restarts": sum(slot.starts.restarts for slot in self._slots.values()),
            "actors": [slot.health() for slot in self._slots.values()],
        }

    async def run(self, workers: Workers) -> None:
        """Keep the actors until `shutdown`; cancelling this kills them.

        Raises:
            RolloutServerError: The cluster cannot be reached, or no worker comes up.
        """
        self._over = trio.Event()
        self._caller.start()
        try:
            await self._connect()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow_load, workers, nursery)
        finally:
            # Calls are made in turn, so this one comes after whatever was begun.
            ended = self._caller.post(self._disconnect)
            self._caller.close()
            with trio.move_on_after(_STOP_SEC, shield=True):
                await _result(ended)
            self._over.set()

    async def shutdown(self) -> None:
        """Shut the workers down, and wait for their ends."""
        self._closing.set()
        for slot in list(self._slots.values()):
            self._stop(slot)
        if self._over is not None and self._connected:
            await self._over.wait()

    # --- the cluster --------------------------------------------------------------------------

    async def _connect(self) -> None:
        if self._endpoint is not None:
            await _reach(self._address, *self._endpoint)
        try:
            with trio.fail_after(_CONNECT_SEC):
                started = await self._caller.call(self._init)
        except trio.TooSlowError:
            raise RolloutServerError(
                f"Ray at {self._address} has not answered for {_CONNECT_SEC:g} s: "
                "is it the address of a cluster, and of this version of Ray?"
            ) from None
        except Exception as error:
            hint = "; a cluster with authentication wants RAY_AUTH_MODE=token, and its token"
            raise RolloutServerError(
                f"Ray at {self._address} cannot be used: {_reason(error)}"
                f"{hint if self._address.startswith('ray:') else ''}"
            ) from error
        self._connected = True
        logger.info("Ray: %s", started)

    def _init(self) -> str:
        ray = self._ray
        if ray.is_initialized():
            return "the workers run on the cluster that this process is connected to"
        options: dict[str, Any] = {"logging_level": "error", "runtime_env": self._env or None}
        self._connected_here = True
        if self._address != "local":
            try:
                ray.init(address=self._address, **options)
            except ConnectionError:
                if self._address != "auto":
                    raise
            else:
                where = self._address if self._endpoint else "that this machine is a node of"
                return f"the workers run on the cluster {where}"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **options
        )
        return "the workers run on a cluster that this process has started on this machine"

    def _disconnect(self) -> None:
        for slot in list(self._slots.values()):
            self._kill(slot)
        if self._connected_here:
            self._ray.shutdown()

    # --- the number of workers ----------------------------------------------------------------

    async def _follow_load(self, workers: Workers, nursery: trio.Nursery) -> None:
        while not self._closing.is_set():
            self._scale(workers, nursery)
            with trio.move_on_after(_LOOK_SEC):
                await self._closing.wait()

    def _scale(self, workers: Workers, nursery: trio.Nursery) -> None:
        up = [worker.capacity for worker in workers if worker.status == "up"]
        self._capacity = max(up, default=self._capacity)
        staying = [slot for slot in self._slots.values() if not slot.leaving]
        wanted = self._scaling.wanted(
            trio.current_time(),
            current=len(staying),
            load=workers.queued + workers.in_flight,
            capacity=self._capacity,
        )
        for _ in range(wanted - len(staying)):
            self._add(workers, nursery)
        for slot in sorted(staying, key=_Slot.in_flight)[: max(len(staying) - wanted, 0)]:
            self._remove(slot, workers, nursery)

    def _add(self, workers: Workers, nursery: trio.Nursery) -> None:
        for slot in self._slots.values():
            if slot.leaving and slot.worker is not None and not slot.stopping:
                slot.leaving = False
                workers.join(slot.worker.address)
                return
        name = next(str(n) for n in range(1, len(self._slots) + 2) if str(n) not in self._slots)
        slot = self._slots[name] = _Slot(name)
        nursery.start_soon(self._keep, slot, workers)

    def _remove(self, slot: _Slot, workers: Workers, nursery: trio.Nursery) -> None:
        slot.leaving = True
        if slot.worker is None:
            self._stop(slot)
        else:
            workers.drain(slot.worker)
            nursery.start_soon(self._remove_drained, slot, slot.worker, workers)

    async def _remove_drained(self, slot: _Slot, worker: Worker, workers: Workers) -> None:
        await workers.drained(worker)
        if slot.leaving:
            logger.info("worker %s is not needed any more", slot.name)
            self._stop(slot)

    def _stop(self, slot: _Slot) -> None:
        """Shut a worker down; one that does not serve is killed."""
        slot.stopping = True
        if slot.worker is None:
            slot.scope.cancel()
        else:
            self._caller.post(self._ask_to_stop, slot)

    def _ask_to_stop(self, slot: _Slot) -> None:
        if slot.actor is not None:  # it may have been killed meanwhile
            slot.actor.stop.remote()

    # --- actors -------------------------------------------------------------------------------

    async def _keep(self, slot: _Slot, workers: Workers) -> None:
        """Create the actor of a worker, again and again."""
        try:
            with slot.scope:
                while not slot.stopping:
                    reason = await self._run(slot, workers)
                    if not slot.stopping:
                        await self._wait_to_start(slot, reason)
        finally:
            self._caller.post(self._kill, slot)
            del self._slots[slot.name]

    async def _wait_to_start(self, slot: _Slot, reason: str) -> None:
        everyone = [each.starts for each in self._slots.values()]
        delay_sec = after_end(
            slot.name, slot.starts, everyone, end=reason, reason=reason, was_up=self._was_up
        )
        if delay_sec is None:
            raise RolloutServerError(
                f"no worker comes up on Ray; the last of {slot.starts.failed} starts of worker "
                f"{slot.name} failed: {reason}"
            )
        await trio.sleep(delay_sec)

    async def _run(self, slot: _Slot, workers: Workers) -> str:
        """Run an actor to its end; return how it ended."""
        worker: Worker | None = None
        try:
            async with background_tasks(partial(_say_that_it_waits, slot.name, self._resources)):
                url, error = await self._start(slot)
            if url is None:
                return error or "it has shut down while it started"
            slot.starts.listening(trio.current_time())
            self._was_up = True
            worker = slot.worker = workers.join(WorkerAddress(slot.name, url, self._key))
            async with background_tasks(partial(self._watch, slot, worker)):
                reason = await self._wait(slot)
        except Exception as raised:  # noqa: BLE001 - of Ray, which raises what it likes
            reason = slot.killed_because or _reason(raised)
        finally:
            slot.worker = slot.killed_because = None
            self._caller.post(self._kill, slot)
        if worker is not None:
            if slot.stopping:
                worker.drain()
            workers.lose(worker, reason)
        return reason

    async def _start(self, slot: _Slot) -> tuple[str | None, str | None]:
        asked = await self._caller.call(self._create, slot, wants_tracebacks())
        started: tuple[str | None, str | None] = await _result(asked)
        return started

    def _create(self, slot: _Slot, tracebacks: bool) -> Future[Any]:
        actor_class = self._ray.remote(RolloutWorker).options(
            max_concurrency=_CALLS,
            scheduling_strategy="SPREAD",
            **self._resources,
            **({} if self._connected_here or not self._env else {"runtime_env": self._env}),
        )
        slot.actor = actor_class.remote(f"worker {slot.name}")
        # Ray keeps the arguments of a constructor, and not those of a call: the key is secret.
        return _future(
            slot.actor.start.remote(self._app, self._key, self._scaling.most, tracebacks)
        )

    async def _wait(self, slot: _Slot) -> str:
        """Wait for the end of an actor that listens, however often Ray loses sight of it."""
        while True:
            asked = await self._caller.call(lambda: _future(slot.actor.wait.remote(_WAIT_SEC)))
            try:
                reason: str | None = await _result(asked)
            except self._ray.exceptions.ActorUnavailableError as error:
                logger.warning("worker %s: Ray: %s", slot.name, _reason(error))
                await trio.sleep(_LOOK_SEC)
            else:
                if reason is not None:
                    return reason

    async def _watch(self, slot: _Slot, worker: Worker) -> None:
        """Kill an actor that does not answer any more."""
        slot.killed_because = await until_silent(worker, self._silence_sec)
        await self._caller.call(self._kill, slot)

    def _kill(self, slot: _Slot) -> None:
        actor, slot.actor = slot.actor, None
        if actor is not None:
            with suppress(self._ray.exceptions.RayError, ConnectionError):  # it is gone already
                self._ray.kill(actor)


@define(eq=False)
class _Slot:
    """The place of one worker: an actor after the other.

    Attributes:
        name: The worker's name.
        starts: The record of its actors.
        scope: Ends it.
        actor: Ray's handle, for the thread that calls Ray alone.
        worker: The worker, while it serves.
        killed_because: Why the front has killed the actor, if it has.
        leaving: Whether it is drained, to end then.
        stopping: Whether it ends for good.
    """

    name: str
    starts: Starts = field(factory=Starts)
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    actor: Any = None
    worker: Worker | None = None
    killed_because: str | None = None
    leaving: bool = False
    stopping: bool = False

    def in_flight(self) -> int:
        """How many rollouts it has; less than none if it does not serve."""
        return -1 if self.worker is None else self.worker.in_flight

    def health(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": "starting" if self.worker is None else "listening",
            "restarts": self.starts.restarts,
            "last_end": self.starts.last_end,
        }


class RolloutWorker:
    """The class of the actors, by the name that Ray shows.

    Ray puts its `repr` before each line that it writes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._server: Any = None

    def __repr__(self) -> str:
        return self._name

    def start(
        self, app: str, key: str, workers: int, tracebacks: bool
    ) -> tuple[str | None, str | None]:
        """Serve; return the URL, or why that has failed."""
        host = importlib.import_module("ray.util").get_node_ip_address()
        bind = f"[{host}]:0" if ":" in host else f"{host}:0"
        # By name: this process is a worker, whose server and command line are above the pool.
        worker = importlib.import_module("rollout.cli.worker")
        self._server = worker.WorkerThread(app, key, bind, workers=workers, tracebacks=tracebacks)
        started: tuple[str | None, str | None] = self._server.start()
        return started

    def wait(self, timeout_sec: float) -> str | None:
        """Wait for the end; return why it ended, ``None`` if it has not yet."""
        reason: str | None = self._server.wait(timeout_sec)
        return reason

    def stop(self) -> None:
        """Shut down."""
        self._server.stop()


@define(eq=False)
class _Caller:
    """The thread that calls Ray."""

    _jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = field(
        factory=queue.SimpleQueue
    )

    def start(self) -> None:
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def close(self) -> None:
        """Have it end after the calls that it was given."""
        self._jobs.put(None)

    def post(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Make a call; calls are made one after the other, in the order in which they come."""
        future: Future[Any] = Future()
        self._jobs.put((future, partial(function, *args)))
        return future

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a call and wait for it; cancelled, it is made nevertheless."""
        return await _result(self.post(function, *args))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it comes out where it is waited for
                future.set_exception(error)


async def _result(future: Future[Any]) -> Any:
    """Wait for a future of another thread; cancelling this leaves it as it is."""
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def wake(_: object) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


def _future(reference: Any) -> Future[Any]:
    future: Future[Any] = reference.future()
    return future


async def _say_that_it_waits(name: str, resources: Mapping[str, Any]) -> None:
    await trio.sleep(_PLACE_SEC)
    logger.warning(
        "worker %s has not started for %g s: has the cluster room for %s?",
        name,
        _PLACE_SEC,
        resources,
    )
    await trio.sleep_forever()


async def _reach(address: str, host: str, port: int) -> None:
    """Check that something listens; Ray would try for minutes.

    Raises:
        RolloutServerError: Nothing does.
    """
    try:
        with trio.fail_after(_REACH_SEC):
            stream = await trio.open_tcp_stream(host, port)
    except trio.TooSlowError:
        reason = f"no answer within {_REACH_SEC:g} s"
    except OSError as error:
        cause = sole_error(error.__cause__ or error)  # several, if the name has several addresses
        number = cause.errno if isinstance(cause, OSError) else None
        reason = os.strerror(number) if number and number > 0 else reason_of(error)
    else:
        await stream.aclose()
        return
    raise RolloutServerError(f"Ray at {address} cannot be reached: {reason}")


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BackendConfigurationError(
            f'RayPool needs Ray: pip install "trio-rollout[ray]" ({error})'
        ) from error


def _endpoint(address: Any) -> tuple[str, int] | None:
    """Return host and port of an address; ``None`` for one without."""
    if address in _STARTED_HERE:
        return None
    problem = "must be auto, local, host:port or ray://host:port"
    if not isinstance(address, str):
        raise InvalidFieldError("address", problem, kind="type_error")
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        if parts.scheme in {"tcp", "ray"} and parts.hostname and parts.port and not parts.path:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise InvalidFieldError("address", f"{problem}, not {address!r}")


def _mapping(name: str, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidFieldError(name, "must be a mapping", kind="type_error")
    return dict(value)


def _resources(given: Any) -> dict[str, Any]:
    """Return the options of an actor that ask for these resources."""
    name = "worker_resources"
    own = {"CPU": 1, **_mapping(name, given)}
    for key, amount in own.items():
        if not isinstance(key, str) or not key:
            raise InvalidFieldError(name, "must have names of resources as keys")
        check_number(f"{name}[{key!r}]", amount, least=0)
    known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {known[key]: own.pop(key) for key in known if key in own}
    return {**options, "resources": own} if own else options


def _app(given: Any, *, move: bool) -> str:
    """Check a reference; the path of a ``FILE.py:APP`` becomes absolute unless the file moves."""
    if not isinstance(given, str) or not given:
        raise InvalidFieldError("app", "must be MODULE:APP or FILE.py:APP")
    name, colon, attribute = given.rpartition(":")
    if move or not name.endswith(".py"):
        return given
    return f"{Path(name).resolve()}{colon}{attribute}"


def _reason(error: BaseException) -> str:
    """Say in a line what Ray says in a page."""
    text = str(error).strip()
    _, dead, cause = text.rpartition("The actor is dead because ")
    if dead:
        return f"its actor is dead because {cause.partition('. ')[0].rstrip('.')}"
    line = text.partition("\n")[0] or type(error).__name__
    return printable(line[:_LONGEST_REASON])
