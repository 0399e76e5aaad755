"""``rollout serve MODULE:APP``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import trio

from rollout._files.atomic import reason_of
from rollout._logs import get_logger, printable
from rollout._tasks import sole_error
from rollout.backend.failures import describe_exception, summarized
from rollout.cli.failures import (
    EXIT_FAILED,
    EXIT_FORCED,
    EXIT_USAGE,
    CommandError,
    interrupted,
    last_place,
    run_async,
)
from rollout.cli.options import (
    FILE_PATH,
    host_of,
    json_object,
    json_option_with,
    log_as_json,
    log_format_option,
    processors,
    seconds,
    secret_from_env,
)
from rollout.cli.reference import load_app
from rollout.cli.remote import quiet_http
from rollout.cli.text import is_plain, one_line, print_json
from rollout.errors import BackendConfigurationError, InvalidFieldError, RolloutServerError
from rollout.gateway import ModelGateway, Upstream
from rollout.server import RolloutServer, ShutdownBudget, serve
from rollout.server.entry import Entry
from rollout.server.metrics import check_metrics
from rollout.server.registry import RolloutRegistry
from rollout.server.state import DURABILITIES, Durability, SQLiteStore

if TYPE_CHECKING:
    from rollout.pool import WorkerSource

__all__ = ["Activity", "LastResort", "command", "make_front", "summary"]

logger = get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_BUDGET = ShutdownBudget()
_LINES_SEC = 0.5
_COUNTS_SEC = 60.0
_KEY_HEAD_BYTES = 4096


def _budget_option(name: str, text: str) -> Callable[[F], F]:
    default = getattr(_BUDGET, name.replace("-", "_"))
    return click.option(f"--{name}", type=seconds, default=default, show_default=True, help=text)


def _worker_count(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """Read ``--workers``."""
    if value is None:
        return None
    if value == "auto":
        return max(processors() - 1, 1)
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise CommandError(f"--workers takes a number from 1, or auto, not {value!r}")
    return int(value)


@click.command()
@click.argument("app", metavar="MODULE:APP|FILE.py:APP")
@click.option(
    "--bind",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0 takes a free one. Also [IPV6]:PORT and unix:PATH.",
)
@click.option(
    "--certfile", type=FILE_PATH, metavar="FILE", help="Certificate chain (PEM), for TLS."
)
@click.option("--keyfile", type=FILE_PATH, metavar="FILE", help="Its private key (PEM).")
@click.option(
    "--keyfile-password-env",
    metavar="NAME",
    help="Environment variable that holds the password of the key.",
)
@click.option(
    "--ca-certs",
    type=FILE_PATH,
    metavar="FILE",
    help="Authorities (PEM); clients must present a certificate.",
)
@click.option(
    "--state",
    type=FILE_PATH,
    metavar="PATH",
    help="Keep admissions and results in this file, which a killed server leaves to the next one.",
)
@click.option(
    "--durability",
    type=click.Choice(DURABILITIES),
    help="What the state survives: any end of the process (the default), or a power cut too.",
)
@click.option(
    "--gateway",
    is_flag=True,
    help="Agents call their model through this server, which keeps the key and records the calls.",
)
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    metavar="URL",
    help="With --gateway: an endpoint of the model, in place of those that requests name; once for "
    "each.",
)
@click.option(
    "--upstream-key-env",
    metavar="NAME",
    help="With --upstream: the variable that holds the key of these endpoints.",
)
@click.option(
    "--max-calls-in-flight",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --gateway: the most calls in flight to each endpoint; the others wait.",
)
@click.option(
    "--metrics/--no-metrics",
    default=None,
    help="Serve GET /metrics for Prometheus; by default where prometheus-client is installed.",
)
@click.option(
    "--ui/--no-ui",
    default=None,
    help="Serve a page at /ui that shows the server; it asks for the key, if there is one. "
    "By default where --bind is an address of the loopback.",
)
@click.option(
    "--until-stdin-closes",
    is_flag=True,
    help="Shut down, too, when stdin ends: with the process that holds it open.",
)
@click.option(
    "--workers",
    metavar="N|auto",
    callback=_worker_count,
    help="Run the rollouts in N processes of this machine, which this one starts and watches; "
    "auto: one for each core less one. With --ray: in N actors of a cluster.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Where workers run: on the Ray cluster at host:port, if this machine is a node of it, or "
    "at ray://host:port; auto: on that of this machine, or one that is started; local: the latter.",
)
@click.option(
    "--max-workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --ray: as many workers as the rollouts need, from --workers up to N.",
)
@click.option(
    "--worker-resources",
    metavar="JSON",
    help='With --ray: what a worker takes of a node, as in \'{"CPU": 2, "GPU": 1}\'.',
)
@click.option(
    "--runtime-env",
    metavar="JSON",
    help='With --ray: Ray\'s runtime environment of the workers, as in \'{"working_dir": "."}\'.',
)
@click.option("--address-fd", type=click.IntRange(min=0), hidden=True)
@click.option(
    "--worker-of",
    type=click.IntRange(min=1),
    hidden=True,
    metavar="N",
    help="Serve a front of N workers, whose key stdin has.",
)
@click.option(
    "--quiet", "-q", is_flag=True, help="Do not say which rollouts come and how they end."
)
@click.option(
    "--verbose", "-v", is_flag=True, help="Log the tracebacks of agents and graders that fail."
)
@json_option_with("As --log-format json, and the line on stdout is an object.")
@log_format_option
@_budget_option("drain-sec", "Shutdown: time for rollouts to end by themselves.")
@_budget_option("cleanup-sec", "Shutdown: time for them to stop once they are asked to.")
@_budget_option("forced-sec", "Shutdown: time for them to stop once they are cancelled.")
@_budget_option("delivery-sec", "Shutdown: time for callers to fetch their results.")
@_budget_option("backend-sec", "Shutdown: time for the backend's own shutdown.")
def command(
    app: str,
    bind: str,
    certfile: str | None,
    keyfile: str | None,
    keyfile_password_env: str | None,
    ca_certs: str | None,
    state: str | None,
    durability: Durability | None,
    gateway: bool,
    upstreams: tuple[str, ...],
    upstream_key_env: str | None,
    max_calls_in_flight: int | None,
    metrics: bool | None,
    ui: bool | None,
    until_stdin_closes: bool,
    workers: int | None,
    ray: str | None,
    max_workers: int | None,
    worker_resources: str | None,
    runtime_env: str | None,
    address_fd: int | None,
    worker_of: int | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
    log_format: str,
    **budget: float,
) -> None:
    """Serve APP, which create_rollout_server made, until SIGTERM or SIGINT.

    APP may also be a function without arguments that returns the application. The current
    folder is importable, and so is the folder of FILE.py. Once the server accepts
    connections, one line on stdout says where. Rollouts that come and end get a line each on a
    terminal, as long as they are few; a log gets their numbers once a minute.

    A signal starts the staged shutdown: admissions are refused, callers still get their
    results, and the process exits with 0. A second signal skips the first stage. If
    executions do not even stop by force, the process ends all the same, with exit code 3.

    A server is one process, and agents written in Python fill its core. With --workers it only
    admits rollouts and hands them out; the lifespan and the rollouts run in the workers, each
    with the concurrency of the application.
    """
    worker = worker_of is not None
    if worker:
        _ignore_signals()
    if address_fd is not None:
        os.set_inheritable(address_fd, False)  # children of the application do not hold it open
    if not bind.startswith("unix:") or bind == "unix:":
        host_of(bind, forms="HOST:PORT, [IPV6]:PORT or unix:PATH")
    on_ray = {
        "max_workers": max_workers,
        "worker_resources": json_object("--worker-resources", worker_resources),
        "runtime_env": json_object("--runtime-env", runtime_env),
    }
    if ray is None and any(value is not None for value in on_ray.values()):
        raise CommandError("--max-workers, --worker-resources and --runtime-env go with --ray")
    password = secret_from_env("--keyfile-password-env", keyfile_password_env)
    if durability is not None and state is None:
        raise CommandError("--durability goes with --state")
    shutdown = _budget(budget)
    _check_encrypted(keyfile, password)
    stdin = _take_stdin() if until_stdin_closes or worker else None
    key = _read_line(stdin) if worker and stdin is not None else None
    json_logs = log_as_json(as_json) or log_format == "json"
    server = load_app(app)
    for_agents = _use_gateway(
        server, gateway, ray, upstreams, upstream_key_env, max_calls_in_flight, front=bool(workers)
    )
    _use_metrics(server, metrics)
    server.ui = server.ui if ui is None else ui
    if key is not None:
        server.become_worker(key, workers=worker_of or 1)
    if ray is not None:
        silence_sec = server.registry.polling_lease_timeout_sec
        _use_ray(server, app, ray, workers=workers or 1, silence_sec=silence_sec, **on_ray)
    elif workers is not None:
        _start_workers(
            server, app, workers, shutdown, for_agents, verbose=verbose, json_logs=json_logs
        )
    if state is not None:
        server.registry.store = SQLiteStore(state, durability or "process")
    quiet_http()
    start = partial(
        serve,
        server,
        bind=bind,
        certfile=certfile,
        keyfile=keyfile,
        keyfile_password=password,
        ca_certs=ca_certs,
        shutdown=shutdown,
        handle_signals=not worker,
    )
    with nullcontext() if verbose else summarized(summary):
        run_async(
            _serve, server, start, stdin, address_fd, quiet or worker, worker, json_logs, as_json
        )


def _use_metrics(server: RolloutServer, wanted: bool | None) -> None:
    """Have an application serve metrics, or not; ``None`` leaves it as it is."""
    if wanted is None:
        return
    try:
        server.serve_metrics(check_metrics(wanted))
    except InvalidFieldError as error:
        raise CommandError(f"--metrics: {error}") from error


def _use_gateway(
    server: RolloutServer,
    wanted: bool,
    ray: str | None,
    urls: Sequence[str],
    key_env: str | None,
    max_calls: int | None,
    *,
    front: bool,
) -> list[str]:
    """Give an application a model gateway if one is wanted and it has none.

    Returns:
        The same options for its workers.
    """
    if wanted and ray is not None:
        raise CommandError(
            "--gateway does not reach workers on Ray; give the application a gateway instead"
        )
    options = [f"--upstream={url}" for url in urls]
    if key_env is not None:
        if not urls:
            raise CommandError("--upstream-key-env goes with --upstream")
        options.append(f"--upstream-key-env={key_env}")
    if max_calls is not None:
        options.append(f"--max-calls-in-flight={max_calls}")
    if options and (not wanted or server.gateway is not None):
        raise CommandError(
            f"{options[0].partition('=')[0]} goes with --gateway, for an application without a "
            "gateway of its own"
        )
    if wanted and server.gateway is None:
        key = secret_from_env("--upstream-key-env", key_env)
        if key_env is not None and not front:
            del os.environ[key_env]  # agents may be started with the environment as it is
        try:
            upstreams = [Upstream(url, key) for url in urls]
        except InvalidFieldError as error:
            option = "--upstream" if error.field == "url" else "--upstream-key-env"
            raise CommandError(f"{option} {error.reason}") from None
        server.registry.gateway = ModelGateway(
            upstreams=upstreams or None, max_calls_in_flight=max_calls
        )
    return ["--gateway", *options] if server.gateway is not None else []


def make_front(server: RolloutServer, source: WorkerSource) -> None:
    """Have an application run its rollouts on workers; its own backend's queue bound holds.

    Args:
        server: The application, before it serves.
        source: Starts workers that serve the same application.

    Raises:
        CommandError: The application is the front of a pool already.
    """
    from rollout.pool import PoolBackend  # noqa: PLC0415 - a server without workers needs no pool

    backend = server.backend
    if isinstance(backend, PoolBackend):
        raise CommandError("--workers: the application is the front of a pool already")
    if server.gateway is not None and server.gateway.advertise_url is not None:
        raise CommandError(
            "--workers: each worker has a model gateway with an address of its own, so the "
            "gateway cannot have an advertise_url"
        )
    pool = PoolBackend(source, max_queue_depth=getattr(backend, "max_queue_depth", None))
    pool.artifact_root = server.artifact_root
    server.become_front(pool)


def _start_workers(
    server: RolloutServer,
    app: str,
    count: int,
    budget: ShutdownBudget,
    for_agents: Sequence[str],
    *,
    verbose: bool,
    json_logs: bool,
) -> None:
    """Make an application the front of workers on this machine."""
    from rollout.pool import LocalWorkers  # noqa: PLC0415 - see `make_front`

    # The front has waited and delivered before its workers shut down. If it was killed, nobody
    # waits for a result, so what runs is asked to stop at once.
    lengths = {
        "drain": 0,
        "cleanup": budget.cleanup_sec,
        "forced": budget.forced_sec,
        "delivery": 0,
        "backend": budget.backend_sec,
    }
    options = [*(f"--{stage}-sec={seconds}" for stage, seconds in lengths.items()), *for_agents]
    if verbose:
        options.append("--verbose")
    silence_sec = server.registry.polling_lease_timeout_sec
    source = LocalWorkers(app, count, options=options, silence_sec=silence_sec, json_logs=json_logs)
    make_front(server, source)


def _use_ray(server: RolloutServer, app: str, address: str, **options: Any) -> None:
    """Make an application the front of workers on a Ray cluster."""
    from rollout.pool.ray import RayPool  # noqa: PLC0415 - see `make_front`

    try:
        source = RayPool(app, address, **options)
    except BackendConfigurationError as error:
        raise CommandError(f"--ray: {error}") from error
    make_front(server, source)


def summary(error: BaseException, secrets: Iterable[str | None]) -> str:
    """Summarise an error of user code in a line, in place of its traceback."""
    kind = type(error).__name__
    return f"{kind}: {describe_exception(error, secrets)}{last_place(error)}; --verbose says more"


def _activity(app: RolloutServer, json_logs: bool) -> Activity:
    if sys.stderr.isatty() and not (json_logs or is_plain()):
        say = partial(click.echo, err=True)
        return Activity(app.registry, say, every_sec=_LINES_SEC, one_by_one=True)
    return Activity(app.registry, logger.info, every_sec=_COUNTS_SEC, one_by_one=False)


async def _serve(
    app: RolloutServer,
    start: Any,
    stdin: int | None,
    address_fd: int | None,
    quiet: bool,
    worker: bool,
    json_logs: bool,
    as_json: bool,
) -> None:
    last_resort = LastResort(app)
    listening = False
    if stdin is not None:
        # In a thread, so that it works while code of users blocks the event loop.
        stop = partial(trio.lowlevel.current_trio_token().run_sync_soon, app.request_shutdown)
        follow = partial(_follow, stdin, stop, last_resort)
        threading.Thread(target=follow, name="stdin", daemon=True).start()
    try:
        with last_resort.armed():
            async with trio.open_nursery() as watching:
                watching.start_soon(last_resort.watch)
                if not quiet:
                    watching.start_soon(_activity(app, json_logs).run)
                async with trio.open_nursery() as serving:
                    urls = await serving.start(start)
                    listening = True
                    gc.freeze()  # a full collection walks over what rollouts made, not over modules
                    if not worker:
                        last_resort.start_with_signals()
                        said = f"listening on {' '.join(urls)}"
                        print_json({"listening": list(urls)}) if as_json else click.echo(said)
                    if app.artifact_root is not None and not quiet:
                        folder = one_line(str(app.artifact_root))
                        note = f"files of rollouts are kept in {folder}"
                        logger.info("%s", note) if json_logs else click.echo(note, err=True)
                    if address_fd is not None:
                        os.write(address_fd, f"{urls[0]}\n".encode())
                        os.close(address_fd)
                watching.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        plain = sole_error(group)
        if isinstance(plain, RolloutServerError) and not listening and _stopped_early(app, plain):
            raise interrupted(signal.SIGTERM, "the server had not started") from plain
        if isinstance(plain, RolloutServerError):
            raise _explained(plain, listening) from plain
        raise


def _stopped_early(app: RolloutServer, error: RolloutServerError) -> bool:
    return error.__cause__ is None and app.shutdown_requested.is_set()


def _take_stdin() -> int:
    """Move stdin to another descriptor, so that what user code reads from stdin is empty."""
    try:
        taken = os.dup(0)
    except OSError as error:
        raise CommandError(
            f"--until-stdin-closes: stdin cannot be read ({reason_of(error)})"
        ) from None
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    return taken


def _read_line(stdin: int) -> str:
    """Read a line, and nothing of what follows it."""
    line = b""
    while (byte := os.read(stdin, 1)) not in {b"", b"\n"}:
        line += byte
    if not line:
        raise CommandError("--worker-of: stdin has no key; this option is for --workers alone")
    return line.decode()


def _follow(stdin: int, stop: Callable[[], object], last_resort: LastResort) -> None:
    """Read stdin to its end, without the locks of `sys.stdin` that an exit would trip over."""
    try:
        while os.read(stdin, _KEY_HEAD_BYTES):
            pass
    except OSError as error:
        logger.warning("stdin cannot be read (%s); shutting down", error)
    logger.info("stdin has ended: shutting down")
    with suppress(trio.RunFinishedError):
        stop()
        last_resort.wait()


def _ignore_signals() -> None:
    """Ignore what a terminal or a service manager sends to all processes; the front decides.

    By handlers, since children of the application would inherit that signals are ignored.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def _explained(error: RolloutServerError, listening: bool) -> CommandError:
    message = str(error)
    if message.startswith("cannot listen"):
        message += "; choose another address with --bind (port 0 takes a free one)"
    elif error.__cause__ is not None and not isinstance(error.__cause__, OSError):
        message += last_place(error.__cause__)
    return CommandError(message, exit_code=EXIT_FAILED if listening else EXIT_USAGE)


