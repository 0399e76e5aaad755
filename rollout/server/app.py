"""The rollout server as an ASGI application: routes over the registry.

Theory of operation: handlers are thin. They parse strictly, call the registry, and turn its
errors into JSON refusals; nothing that a peer sends becomes a 500 or a page of HTML. The
application owns two nurseries, both opened by its lifespan: one for executions and leases
(the registry's), one for whatever else is added to it.

Every request has to carry the key, and then goes to its handler. Quart routes what is added to
the application, refuses what has no route, and has everything once there is a function of the
application's own that Quart calls around each request.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit
from uuid import uuid4

import trio
from quart import Response, has_request_context, request, websocket
from quart.routing import QuartRule
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGILifespan
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge
from werkzeug.http import parse_accept_header

from rollout._checks import check_api_key, check_flag, check_number, check_whole
from rollout._http import is_loopback_host
from rollout._json.fit import fit
from rollout._logs import configure_logging as set_up_logging
from rollout._logs import get_logger
from rollout._tasks import background_tasks, sole_error
from rollout._telemetry.counts import numbers
from rollout._telemetry.tracing import TRACEPARENT
from rollout._version import package_version
from rollout.artifacts import ArtifactStore
from rollout.backend.base import ExecutionBackend, PolicyControl
from rollout.codec import dump_json, structure, unstructure
from rollout.errors import (
    FieldProblem,
    InvalidBodyError,
    InvalidFieldError,
    InvalidLeaseError,
    StateUnavailableError,
    TrajectoryUnavailableError,
    UnknownRolloutError,
)
from rollout.gateway import ModelGateway
from rollout.rules import SeenState
from rollout.server.admission import (
    MAX_BATCH,
    MAX_CANCEL_IDS,
    admit,
    admit_batch,
    field_problems,
    retry_after_sec,
)
from rollout.server.asgi import (
    Answer,
    Call,
    EndlessBody,
    Handler,
    RolloutHTTPConnection,
    RolloutRequest,
    drain,
    route_path,
    serve_call,
)
from rollout.server.authentication import RefusalLog, authorizer
from rollout.server.feed import (
    FEED_PATH,
    Feed,
    FeedHub,
    FeedStream,
    LeaseClaim,
    read_claims,
    recall_claimed,
)
from rollout.server.live import LIVE_PATH, ConversationStream, LiveStream, LiveView
from rollout.server.metrics import METRICS_PATH, check_metrics, exposition, read_metrics
from rollout.server.model_calls import is_model_path, policy_state, serve_model_call
from rollout.server.openapi import OPENAPI_PATH, openapi_document
from rollout.server.registry import RolloutRegistry
from rollout.server.shutdown import ShutdownBudget, StagedShutdown
from rollout.server.state import Durability, SQLiteStore
from rollout.server.trajectories import stored_trajectory
from rollout.server.ui import UI_PATH, ui_answer
from rollout.server.watchdog import LoopWatchdog
from rollout.types import (
    POLLING_LEASE_HEADER,
    SEEN_STATE_HEADER,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
)
from rollout.types._fields import url_host

__all__ = [
    "DEFAULT_POLLING_LEASE_TIMEOUT_SEC",
    "DEFAULT_RESULT_RETENTION_SEC",
    "DEFAULT_RESULT_WAIT_TIMEOUT_SEC",
    "RolloutServer",
    "create_rollout_server",
]

logger = get_logger(__name__)

DEFAULT_RESULT_WAIT_TIMEOUT_SEC = 30.0
DEFAULT_POLLING_LEASE_TIMEOUT_SEC = 120.0
DEFAULT_RESULT_RETENTION_SEC = 900.0
_CANCELLED_AT_ONCE = 32
"""How many rollouts are cancelled without a checkpoint; their cleanup takes about 1 ms each."""
_STARTED_AT_ONCE = 32
"""How many agents are started without a checkpoint."""
DEFAULT_MAX_REQUEST_BYTES = 16 * 1024 * 1024

_ANY_HOST = {"0.0.0.0", "::"}  # noqa: S104 - not to bind to

Lifespan = Callable[["RolloutServer"], AbstractAsyncContextManager[Any]]


class _Lifespan(TrioASGILifespan):
    """The ASGI lifespan: enters `RolloutServer.serving` at startup and leaves it at shutdown.

    Quart-Trio's own lifespan gives background tasks five seconds and goes on serving after they
    have failed. Here a failure of the server's own tasks ends the lifespan with an error, so
    that the ASGI server stops instead of answering for nothing.
    """

    app: RolloutServer

    async def __call__(self, receive: Any, send: Any) -> None:
        await receive()
        stage = "startup"
        try:
            async with self.app.serving():
                await send({"type": "lifespan.startup.complete"})
                stage = "shutdown"
                await receive()
        except trio.Cancelled:
            raise
        except BaseException as error:
            plain = sole_error(error)
            if isinstance(plain, trio.Cancelled | BaseExceptionGroup) and not isinstance(
                plain, ExceptionGroup
            ):
                raise
            message = f"{type(plain).__name__}: {plain}"
            await send({"type": f"lifespan.{stage}.failed", "message": message})
        else:
            await send({"type": "lifespan.shutdown.complete"})


class _Route(QuartRule):
    """A route that compiles its URL builder at the first use, because compiling takes long."""

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        def build(this: _Route, **values: Any) -> tuple[str, str]:
            return super()._compile_builder(append_unknown)(this, **values)

        return build


async def serve_agent_call(
    gateway: ModelGateway,
    refusals: RefusalLog,
    scope: Any,
    receive: Any,
    send: Any,
    *,
    limit: int | None,
    body_timeout_sec: float | None,
) -> None:
    """Serve one ASGI connection of agents, with the routes of a gateway alone.

    Args:
        gateway: The gateway.
        refusals: Logs what is refused.
        scope: The ASGI scope.
        receive: The ASGI ``receive``.
        send: The ASGI ``send``.
        limit: How many bytes the body may have.
        body_timeout_sec: How long it may take.
    """
    await serve_call(
        {**scope, "path": route_path(scope["path"], scope.get("raw_path"))},
        receive,
        send,
        handler=partial(serve_model_call, gateway, refusals),
        refuse=_refusal,
        limit=limit,
        body_timeout_sec=body_timeout_sec,
    )


class RolloutServer(QuartTrio):
    """The application that `create_rollout_server` returns.

    Attributes:
        registry: The rollouts of this process.
        backend: Where they run.
        process_id: New for every application object, so for every process.
        instance_id: ``ROLLOUT_INSTANCE_ID`` from the environment, else `process_id`.
        shutdown_stages: The staged shutdown; running it twice waits for the first.
        ui: Whether it serves its page; ``None`` for a server that does where it is bound to an
            address of this machine alone.
        authorized: Says whether the headers of a request carry the server's key.
    """

    asgi_http_class = RolloutHTTPConnection
    asgi_lifespan_class = _Lifespan
    request_class = RolloutRequest
    url_rule_class = _Route  # type: ignore[assignment]

    def __init__(
        self,
        *,
        backend: ExecutionBackend,
        registry: RolloutRegistry,
        lifespan: Lifespan | None,
        key: str | None,
    ) -> None:
        super().__init__("rollout.server", static_folder=None)
        self.backend = backend
        self.registry = registry
        self.process_id = str(uuid4())
        self.instance_id = os.environ.get("ROLLOUT_INSTANCE_ID") or self.process_id
        self.shutdown_stages = StagedShutdown(registry, ShutdownBudget())
        self.watchdog: LoopWatchdog | None = None
        self._serves_metrics = False
        self.feeds = FeedHub(registry)
        self.live = LiveView(
            registry, {"instance_id": self.instance_id, "process_id": self.process_id}
        )
        self.ui: bool | None = None
        self.refusals = RefusalLog()
        self.authorized = authorizer(key)
        self.shutdown_requested = trio.Event()
        self._user_lifespan = lifespan
        self.config["RESPONSE_TIMEOUT"] = None
        self.url_map.merge_slashes = False
        self.url_map.strict_slashes = True
        self._routes: dict[tuple[str, str], Handler] = {}
        for method, path, handler in _routes(self, authenticated=key is not None):
            self._add_route(method, path, handler)
        for rule in self.url_map.iter_rules():
            if rule.rule.startswith(_OF_ROLLOUT):
                # HEAD comes with GET by default; it would renew a lease and show nothing for it.
                rule.methods = {"GET"}
        _add_refusals(self)
        self._own_hooks = self._hooks()

    def _add_route(self, method: str, path: str, handler: Handler) -> None:
        async def view(**_: str) -> Response:
            this = cast("RolloutRequest", request)
            scope = {**this.scope, "path": this.path}
            return (await handler(Call(scope, this.incoming, this.body_timeout))).response()

        self._routes[method, path] = handler
        self.add_url_rule(path, path, view, methods=[method], provide_automatic_options=False)

    def serve_metrics(self, wanted: bool) -> None:
        """Answer ``GET /metrics``, or do not; call it before the application serves."""
        if wanted and ("GET", METRICS_PATH) not in self._routes:
            self._add_route("GET", METRICS_PATH, partial(_metrics, self))
        self._serves_metrics = wanted

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection; a request target that is not a plain path gets 404."""
        handler: Handler | None = None
        if scope["type"] in {"http", "websocket"}:
            scope = {**scope, "path": route_path(scope["path"], scope.get("raw_path"))}
        if scope["type"] == "http":
            if self.gateway is not None and is_model_path(scope["path"]):
                handler = partial(serve_model_call, self.gateway, self.refusals)
            elif not (self.authorized(scope["headers"]) or self._is_page(scope)):
                handler = self._refuse_key
            elif not scope.get("root_path") and self._hooks() == self._own_hooks:
                handler = self._handler(scope["method"], scope["path"])
        if handler is None:
            await super().asgi_app(scope, receive, send)
        else:
            await self._serve_call(handler, scope, receive, send)

    async def gateway_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection of agents, with the routes of the gateway alone."""
        if self.gateway is not None:
            await serve_agent_call(
                self.gateway,
                self.refusals,
                scope,
                receive,
                send,
                limit=self.config["MAX_CONTENT_LENGTH"],
                body_timeout_sec=self.config["BODY_TIMEOUT"],
            )

    async def _serve_call(self, handler: Handler, scope: Any, receive: Any, send: Any) -> None:
        await serve_call(
            scope,
            receive,
            send,
            handler=handler,
            refuse=_refusal,
            limit=self.config["MAX_CONTENT_LENGTH"],
            body_timeout_sec=self.config["BODY_TIMEOUT"],
        )

    def _handler(self, method: str, path: str) -> Handler | None:
        """Return the handler of one of the server's own routes."""
        if path == METRICS_PATH and not self._serves_metrics:
            return None
        if path.startswith("/rollout/") and (found := _PATH_OF_ROLLOUT.fullmatch(path)):
            path = _OF_ROLLOUT + found[1]
        return self._routes.get((method, path))

    def _is_page(self, scope: Any) -> bool:
        """Whether a request is for the page, which holds no data and asks for the key itself."""
        return bool(self.ui) and scope["path"] == UI_PATH and scope["method"] == "GET"

    def bound(self, url: str) -> None:
        """Note the URL that the server listens on."""
        parts = urlsplit(url)
        if self.ui is None and parts.scheme in {"http", "https"}:
            host = parts.hostname or ""
            self.ui = is_loopback_host(host) and host not in _ANY_HOST

    def _hooks(self) -> int:
        """Count the functions that Quart calls around each request."""
        return sum(
            len(functions)
            for table in (
                self.before_request_funcs,
                self.after_request_funcs,
                self.teardown_request_funcs,
            )
            for functions in table.values()
        )

    async def _refuse_key(self, call: Call) -> Answer:
        await trio.lowlevel.checkpoint()
        self.refusals.note(401, call.scope["method"], call.scope["path"], call.peer)
        return _MISSING_KEY

    @property
    def gateway(self) -> ModelGateway | None:
        """What the agents of rollouts call their model through, if not its endpoint itself."""
        return self.registry.gateway

    @property
    def policy(self) -> PolicyControl | None:
        """What pauses and resumes the model calls; ``None`` without a gateway here or there."""
        gateway = self.gateway
        return self.backend.policy_control if gateway is None else gateway.policy

    def recognizes(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the headers of a request carry the server's key, or the token of a rollout."""
        gateway = self.gateway
        return self.authorized(headers) or (gateway is not None and gateway.recognizes(headers))

    def request_shutdown(self) -> None:
        """Ask `rollout.server.serve` to shut down in stages, as a SIGTERM does."""
        self.shutdown_requested.set()

    @property
    def artifact_root(self) -> Path | None:
        """Below which folder files of rollouts are kept; ``None`` if they are not kept."""
        files = self.registry.files
        return self.backend.artifact_root if files is None else files.root

    def become_front(self, backend: ExecutionBackend) -> None:
        """Run rollouts on another backend, whose workers serve the same application.

        The lifespan is entered by the workers alone, which have gateways of their own. Call it
        before the application serves.
        """
        self.backend = self.registry.backend = backend
        self.registry.hands_limits_on = self.gateway is not None
        self.registry.gateway = self.registry.files = None
        self._user_lifespan = None

    def become_worker(self, api_key: str, *, workers: int = 1) -> None:
        """Serve a front alone: ask for its key, and keep no state.

        The key of the application, and what it has Quart call around each request, guard the
        front. Call it before the application serves.

        Args:
            api_key: The key of the front.
            workers: How many workers share what the gateway may have in flight to an endpoint.
        """
        if self.gateway is not None:
            self.gateway.share(workers)
        self.authorized = authorizer(api_key)
        self.ui = False
        self.registry.store = None
        self._own_hooks = self._hooks()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        """Open the backend, the lifespan and the registry for the length of the block.

        An ASGI server's lifespan enters it; so can code that calls the application in
        process. Leaving it runs the staged shutdown, unless that has run before. Leaving it
        by an exception or a cancellation cancels the executions at once.

        A lifespan or a backend that fails to start comes out as it is.
        """
        async with background_tasks() as self.nursery, AsyncExitStack() as stack:
            await self._start(stack)
            yield
            await self.shutdown_stages.run()

    async def _start(self, stack: AsyncExitStack) -> None:
        """Enter the context managers of serving in order; *stack* exits them."""
        await self.startup()
        stack.push_async_callback(self.shutdown)
        self.live.open()
        await stack.enter_async_context(self.backend.running())
        if self._user_lifespan is not None:
            await stack.enter_async_context(self._user_lifespan(self))
            stack.callback(logger.info, "shutting down: waiting for the lifespan to end")
        if self.watchdog is not None and self.watchdog.applies():
            await self.nursery.start(self.watchdog.run)
        if self.gateway is not None:
            await stack.enter_async_context(self.gateway.running())
        await stack.enter_async_context(self.registry.running())


def create_rollout_server(
    *,
    backend: ExecutionBackend,
    lifespan: Lifespan | None = None,
    configure_logging: bool = True,
    result_wait_timeout_sec: float = DEFAULT_RESULT_WAIT_TIMEOUT_SEC,
    polling_lease_timeout_sec: float = DEFAULT_POLLING_LEASE_TIMEOUT_SEC,
    result_retention_sec: float = DEFAULT_RESULT_RETENTION_SEC,
    api_key: str | None = None,
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
    allowed_chat_hosts: Collection[str] | None = None,
    watchdog_sec: float | None = 1.0,
    state: str | os.PathLike[str] | None = None,
    durability: Durability = "process",
    gateway: ModelGateway | None = None,
    artifact_root: str | os.PathLike[str] | Literal[False] | None = None,
    metrics: bool | None = None,
    ui: bool | None = None,
) -> RolloutServer:
    """Build a rollout server around a backend.

    Run it with `rollout.server.serve`, with ``rollout serve`` on the command line, or with any
    ASGI server that runs trio and supports lifespans.

    Args:
        backend: Where rollouts run.
        lifespan: Called with the application; returns an async context manager that is
            entered before the first admission and left after the backend's shutdown.
        configure_logging: Log to stderr if the root logger has no handler yet.
        result_wait_timeout_sec: How long a poll is held, in seconds.
        polling_lease_timeout_sec: How long a rollout outlives the silence of its caller, in
            seconds; must exceed the wait.
        result_retention_sec: How long a terminal result stays readable, in seconds.
        api_key: Ask for ``Authorization: Bearer <api_key>`` on every route.
        max_request_bytes: Larger bodies are refused with 413. The event loop may wait for a
            body of the default size for up to 50 ms, of a larger one in proportion.
        allowed_chat_hosts: The hosts that a request's ``chat_completions_url`` may name, each
            as ``host`` (any port) or ``host:port``; ``None`` allows any.
        watchdog_sec: Warn about code that blocks the event loop for longer than this many
            seconds; ``None`` to watch nothing.
        state: The file in which admissions and results are kept, so that a server that is killed
            and started again loses nothing; made if it does not exist. ``None``: in memory.
        durability: What the state survives: any death of the ``"process"``, or a cut of the
            ``"power"`` too, which syncs the disk at each commit.
        gateway: What agents call their model through, so that the endpoint's key stays in the
            server and each call is recorded; ``None``: they get URL and key of the request.
        artifact_root: Below which folder trajectories and diagnostics are kept if the backend
            does not keep them itself (`rollout.ExecutionBackend.keeps_files`), see
            `rollout.artifacts.ArtifactStore`; ``False`` keeps nothing.
        metrics: Serve ``GET /metrics`` for Prometheus, which needs the extra ``metrics``; ``None``
            to serve it where that is installed.
        ui: Serve a page at ``/ui`` that shows the server while it runs. The page asks for the key,
            if there is one. By default, where `rollout.server.serve` is bound to the loopback.

    Raises:
        ValueError: A setting is refused, or the key is empty, blank, or cannot stand in a header.
    """
    check_flag("configure_logging", configure_logging)
    check_flag("metrics", metrics, none=True)
    check_flag("ui", ui, none=True)
    check_whole("max_request_bytes", max_request_bytes)
    check_number("watchdog_sec", watchdog_sec, above=0, none=True)
    if configure_logging:
        set_up_logging()
    registry = RolloutRegistry(
        backend=backend,
        result_wait_timeout_sec=result_wait_timeout_sec,
        polling_lease_timeout_sec=polling_lease_timeout_sec,
        result_retention_sec=result_retention_sec,
    )
    if allowed_chat_hosts is not None:
        registry.chat_hosts = _chat_hosts(allowed_chat_hosts)
    if state is not None:
        registry.store = SQLiteStore(state, durability)
    registry.gateway = gateway
    if not backend.keeps_files:
        registry.files = ArtifactStore(artifact_root)
    key = check_api_key(api_key)
    app = RolloutServer(backend=backend, registry=registry, lifespan=lifespan, key=key)
    app.serve_metrics(check_metrics(metrics))
    app.ui = ui
    if watchdog_sec is not None:
        app.watchdog = LoopWatchdog(watchdog_sec)
    app.config["MAX_CONTENT_LENGTH"] = max_request_bytes
    return app


def _chat_hosts(given: Collection[str]) -> frozenset[str]:
    name = "allowed_chat_hosts"
    if isinstance(given, str) or not all(isinstance(host, str) for host in given):
        raise InvalidFieldError(name, "must be a collection of strings", kind="type_error")
    for host in given:
        found = url_host(f"http://{host}")
        if found is None or host.lower() not in {found[0], f"{found[0]}:{found[1]}"}:
            raise InvalidFieldError(name, f"must hold hosts or host:port, not {host!r}")
    return frozenset(host.lower() for host in given)


# --- answers --------------------------------------------------------------------------------


def _refuse(status: int, detail: Any, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(dump_json({"detail": detail}), status, headers=named)


def _refuse_fields(where: str, problems: tuple[FieldProblem, ...]) -> Answer:
    return _refuse(422, field_problems(where, problems))


_MISSING_KEY = _refuse(401, "missing or wrong api key", WWW_Authenticate="Bearer")


def _refusal(error: Exception, scope: Any) -> Answer:
    """Return the answer for an error of a handler."""
    if isinstance(error, InvalidBodyError):
        return _refuse_fields("body", error.problems)
    if isinstance(error, HTTPException):
        too_large = isinstance(error, RequestEntityTooLarge)
        detail = error.description if too_large else error.name.lower()
        allowed = getattr(error, "valid_methods", None)
        headers = {"Allow": ", ".join(sorted(set(allowed)))} if allowed else {}
        return _refuse(error.code or 500, detail, **headers)
    if isinstance(error, StateUnavailableError):
        return _refuse(503, str(error), Retry_After=str(retry_after_sec()))
    logger.error("%s %s failed", scope.get("method", "GET"), scope["path"], exc_info=error)
    return _refuse(500, "internal server error")


def _add_refusals(app: RolloutServer) -> None:
    """Refuse in Quart as the server's own routes refuse."""

    @app.errorhandler(Exception)
    async def refuse(error: Exception) -> Response:
        await trio.lowlevel.checkpoint()
        asked = request if has_request_context() else websocket
        return _refusal(error, asked.scope).response()

    @app.after_request
    async def read_to_the_end(response: Response) -> Response:
        return await drain(cast("RolloutRequest", request), response)

    @app.before_websocket
    async def authenticate() -> Response | None:
        await trio.lowlevel.checkpoint()
        if app.authorized(list(websocket.scope["headers"])):
            return None
        app.refusals.note(401, "GET", websocket.path, websocket.remote_addr)
        return _MISSING_KEY.response()


# --- routes ---------------------------------------------------------------------------------


_OF_ROLLOUT = "/rollout/<rollout_id>/"
_PATH_OF_ROLLOUT = re.compile(r"/rollout/[^/]+/(result|trajectory|live)")

LeasedHandler = Callable[["RolloutServer", Call, str, str], Awaitable[Answer]]
"""Handles a request about one rollout: the server, the request, the id and the lease token."""


def _routes(app: RolloutServer, *, authenticated: bool) -> list[tuple[str, str, Handler]]:
    """Return method, path and handler of the server's own routes."""

    async def openapi(_: Call) -> Answer:
        await trio.lowlevel.checkpoint()
        return Answer(
            dump_json(
                openapi_document(
                    authenticated=authenticated,
                    limited=app.registry.takes_limits,
                    metrics=app._serves_metrics,  # noqa: SLF001 - as `_metrics` does
                )
            )
        )

    return [
        ("GET", "/health", partial(_health, app)),
        ("POST", "/rollout", partial(_admit, app)),
        ("GET", _OF_ROLLOUT + "result", partial(_with_lease, app, _poll)),
        ("GET", _OF_ROLLOUT + "trajectory", partial(_with_lease, app, _trajectory)),
        ("GET", _OF_ROLLOUT + "live", partial(_live_conversation, app)),
        ("POST", "/rollout/cancel", partial(_cancel, app)),
        ("POST", "/rollouts", partial(_admit_batch, app)),
        ("POST", FEED_PATH, partial(_open_feed, app)),
        ("GET", LIVE_PATH, partial(_live, app)),
        ("POST", "/rollouts/renew", partial(_renew, app)),
        ("POST", "/rollouts/start", partial(_start, app)),
        ("GET", "/policy", partial(_policy, app)),
        ("POST", "/policy/pause", partial(_policy, app)),
        ("POST", "/policy/resume", partial(_policy, app)),
        ("GET", OPENAPI_PATH, openapi),
        ("GET", UI_PATH, partial(_ui, app)),
    ]


async def _admit(app: RolloutServer, call: Call) -> Answer:
    traceparent = call.header(TRACEPARENT.encode())
    outcome = await admit(app.registry, await call.read_json(), traceparent)
    if "admission" in outcome:
        return Answer(dump_json(outcome["admission"]), outcome["status_code"])
    wait = outcome.get("retry_after_sec")
    headers = {} if wait is None else {"Retry_After": str(wait)}
    return _refuse(outcome["status_code"], outcome["detail"], **headers)


_NOT_SERVING = _refuse(503, "the rollout server is not serving")


async def _open_feed(app: RolloutServer, call: Call) -> Answer:
    if not app.registry.serving:
        await trio.lowlevel.checkpoint()
        return _NOT_SERVING
    claims = read_claims(await call.read_json())
    await recall_claimed(app.registry, claims)
    return _lines(FeedStream(app.feeds, claims))


async def _live(app: RolloutServer, _call: Call) -> Answer:
    await trio.lowlevel.checkpoint()
    return _lines(LiveStream(app.live)) if app.registry.serving else _NOT_SERVING


async def _ui(app: RolloutServer, _call: Call) -> Answer:
    await trio.lowlevel.checkpoint()
    if not app.ui:
        return _refuse(404, "this server serves no page; start it with --ui")
    return await ui_answer()


async def _live_conversation(app: RolloutServer, call: Call) -> Answer:
    await trio.lowlevel.checkpoint()
    if not app.registry.serving:
        return _NOT_SERVING
    entry = app.registry.find(call.scope["path"].split("/")[2])
    if entry is None:
        return _refuse(404, "there is no such rollout, or its result is not in memory any more")
    return _lines(ConversationStream(app.live, app.backend, entry))


def _lines(body: EndlessBody) -> Answer:
    return Answer(
        body,
        kind="application/x-ndjson",
        # nginx, among others, does not buffer it then.
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _admit_batch(app: RolloutServer, call: Call) -> Answer:
    body = await call.read_json()
    rollouts = body.get("rollouts") if isinstance(body, dict) else None
    if not isinstance(rollouts, list) or len(rollouts) > MAX_BATCH:
        msg = f"must be a list of at most {MAX_BATCH} objects"
        raise InvalidBodyError([FieldProblem(("rollouts",), msg, "type_error")])
    traceparents = body.get("traceparents") or [call.header(TRACEPARENT.encode())] * len(rollouts)
    if not isinstance(traceparents, list) or not all(
        each is None or isinstance(each, str) for each in traceparents
    ):
        msg = "must be a list of strings, or null for a rollout without a caller's span"
        raise InvalidBodyError([FieldProblem(("traceparents",), msg, "type_error")])
    feed = _feed(app, body, required=False)
    outcomes = await admit_batch(app.registry, rollouts, feed, traceparents[: len(rollouts)])
    attached = feed is not None and not feed.closed
    return Answer(dump_json({"outcomes": outcomes, "attached": attached}))


async def _renew(app: RolloutServer, call: Call) -> Answer:
    feed = _feed(app, await call.read_json(), required=True)
    if feed is None:
        return _refuse(404, "unknown feed")
    return Answer(dump_json({"renewed": app.feeds.renew(feed)}))


async def _start(app: RolloutServer, call: Call) -> Answer:
    claims = read_claims(await call.read_json(), "rollouts")
    refused = await recall_claimed(app.registry, claims)
    outcomes: list[dict[str, Any]] = []
    for start in range(0, len(claims), _STARTED_AT_ONCE):
        await trio.lowlevel.checkpoint()
        for claim in claims[start : start + _STARTED_AT_ONCE]:
            code = _confirm(app.registry, claim, refused)
            outcomes.append({"rollout_id": claim.rollout_id, "status_code": code})
    if any(outcome["status_code"] == HTTPStatus.FORBIDDEN for outcome in outcomes):
        app.refusals.note(403, call.scope["method"], call.scope["path"], call.peer)
    return Answer(dump_json({"outcomes": outcomes}))


def _confirm(registry: RolloutRegistry, claim: LeaseClaim, refused: Collection[str]) -> int:
    """Confirm one start; return the status of its outcome."""
    try:
        return 200 if registry.confirm_start(claim.rollout_id, claim.token) else 409
    except UnknownRolloutError:
        return 403 if claim.rollout_id in refused else 404
    except InvalidLeaseError:
        return 403


def _feed(app: RolloutServer, body: Any, *, required: bool) -> Feed | None:
    token = body.get("feed") if isinstance(body, dict) else None
    if token is None and not required:
        return None
    if not isinstance(token, str) or not token:
        msg = "must be a string that is not empty"
        raise InvalidBodyError([FieldProblem(("feed",), msg, "type_error")])
    return app.feeds.find(token)


async def _with_lease(app: RolloutServer, act: LeasedHandler, call: Call) -> Answer:
    """Handle a request about one rollout, of who proves its lease."""
    await trio.lowlevel.checkpoint()
    token = call.header(POLLING_LEASE_HEADER.lower().encode())
    if not token:
        state = "is required" if token is None else "must not be empty"
        problem = FieldProblem((POLLING_LEASE_HEADER.lower(),), state, "missing")
        return _refuse_fields("header", (problem,))
    rollout_id = call.scope["path"].split("/")[2]
    try:
        return await act(app, call, rollout_id, token)
    except UnknownRolloutError as error:
        return _refuse(404, str(error))
    except InvalidLeaseError as error:
        app.refusals.note(403, call.scope["method"], call.scope["path"], call.peer)
        return _refuse(403, str(error))


async def _poll(app: RolloutServer, call: Call, rollout_id: str, token: str) -> Answer:
    seen = SeenState.from_header(call.header(SEEN_STATE_HEADER.lower().encode()))
    entry = app.registry.proven(rollout_id, token)
    waits = entry is not None and not entry.record.has_news(seen or entry.record.reported)
    async with call.body.watched() if waits else nullcontext():
        return Answer(await app.registry.wait_for_result(rollout_id, token, seen))


async def _trajectory(app: RolloutServer, call: Call, rollout_id: str, token: str) -> Answer:
    result = await app.registry.ended(rollout_id, token)
    if result is None:
        return _refuse(409, "the rollout has not ended, so it has no trajectory yet")
    encodings = parse_accept_header(call.header(b"accept-encoding"))
    headers = {"Vary": "Accept-Encoding"}
    if compress := encodings.quality("gzip") > 0:
        headers["Content-Encoding"] = "gzip"
    root, started = app.artifact_root, result.agent_started_at
    try:
        async with call.body.watched():
            body = await stored_trajectory(root, rollout_id, started, compress=compress)
    except TrajectoryUnavailableError as error:
        return _refuse(404, str(error))
    return Answer(body, headers=headers)


async def _cancel(app: RolloutServer, call: Call) -> Answer:
    registry = app.registry
    body = structure(await call.read_json(), CancelRolloutsRequest)
    if body.selectors != 1:
        msg = "must have exactly one of ids, prefix and all"
        raise InvalidBodyError([FieldProblem((), msg, "selector")])
    if body.ids is not None and len(body.ids) > MAX_CANCEL_IDS:
        msg = f"must have at most {MAX_CANCEL_IDS} items"
        raise InvalidBodyError([FieldProblem(("ids",), msg, "too_long")])
    given = body.admission_keys or {}
    keys = {name: given[name] for name in body.ids or () if name in given}
    ids = body.ids
    if ids is None:
        ids = registry.selected(prefix=body.prefix, all_=body.all)
    dispositions: dict[str, str] = {}
    for start in range(0, len(ids), _CANCELLED_AT_ONCE):
        await trio.lowlevel.checkpoint()
        part = ids[start : start + _CANCELLED_AT_ONCE]
        dispositions |= registry.cancel(ids=part, admission_keys=keys)
    ahead = {name: key for name, key in keys.items() if dispositions[name] == "not_found"}
    if ahead:
        dispositions |= await registry.cancel_ahead(ahead)
    if keys:
        await registry.settled()
    logger.info("cancel request for %d rollout(s)", len(dispositions))
    return Answer(dump_json(unstructure(CancelRolloutsResponse(dispositions=dispositions))))


async def _policy(app: RolloutServer, call: Call) -> Answer:
    policy = app.policy
    if policy is None:
        await trio.lowlevel.checkpoint()
        return _refuse(404, "this server has no model gateway, nor has any worker of it")
    return Answer(dump_json(await policy_state(policy, call)))


def _backend_health(app: RolloutServer) -> dict[str, Any]:
    """Return what the backend says of its health, and what the server and it have counted."""
    payload: dict[str, Any] = {}
    try:
        fitted, _ = fit({**app.backend.health(), "application": app.backend.application})
        payload.update(fitted)
    except Exception:
        logger.exception("the backend's health failed")
        payload["status"] = "error"
    files, gateway = app.registry.files, app.gateway
    payload["counts"] = {
        **numbers(payload.get("counts")),
        **({} if files is None else files.counts),
        **({} if gateway is None else gateway.counts.flat()),
    }
    return payload


async def _metrics(app: RolloutServer, _call: Call) -> Answer:
    await trio.lowlevel.checkpoint()
    if not app._serves_metrics:  # noqa: SLF001 - Quart may have the route all the same
        return _refuse(404, "not found")
    health = _backend_health(app)
    values = read_metrics(
        app.registry,
        health=health,
        counts=health["counts"],
        feeds=len(app.feeds),
        lag_sec=None if app.watchdog is None else app.watchdog.lag_sec,
        policy=None if app.policy is None else app.policy.state(),
    )
    text, kind = exposition(values)
    return Answer(text, kind=kind)


async def _health(app: RolloutServer, _call: Call) -> Answer:
    await trio.lowlevel.checkpoint()
    payload = _backend_health(app)
    payload.setdefault("status", "ok")
    payload.setdefault("application", None)
    payload["version"] = package_version()
    payload["instance_id"] = app.instance_id
    payload["process_id"] = app.process_id
    payload["extensions"] = list(app.registry.extensions)
    payload["polling_lease_timeout_sec"] = app.registry.polling_lease_timeout_sec
    if app.policy is not None:
        payload["policy"] = app.policy.state()
    if app.gateway is not None:
        payload["gateway"] = app.gateway.health()
    payload["lifecycle"] = unstructure(app.registry.lifecycle)
    if app.registry.store is not None:
        trouble = app.registry.trouble
        payload["state"] = {"status": "ok" if trouble is None else "error", "detail": trouble}
    return Answer(dump_json(payload))
