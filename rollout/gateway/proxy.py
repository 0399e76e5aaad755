"""One call of a model: to the endpoint, and its answer back to the agent.

Theory of operation: a call goes through the transport that records calls in process as well, so
there is one engine for both. An answer that is no stream is read to its end before a byte of it
goes out, so that whatever goes wrong becomes an error that says so. A stream goes out piece by
piece, as fast as the agent reads; what goes wrong within it is an event of its own, and the
connection ends without the mark of a whole answer.
"""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

import trio
from attrs import define, evolve, field, frozen

from rollout._endpoint_failures import is_refusal, refuses_key
from rollout._redaction import Redactor
from rollout._telemetry import tracing
from rollout.codec import dump_json
from rollout.context import RolloutContext
from rollout.gateway.counts import ModelCounts
from rollout.gateway.flow import Caller, Flow
from rollout.gateway.limits import Price, Used, price_of
from rollout.gateway.places import Place
from rollout.gateway.policy import Policy
from rollout.gateway.retries import Outcome, Retries
from rollout.gateway.tokens import Capture
from rollout.gateway.wire import (
    LIMIT_HEADER,
    RECORDED,
    TRACE_HEADERS,
    ModelReply,
    Route,
    answer_headers,
    as_retry,
    error_event,
    error_reply,
    forwarded,
)
from rollout.integrations.recording.recorder import MAIN, ConversationRecorder
from rollout.integrations.transport.connections import Connections, fastest_library, timeouts
from rollout.integrations.transport.recording import (
    BODY,
    CONVERSATION_HEADER,
    Endpoint,
    ReadAlong,
    RecordingTransport,
    Rewrite,
)
from rollout.rules.retry import retry_after_sec
from rollout.trajectory.totals import read_usage
from rollout.types.limits import Limits

__all__ = ["CallSettings", "ModelCall", "ReplyWriter", "Session"]

_OK = range(200, 300)
_REDIRECTS = range(300, 400)
_ENDED = "the rollout has ended, and its calls with it"


class ReplyWriter(Protocol):
    """Sends an answer to the agent as it comes; each step waits until it is written."""

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head."""

    async def piece(self, data: bytes) -> None:
        """Send a part of the body."""


@define(eq=False, repr=False)
class _UpstreamTransport(RecordingTransport):
    """Sends the calls of agents to their endpoint and records them."""

    hides_mark = False
    apis = RECORDED

    _connections: Connections = field(kw_only=True, alias="connections")


@frozen(kw_only=True)
class CallSettings:
    """What a gateway's settings say of calls; see `rollout.gateway.ModelGateway`."""

    models: Mapping[str, str]
    prices: Mapping[str, Price]
    capture: str | None
    silence_sec: float
    pause_wait_sec: float
    max_answer_bytes: int
    stream_usage: bool
    retries: int
    retry_sec: float

    def model(self, name: str | None) -> str | None:
        """Return the name that the endpoint gets for the one that the agent sends."""
        default = self.models.get("*", name)
        return default if name is None else self.models.get(name, default)