def _budget(given: dict[str, float]) -> ShutdownBudget:
    """Make the budget of the stages; an error names the option.

    Raises:
        CommandError: A stage has a length that cannot be.
    """
    try:
        return ShutdownBudget(**given)
    except InvalidFieldError as error:
        raise CommandError(f"--{error.field.replace('_', '-')} {error.reason}") from None


def _check_encrypted(keyfile: str | None, password: str | None) -> None:
    """Refuse an encrypted key without a password, which OpenSSL would ask the terminal for.

    Raises:
        CommandError: The key is encrypted and there is no password.
    """
    if keyfile is None or password is not None or not Path(keyfile).is_file():
        return
    try:
        head = Path(keyfile).read_bytes()[:_KEY_HEAD_BYTES]
    except OSError as error:
        raise CommandError(f"keyfile: {reason_of(error)}") from None
    if b"ENCRYPTED" in head:
        raise CommandError(
            "the key is encrypted; name the variable that holds its password with "
            "--keyfile-password-env"
        )


_MOST_LINES = 6


class Activity:
    """Logs rollouts as they are admitted and end: one by one if they are few, else as counts.

    Args:
        registry: The server's rollouts.
        say: Called with each line.
        every_sec: How long events are collected before they are logged.
        one_by_one: Whether a few rollouts get a line each.
    """

    def __init__(
        self,
        registry: RolloutRegistry,
        say: Callable[[str], object],
        *,
        every_sec: float,
        one_by_one: bool,
    ) -> None:
        self._registry = registry
        self._say = say
        self._every_sec = every_sec
        self._one_by_one = one_by_one
        self._lines: list[str] = []
        self._admitted = 0
        self._ended: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        registry.hooks.observers.append(self._observe)

    async def run(self) -> None:
        """Log events until cancelled, then what is left."""
        try:
            while True:
                await trio.sleep(self._every_sec)
                self._flush()
        finally:
            self._flush()

    def _observe(self, what: str, entry: Entry) -> None:
        if what == "admitted":
            self._admitted += 1
            self._since[entry.rollout_id] = trio.current_time()
            self._note(entry, "admitted")
        elif what == "finished" and entry.record.result is not None:
            result = entry.record.result
            now = trio.current_time()
            seconds = now - self._since.pop(entry.rollout_id, now)
            self._ended[result.status] += 1
            why = f"{result.err_category}, " if result.err_category else ""
            self._note(entry, f"{result.status} ({why}{seconds:.1f} s)")

    def _note(self, entry: Entry, what: str) -> None:
        if len(self._lines) <= _MOST_LINES:
            self._lines.append(f"rollout {printable(entry.rollout_id)}: {what}")

    def _flush(self) -> None:
        if self._one_by_one and len(self._lines) <= _MOST_LINES:
            for line in self._lines:
                self._say(line)
        elif self._lines:
            ended = ", ".join(f"{count} {status}" for status, count in self._ended.items())
            self._say(
                f"rollouts: {self._admitted} admitted, {self._ended.total()} ended"
                f"{f' ({ended})' if ended else ''}; {len(self._since)} in flight"
            )
        self._lines, self._admitted = [], 0
        self._ended.clear()


_STUCK_SEC = 1.0
"""Time for the last responses to leave, once executions were given up."""

_CLOSING_SEC = 60.0
"""Time for connections and the lifespan to end, on top of the budget of the stages."""


class LastResort:
    """Ends the process with `EXIT_FORCED` if the server does not return in time.

    A workflow in a worker thread that never returns, or a task that shields itself from its
    cancellation, blocks trio's nurseries for ever, and with them the exit of the process. The
    staged shutdown gives such executions up and delivers results for them; this ends the
    process once that is done. A thread keeps the time, and the signal itself starts it, since a
    workflow may block the event loop, too.
    """

    def __init__(self, app: RolloutServer) -> None:
        self._app = app
        self._timer: threading.Timer | None = None
        self._over = threading.Event()

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Disarm at the end of the block, which is where the server has returned."""
        try:
            yield
        finally:
            self._over.set()
            self._disarm()

    def wait(self) -> None:
        """Wait in a thread for the end of a shutdown, and end the process if it takes too long."""
        if not self._over.wait(self._app.shutdown_stages.budget.total_sec + _CLOSING_SEC):
            _end_process("the shutdown does not end")

    def start_with_signals(self) -> None:
        """Start the time with SIGTERM or SIGINT, ahead of whoever handles them by now."""
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, partial(self._received, handler))

    def _received(self, handler: Callable[[int, Any], Any], number: int, frame: Any) -> None:
        if self._timer is None:
            self._arm_for_shutdown()
        handler(number, frame)

    def _arm_for_shutdown(self) -> None:
        budget = self._app.shutdown_stages.budget
        self._arm(budget.total_sec + _CLOSING_SEC, "the shutdown does not end")

    async def watch(self) -> None:
        """Follow the shutdown and set the time accordingly."""
        stages = self._app.shutdown_stages
        await self._app.shutdown_requested.wait()
        self._arm_for_shutdown()
        await stages.run()
        if stages.stuck:
            reason = f"{len(stages.stuck)} execution(s) did not stop"
            self._arm(_STUCK_SEC, reason)
        else:
            self._arm(_CLOSING_SEC, "the lifespan or a connection does not end")

    def _arm(self, after_sec: float, reason: str) -> None:
        self._disarm()
        self._timer = threading.Timer(after_sec, _end_process, (reason,))
        self._timer.daemon = True
        self._timer.start()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _end_process(reason: str) -> None:
    logger.error("ending the process by force: %s", reason)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever has read them may be gone
            stream.flush()
    os._exit(EXIT_FORCED)