class Session:
    """A rollout that calls its model through a gateway.

    Args:
        endpoint: Where its calls go, unless *flow* says it.
        secrets: What agents must not see of endpoints.
        flow: Where and when its calls go, if that is to be decided.
        context: What the rollout's own code gets; it names the gateway and the token.
        connections: The connections to endpoints.
        policy: Says when calls may be sent, and the version that answers.
        settings: The gateway's settings.
        limits: The rollout's limits.
        limited: Says whether they count at the moment.
        counts: What is counted of all calls of the gateway.

    Attributes:
        counts: As above.
        context: What the rollout's own code gets.
        own_recorder: Records calls unless the rollout's code has a recorder of its own.
        policy: As above.
        settings: As above.
        flow: As above.
        caller: The rollout in the flow.
        used: What its calls have used.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        secrets: tuple[str | None, ...],
        flow: Flow[Endpoint] | None,
        context: RolloutContext,
        connections: Connections,
        policy: Policy,
        settings: CallSettings,
        limits: Limits,
        limited: Callable[[], bool],
        counts: ModelCounts,
    ) -> None:
        recorder = ConversationRecorder(secrets=secrets, info=context.info)
        context.gateway_source = recorder
        self.context = context
        self.redactor = Redactor(secrets)
        self.flow = flow
        self.caller: Caller[Endpoint] = Caller()
        self._endpoint = endpoint
        self.policy = policy
        self.settings = settings
        self.used = Used()
        self.counts = counts
        self._limits = limits
        self._limited = limited
        self.own_recorder = recorder
        self._connections = connections
        self._calls: set[trio.CancelScope] = set()
        self._trace = tracing.current_trace()

    def __repr__(self) -> str:
        return f"<Session of {self.context.rollout_id!r}: {len(self._calls)} calls under way>"

    @property
    def recorder(self) -> ConversationRecorder:
        """What records its calls: the sample source of its code if that can, or its own."""
        source = self.context.sample_source
        return source if isinstance(source, ConversationRecorder) else self.own_recorder

    def capture(self, body: dict[str, Any], route: Route) -> Capture | None:
        """Return the capture of the tokens of a call, ``None`` for none."""
        if self.settings.capture is None or not route.counts:
            return None
        self.recorder.captures_tokens = True
        return Capture.of(body, RECORDED[route.path])

    @property
    def endpoint(self) -> Endpoint:
        """Where requests go that wait for no place."""
        if self.flow is None:
            return self._endpoint
        return self.flow.of_other_requests(self.caller, trio.current_time())

    def place(self) -> Place | None:
        """Return a place for a call to take, ``None`` if it needs none."""
        return None if self.flow is None else Place(self.caller, flow=self.flow)

    def transport(
        self,
        endpoint: Endpoint,
        conversation: str,
        rewrite: Rewrite | None,
        headers: Mapping[str, str],
    ) -> _UpstreamTransport:
        """Return the transport for one call; one without a conversation leaves no record.

        Its span is below the one that the headers of the agent's request name, if they name one.
        """
        parent = tracing.parent_of(headers)
        if parent is None and self._trace is not None:
            parent = self._trace.parent
        return _UpstreamTransport(
            endpoint,
            self.recorder if conversation else ConversationRecorder(),
            conversation=conversation,
            stream_usage=self.settings.stream_usage,
            rewrite=rewrite,
            parent=parent,
            connections=self._connections,
        )

    def refusal(self, model: str) -> tuple[str, str] | None:
        """Return the limit that forbids another call of a model, and a message; else ``None``."""
        limits = self._limits
        if not self._limited():
            return None
        name = self.used.reached(limits)
        if name is not None:
            self.own_recorder.limit_reached = self.recorder.limit_reached = name
            return name, f"the rollout has reached its limit of {name}: {getattr(limits, name):g}"
        unpriced = price_of(self.settings.prices, model) is None
        if limits.cost_usd is not None and unpriced:
            return "cost_usd", f"the rollout's cost is limited, and {model!r} has no price"
        return None

    def begun(self, scope: trio.CancelScope) -> None:
        """Note a call that is to be cancelled when the rollout ends."""
        self._calls.add(scope)

    def ended(self, scope: trio.CancelScope) -> None:
        """Note that a call is over."""
        self._calls.discard(scope)

    def close(self) -> None:
        """Cancel the calls that are under way."""
        for scope in self._calls:
            scope.cancel()
        if self.flow is not None:
            self.flow.leave(self.caller)


@define(eq=False)
class ModelCall:
    """One request of an agent that may be passed on.

    Attributes:
        session: The rollout.
        route: The route.
    """

    session: Session
    route: Route
    _method: str = field(kw_only=True, alias="method")
    _query: bytes = field(kw_only=True, alias="query")
    _headers: list[tuple[bytes, bytes]] = field(kw_only=True, alias="headers", repr=False)
    _begun: bool = field(default=False, init=False)
    _capture: Capture | None = field(default=None, init=False)
    _outcome: Outcome | None = field(default=None, init=False)

    @property
    def has_body(self) -> bool:
        """Whether it has a body, which is JSON."""
        return self._method == "POST"

    async def run(
        self, content: bytes, body: dict[str, Any] | None, writer: ReplyWriter
    ) -> ModelReply | bool:
        """Ask the endpoint; return the answer, or whether all of it has been streamed.

        Args:
            content: The body of the request, as it was sent.
            body: The same, parsed; ``None`` for a request without one.
            writer: Where a streamed answer goes.

        Cancelled, it closes the connection to the endpoint. It is cancelled by the end of its
        rollout, too.
        """
        session = self.session
        with trio.CancelScope() as scope:
            session.begun(scope)
            try:
                return await self._ask(content, body, writer)
            finally:
                session.ended(scope)
        return False if self._begun else self.error(401, _ENDED)

    async def _ask(
        self, content: bytes, body: dict[str, Any] | None, writer: ReplyWriter
    ) -> ModelReply | bool:
        library = fastest_library()
        model = ""
        if body is not None:
            content, body = self._with_model(content, body)
            model = str(body.get("model", ""))
            self._capture = self.session.capture(body, self.route)
            if self._capture is not None:
                body = self._capture.body
                content = dump_json(body)
        if self.route.counts:
            refused = self.session.refusal(model)
            if refused is not None:
                self.session.counts.calls["refused"] += 1
                reply = self.error(403, refused[1])
                reply.headers.append((LIMIT_HEADER, refused[0].encode()))
                return reply
            self.session.used.calls += 1
            self.session.counts.begun += 1
        send = partial(self._send, library, content, body, model, writer)
        if not self.route.counts:
            return await send(self.session.endpoint)
        return await self._answered(send, writer)

    async def _answered(
        self, send: Callable[..., Awaitable[ModelReply | bool]], writer: ReplyWriter
    ) -> ModelReply | bool:
        """Send the call when it may be, and again where that helps."""
        policy, settings = self.session.policy, self.session.settings
        retries = Retries(settings.retries, settings.retry_sec)
        while await policy.wait(settings.pause_wait_sec):
            answer: ModelReply | bool = False
            place, self._outcome = self.session.place(), None
            if place is None:
                endpoint = self.session.endpoint
            else:
                endpoint = await self._take(place, retries)
            try:
                if policy.paused:
                    continue
                with policy.sending() as scope:
                    answer = await send(endpoint, retries.failures)
            finally:
                if place is not None:
                    place.give_back(self._outcome)
            if policy.took_back(scope):
                if self._begun:
                    message = "the call was aborted, since the policy is paused"
                    await writer.piece(error_event(503, message, anthropic=self.route.anthropic))
                    return False
                continue
            delay = self._retry_delay_sec(retries)
            if delay is None:
                return answer
            self._waited(delay)
            await trio.sleep(delay)
        return self.error(503, "the policy is paused, and has not been resumed in time")

    async def _take(self, place: Place, retries: Retries) -> Endpoint:
        """Wait for a place for the call."""
        try:
            return await place.take()
        finally:
            waited = place.waited_sec(trio.current_time())
            self._waited(waited)
            retries.waited(waited)

    def _retry_delay_sec(self, retries: Retries) -> float | None:
        """Return how long to wait before the call is sent again, ``None`` if it is not."""
        if self._begun or self._outcome is None:
            return None
        now, flow = trio.current_time(), self.session.flow
        moves = flow is not None and flow.moves(self.session.caller, now)
        delay = retries.delay_sec(self._outcome, now, moves=moves, draw=random.random())  # noqa: S311
        if delay is not None:
            self.session.counts.retries += 1
        return delay

    def _waited(self, seconds: float) -> None:
        """Count a wait of the call for a place or a retry."""
        self.session.counts.wait_sec += seconds
        if self._conversation():
            recorder = self.session.recorder
            recorder.model_wait_sec = (recorder.model_wait_sec or 0.0) + seconds

    async def _send(
        self,
        library: Any,
        content: bytes,
        body: dict[str, Any] | None,
        model: str,
        writer: ReplyWriter,
        endpoint: Endpoint,
        failures: int = 0,
    ) -> ModelReply | bool:
        rewrite = None if self._capture is None else self._capture.stripped_event
        transport = self.session.transport(
            endpoint, self._conversation(), rewrite, self._trace_headers
        )
        request = self._request(library, content, body, endpoint, failures)
        began, began_at = self.session.policy.version, trio.current_time()
        stream: Any = None
        outcome = "interrupted"
        try:
            response = await transport.handle_async_request(request)
            stream = response.stream
            answer = await self._hand_on(response, writer)
            self._outcome = _outcome_of(response)
        except (library.TransportError, _TooLargeError) as error:
            self.session.own_recorder.endpoint_failed = True
            self.session.own_recorder.key_refused = False
            outcome = "failed"
            lost = (library.NetworkError, library.ConnectTimeout, library.RemoteProtocolError)
            if isinstance(error, lost):
                self._outcome = Outcome(broken=True)
            status, message = self._failure(library, error)
            if not self._begun:
                return self.error(status, message)
            await writer.piece(error_event(status, message, anthropic=self.route.anthropic))
            return False
        else:
            self._note_end(stream)
            return answer
        finally:
            if stream is not None:
                await stream.aclose()
                self._count(stream, model, began)
            if self.route.counts:
                call = stream.reading.call if isinstance(stream, ReadAlong) else None
                self.session.counts.add(call, outcome, trio.current_time() - began_at)

    async def _hand_on(self, response: Any, writer: ReplyWriter) -> ModelReply | bool:
        status = response.status_code
        if status in _REDIRECTS:
            return self.error(502, "the model's endpoint answers with a redirect")
        headers = answer_headers(response.headers.raw)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if status in _OK and kind == "text/event-stream":
            self._begun = True
            await writer.begin(status, headers)
            await self._stream(response.stream, writer)
            return True
        whole = bytearray()
        async for piece in response.stream:
            whole += piece
            self._check_size(len(whole))
        data = bytes(whole)
        if status not in _OK:
            data = self._without_secrets(data)
        elif self._capture is not None:
            data = self._capture.stripped(data, response.stream.reading.whole)
        return ModelReply(status, data, headers)

    async def _stream(self, pieces: Any, writer: ReplyWriter) -> None:
        size = 0
        async for piece in pieces:
            size += len(piece)
            self._check_size(size)
            if isinstance(pieces, ReadAlong) and pieces.reading.call.outcome == "failed":
                self._note_end(pieces)  # before the agent reads of it, and ends
            await writer.piece(piece)

    def _check_size(self, size: int) -> None:
        if size > self.session.settings.max_answer_bytes:
            raise _TooLargeError

    def _request(
        self,
        library: Any,
        content: bytes,
        body: dict[str, Any] | None,
        endpoint: Endpoint,
        failures: int,
    ) -> Any:
        own = _parsed(library, endpoint.base_url)
        headers = [
            *as_retry(forwarded(self._headers), failures),
            (b"accept-encoding", b"identity"),
            (b"host", own.netloc),
        ]
        if own.userinfo:
            basic = b64encode(unquote_to_bytes(own.userinfo))
            headers.append((b"authorization", b"Basic " + basic))
        elif endpoint.api_key is not None and self._key_header:
            headers.append((b"x-api-key", endpoint.api_key.encode()))
        elif endpoint.api_key is not None:
            headers.append((b"authorization", b"Bearer " + endpoint.api_key.encode()))
        query = [*endpoint.query.items(), *parse_qsl(self._query.decode("latin-1"))]
        extensions: dict[str, Any] = {
            "timeout": timeouts(self.session.settings.silence_sec, library).as_dict(),
        }
        if body is not None:
            extensions[BODY] = body
        return library.Request(
            self._method,
            _parsed(library, f"{endpoint.base_url}{self.route.path}"),
            params=query or None,
            headers=headers,
            content=content if body is not None else None,
            extensions=extensions,
        )

    def _with_model(self, content: bytes, body: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """Return the body with the name that the endpoint knows its model by."""
        given = body.get("model")
        model = self.session.settings.model(given if isinstance(given, str) else None)
        if model is None or model == given:
            return content, body
        body = {**body, "model": model}
        return dump_json(body), body

    def error(self, status: int, message: str) -> ModelReply:
        """Return an error as the client of the route reads it."""
        return error_reply(status, message, anthropic=self.route.anthropic)

    def _count(self, stream: Any, model: str, began: int | None) -> None:
        """Count what a call has used; *began* is the version that it was sent to."""
        if not isinstance(stream, ReadAlong):
            return
        call, ended = stream.reading.call, self.session.policy.version
        if began is not None and ended is not None:
            call.policy_versions = began, ended
        if call.usage is not None:
            self.session.used.add(call.usage, price_of(self.session.settings.prices, model))
        if self.session.flow is not None and self._outcome is not None and call.complete:
            tokens = read_usage(call.usage or {}).get("completion_tokens")
            self._outcome = evolve(
                self._outcome, latency_sec=call.latency_sec or 0.0, tokens=tokens
            )

    @property
    def _key_header(self) -> bool:
        """Whether the key goes in the header of Anthropic's clients, as the token came."""
        return self.route.anthropic and b"x-api-key" in dict(self._headers)

    @property
    def _trace_headers(self) -> dict[str, str]:
        return {
            name.decode(): value.decode("latin-1")
            for name, value in self._headers
            if name in TRACE_HEADERS
        }

    def _conversation(self) -> str:
        name = dict(self._headers).get(CONVERSATION_HEADER.lower().encode())
        return MAIN if name is None else unquote(name.decode("latin-1"))

    def _without_secrets(self, data: bytes) -> bytes:
        with suppress(UnicodeDecodeError):
            return self.session.redactor.text(data.decode()).encode()
        return data

    def _failure(self, library: Any, error: Exception) -> tuple[int, str]:
        settings = self.session.settings
        if isinstance(error, library.TimeoutException):
            silence = f"{settings.silence_sec:g}"
            return 504, f"the model's endpoint did not answer, or was silent for {silence} s"
        if isinstance(error, _TooLargeError):
            return 502, f"the model's endpoint sent more than {settings.max_answer_bytes} bytes"
        reason = self.session.redactor.text(f"{type(error).__name__}: {error}".rstrip(": "))
        return 502, f"the model's endpoint cannot be reached ({reason})"

    def _note_end(self, stream: Any) -> None:
        if isinstance(stream, ReadAlong):
            call = stream.reading.call
            status = call.status_code or 0
            recorder = self.session.own_recorder
            recorder.endpoint_failed = call.outcome == "failed" and (
                status in _OK or is_refusal(status)
            )
            recorder.key_refused = refuses_key(status)


@lru_cache(maxsize=256)
def _parsed(library: Any, url: str) -> Any:
    """Return a URL as a library has it, which takes it longer than the rest of a request."""
    return library.URL(url)


def _outcome_of(response: Any) -> Outcome:
    header = response.headers.get("retry-after")
    asked = None if header is None else retry_after_sec(header, datetime.now(UTC))
    return Outcome.of_status(response.status_code, asked)


class _TooLargeError(Exception):
    """An endpoint sends more than it may."""
