"""Transports that record calls of a model, on trio and on the asyncio side of a bridge.

Theory of operation: whatever asks the model (the OpenAI SDK in any version and with any of its
helpers, a framework, or plain httpx) sends a request and reads the bytes of its answer. Between
the two stands a `WatchingTransport`. It reads along and notifies the recorder, so that retries,
streams, cancelled calls and failures are all seen as they happen on the wire.

`WatchingTransport` awaits only the requests and streams that it is given, so it runs in either
loop. The clock, the connections and how a body is closed are those of its subclasses:
`RecordingTransport` for trio, `AsyncioTransport` for the loop of a bridge.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, ClassVar, cast
from urllib.parse import quote

import httpx
import trio
from attrs import define, evolve, field, frozen

from rollout._endpoint_failures import mark_error, mark_response
from rollout._http import library_of, stream_class
from rollout._telemetry import names, tracing
from rollout.context import RolloutContext
from rollout.integrations.recording.calls import (
    Answer,
    Call,
    error_message,
    load,
    parse,
    read_body,
)
from rollout.integrations.recording.recorder import ConversationRecorder
from rollout.integrations.recording.streams import Events, StreamedAnswer
from rollout.integrations.transport.connections import (
    Connections,
    current_connections,
    loop_connections,
)
from rollout.trajectory.totals import read_usage

__all__ = [
    "BODY",
    "CONVERSATION_HEADER",
    "NO_KEY",
    "AsyncioTransport",
    "Endpoint",
    "ReadAlong",
    "Reading",
    "RecordingTransport",
    "Rewrite",
    "WatchingTransport",
]

BODY = "rollout.body"
"""The extension of a request that holds its body as an object, since parsing it takes long."""

NO_KEY = "no-key-needed"
"""Stands for the key of an endpoint that needs none; it is never sent."""

CONVERSATION_HEADER = "X-Rollout-Conversation"
"""The header that says to a gateway which conversations a call belongs to, percent-encoded; empty
for a call that is not recorded."""

_CHAT = "/chat/completions"
_WITH_STREAM_OPTIONS = frozenset({"chat", "completions"})
_UNRECORDABLE = {"/completions": True, "/embeddings": False}
"""Routes that are not recorded, and whether that is worth a warning."""

_OK = range(200, 300)
_LONGEST_REST = 65_536

Rewrite = Callable[[bytes, dict[str, Any]], bytes]


@frozen
class Endpoint:
    """The endpoint of a rollout's policy.

    Attributes:
        base_url: The URL to which routes such as ``/chat/completions`` are added.
        query: The query that goes with each request.
        api_key: The key, ``None`` if it needs none.
        records: Whether it is a model gateway, which records calls by itself.
    """

    base_url: str
    query: dict[str, str]
    api_key: str | None
    records: bool = False

    @classmethod
    def of(cls, url: str, api_key: str | None) -> Endpoint:
        """Read a ``chat_completions_url``, which may be the base or the route itself."""
        parsed = httpx.URL(url)
        path = parsed.path.rstrip("/").removesuffix(_CHAT)
        base = parsed.copy_with(path=path or "/", query=None, fragment=None)
        return cls(str(base).rstrip("/"), dict(parsed.params), api_key)

    @classmethod
    def of_rollout(cls, context: RolloutContext) -> Endpoint:
        """Return the endpoint of the policy that a rollout calls."""
        endpoint = cls.of(context.chat_completions_url, context.api_key)
        return evolve(endpoint, records=context.gateway_source is not None)

    def __repr__(self) -> str:
        return f"<Endpoint {self.shown}>"

    @property
    def shown(self) -> str:
        """The base without a password that it may hold."""
        return str(httpx.URL(self.base_url).copy_with(userinfo=b""))

    def has(self, url: httpx.URL) -> bool:
        """Whether a URL is at the same host and port, so that the key may go there."""
        return _origin(url) == self._own_origin

    @cached_property
    def _own_origin(self) -> tuple[str, str, int | None]:
        return _origin(httpx.URL(self.base_url))

    def guard_key(self, request: httpx.Request) -> None:
        """Remove the key from a request to elsewhere, and a placeholder key from any."""
        given = request.headers.get("Authorization", "")
        key = self.api_key
        elsewhere = not self.has(request.url)
        if given == f"Bearer {NO_KEY}" or (elsewhere and key and given == f"Bearer {key}"):
            del request.headers["Authorization"]


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


@define(eq=False)
class WatchingTransport(httpx.AsyncBaseTransport):
    """Sends requests and records what they say.

    Attributes:
        endpoint: The endpoint of the policy. The key goes nowhere else.
        recorder: Takes the calls, ``None`` to record nothing.
        parent: The trace context that the calls belong to; ``None``: that of the rollout that runs
            where they are sent.
        conversation: The name of the conversations that the calls belong to.
        stream_usage: Whether to ask for the usage of streams.
        rewrite: Returns what is handed on of an event of a stream, given it and its object.
    """

    hides: ClassVar[bool]
    """Whether the usage of a stream is taken out if its caller has not asked for it."""

    hides_mark: ClassVar[bool] = False
    """Whether the mark at the end of a stream is taken out."""

    apis: ClassVar[dict[str, str]] = {_CHAT: "chat", "/responses": "responses"}
    """The routes that are recorded, by their end, and what `Call.api` says of them."""

    body: ClassVar[type[ReadAlong]]
    """Takes the place of the body of an answer."""

    endpoint: Endpoint
    recorder: ConversationRecorder | None
    conversation: str = field(kw_only=True)
    stream_usage: bool = field(default=True, kw_only=True)
    rewrite: Rewrite | None = field(default=None, kw_only=True)
    parent: Any = field(default=None, kw_only=True, repr=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.endpoint.shown}>"

    @staticmethod
    @abstractmethod
    def clock() -> float:
        """Return the time of the loop that it is used in, in seconds."""

    @abstractmethod
    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a connection of this side."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and hand the answer on.

        A cancellation closes the connection, and the call is recorded as interrupted.
        """
        self.endpoint.guard_key(request)
        if not self.endpoint.has(request.url):
            return await self.send(request)
        try:
            response = await self._handle(request)
        except library_of(request).TransportError as error:
            mark_error(error)
            raise
        mark_response(response)
        return response

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the endpoint, and record it."""
        recorder = self.recorder
        parent = tracing.current_parent() if self.parent is None else self.parent
        if self.endpoint.records:
            named = "" if recorder is None else self.conversation
            request.headers[CONVERSATION_HEADER] = quote(named)
            # One for this call alone; the streams are read along as ever.
            recorder = recorder and ConversationRecorder()
        api = None
        if recorder is not None and request.method == "POST":
            path = request.url.path
            api = next((api for end, api in self.apis.items() if path.endswith(end)), None)
            for end, warn in _UNRECORDABLE.items() if api is None else ():
                if not self.endpoint.records and path.endswith(end):
                    recorder.note_unrecorded(path, warn=warn)
        if recorder is None or api is None:
            tracing.inject(parent, request.headers)
            return await self.send(request)
        content = await request.aread()
        body = request.extensions.get(BODY)
        if not isinstance(body, dict):
            body = parse(content)
        body = body if isinstance(body, dict) else {}
        asks = self.stream_usage and api in _WITH_STREAM_OPTIONS and _wants_usage(body)
        request = self._readable(request, content, body, asks=asks)
        call = recorder.start(
            body,
            api=api,
            conversation=self.conversation,
            at=datetime.now(UTC),
            retry=_retry(request),
        )
        span = None
        if not self.endpoint.records:  # else the gateway has a span of it
            span = tracing.begin_call(parent, request.url, body, anthropic=api == "messages")
        tracing.inject(parent if span is None else tracing.context_with(span), request.headers)
        reading = Reading(
            recorder,
            call,
            span=span,
            clock=self.clock,
            hide_usage=self.hides and asks,
            hide_mark=self.hides_mark and api == "chat",
            rewrite=self.rewrite,
        )
        try:
            response = await self.send(request)
        except BaseException as error:
            reading.fail(error)
            raise
        reading.begin(response)
        body = stream_class(self.body, library_of(request).AsyncByteStream)
        response.stream = body(cast("httpx.AsyncByteStream", response.stream), reading)
        return response

    def _readable(
        self, request: httpx.Request, content: bytes, body: dict[str, Any], *, asks: bool
    ) -> httpx.Request:
        """Return a request whose answer says what is read; *asks* for the usage of a stream."""
        if self.hides and body.get("stream") is True:
            # Nothing can be taken out of a compressed stream.
            request.headers["Accept-Encoding"] = "identity"
        return _asking_for_usage(request, content, body) if asks else request


def _retry(request: httpx.Request) -> int:
    text = request.headers.get("x-stainless-retry-count", "")
    return int(text) if text.isdecimal() and text.isascii() else 0


def _wants_usage(body: dict[str, Any]) -> bool:
    """Whether it is a stream whose caller has not decided about usage."""
    options = body.get("stream_options") or {}
    return (
        body.get("stream") is True and isinstance(options, dict) and "include_usage" not in options
    )


def _asking_for_usage(
    request: httpx.Request, content: bytes, body: dict[str, Any]
) -> httpx.Request:
    if "stream_options" in body:
        # Not out of the parsed body, which holds no more than what JSON can say faithfully.
        whole = json.loads(content)
        whole["stream_options"] = {**(whole["stream_options"] or {}), "include_usage": True}
        content = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
    else:
        content = content.rstrip()[:-1] + b',"stream_options":{"include_usage":true}}'
    headers = request.headers.copy()
    headers.pop("Content-Length", None)
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=content,
        extensions=request.extensions,
    )


@define(eq=False)
class Reading:
    """Reads one answer along, and notifies the recorder how it ended, once.

    Attributes:
        recorder: Takes the answer.
        call: The call that is answered.
        clock: The seconds of the loop that it is used in.
        span: The span of the call, if there is one.
        hide_usage: Whether the event that holds nothing but usage is not handed on.
        hide_mark: Whether the mark at the end of a stream is not handed on.
        rewrite: See `WatchingTransport`.
        whole: A whole answer that was not compressed, parsed, once all of it is read.
        library: The module whose exceptions the answer raises, httpx or httpx2.
    """

    recorder: ConversationRecorder
    call: Call
    clock: Callable[[], float] = field(kw_only=True)
    span: Any = field(default=None, kw_only=True)
    hide_usage: bool = field(kw_only=True)
    hide_mark: bool = field(kw_only=True)
    rewrite: Rewrite | None = field(kw_only=True)
    whole: Any = field(default=None, init=False)
    library: Any = field(default=httpx, init=False)
    _began: float = field(init=False)
    _status: int = field(default=0, init=False)
    _decoder: Any = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)
    _sniffs: bool = field(default=False, init=False)
    _body: bytearray = field(factory=bytearray, init=False)
    _events: Events | None = field(default=None, init=False)
    _streamed: StreamedAnswer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._began = self.clock()
        self._streamed = StreamedAnswer(self.call.api)

    def begin(self, response: httpx.Response) -> None:
        """Read status and headers."""
        headers = response.headers
        self.library = library_of(response)
        self._status = self.call.status_code = response.status_code
        self.call.request_id = headers.get("x-request-id")
        if headers.get("content-encoding", "identity").lower() not in {"", "identity"}:
            # A response of its own decodes as the one that is handed on does.
            own = type(response)(200, headers=headers)
            self._decoder = own._get_content_decoder()  # noqa: SLF001
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if self._status in _OK and kind == "text/event-stream":
            self._events = Events()
        else:
            # Some endpoints call a stream something else. The SDK does not mind.
            self._sniffs = self._status in _OK and self.call.streamed

    @property
    def _hides(self) -> bool:
        """Whether events can be taken out: not of a compressed stream."""
        wanted = self.hide_usage or self.hide_mark or self.rewrite is not None
        return wanted and self._events is not None and self._decoder is None

    @property
    def rest_counts(self) -> bool:
        """Whether the rest of an answer is worth reading though its caller does not read it.

        Behind the mark of a stream's end it is, since the connection can be kept then; some
        versions of the SDK stop reading there. So is a refusal, which says why: the SDK closes
        unread what it tries again.
        """
        return self._streamed.done or self._status not in _OK

    def feed(self, chunk: bytes) -> bytes:
        """Read a chunk; return the part of it that is handed on."""
        passed = self._take(self._decode(chunk))
        return b"".join(passed) if self._hides else chunk

    def _decode(self, chunk: bytes | None) -> bytes:
        """Decode a chunk, or what is left at the end."""
        if self._decoder is None:
            return chunk or b""
        try:
            data = self._decoder.flush() if chunk is None else self._decoder.decode(chunk)
            # httpx2 decodes in pieces, as they are asked for.
            return bytes(data) if isinstance(data, bytes) else b"".join(data)
        except self.library.DecodingError:
            return b""  # whoever reads the answer gets that error

    def _take(self, data: bytes) -> list[bytes]:
        """Read decoded bytes; return the events that are handed on."""
        if self._sniffs and data.strip():
            self._sniffs = False
            if data.lstrip()[:1] not in {b"{", b"["}:
                self._events = Events()
        if self._events is None:
            self._body += data
            return []
        passed: list[bytes] = []
        for event in self._events.feed(data):
            was_done = self._streamed.done
            only_usage = self._streamed.add(event)
            ends_here = self._streamed.done and not was_done
            if not (ends_here and self.hide_mark) and not (only_usage and self.hide_usage):
                passed.append(self._rewritten(event))
        if self._streamed.over:
            self._finish(self._streamed.answer(ended=True))
        return passed

    def _rewritten(self, event: bytes) -> bytes:
        body = self._streamed.last
        return event if self.rewrite is None or body is None else self.rewrite(event, body)

    def end(self) -> bytes:
        """Read the end of the answer; return what is left to hand on."""
        self._take(self._decode(None))
        if self._events is None:
            self._finish(self._whole())
            return b""
        rest = self._events.rest()
        if self._finished:
            return rest if self._hides else b""
        self._streamed.add(rest)
        self._finish(self._streamed.answer(ended=True))
        return rest if self._hides else b""

    def close(self) -> None:
        """End a reading that stopped before the end of the answer."""
        if self._finished:
            return
        if self._events is not None:
            self._finish(self._streamed.answer())
        elif self._status in _OK:
            self._finish(Answer(complete=False))
        else:
            self._finish(self._whole())

    def fail(self, error: BaseException) -> None:
        """End a reading with the exception that came out of the answer."""
        answer = self._streamed.answer() if self._events is not None else Answer()
        if isinstance(error, Exception):
            name = type(error).__name__
            answer.error = f"{name}: {error}" if str(error) else name
        answer.complete = False
        self._finish(answer)

    def _whole(self) -> Answer:
        if self._status in _OK:
            body = load(bytes(self._body))
            self.whole = body if self._decoder is None else None
            return read_body(body, self.call.api)
        said = error_message(parse(bytes(self._body)))
        return Answer(error=f"HTTP {self._status}" + (f": {said}" if said else ""))

    def _finish(self, answer: Answer) -> None:
        self._finished = True
        self.recorder.finish(self.call, answer, self.clock() - self._began)
        if self.span is not None:
            span, self.span = self.span, None
            _end_span(span, self.call)


def _end_span(span: Any, call: Call) -> None:
    usage = {} if call.usage is None else read_usage(call.usage)
    reasons = [choice.finish_reason for choice in call.choices if choice.finish_reason]
    failed = None if call.outcome == "complete" else call.outcome
    if failed is not None and call.status_code is not None and call.status_code not in _OK:
        failed = str(call.status_code)
    attributes = {
        names.RESPONSE_MODEL: call.model if call.choices else None,
        names.RESPONSE_ID: call.response_id,
        names.FINISH_REASONS: reasons or None,
        names.INPUT_TOKENS: usage.get("prompt_tokens"),
        names.OUTPUT_TOKENS: usage.get("completion_tokens"),
    }
    tracing.end_call(span, attributes, failed)


@define(eq=False)
class ReadAlong(httpx.AsyncByteStream):
    """The body of an answer on its way to its caller.

    Attributes:
        stream: The body as it comes.
        reading: Reads it along.
        rest_sec: How long the rest of an answer may take that its caller does not read, in seconds.
    """

    rest_sec: ClassVar[float] = 0.2

    stream: httpx.AsyncByteStream
    reading: Reading
    _source: AsyncIterator[bytes] | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)
    _whole: bool = field(default=False, init=False)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._source is None:
            self._source = aiter(self.stream)
        while not self._ended:
            try:
                chunk = await anext(self._source)
            except StopAsyncIteration:
                self._ended = self._whole = True
                rest = self.reading.end()
                if rest:
                    return rest
                break
            except BaseException as error:
                self._ended = True
                if isinstance(error, self.reading.library.TransportError):
                    mark_error(error)
                self.reading.fail(error)
                # A stream whose reader is cancelled may have nobody else who closes it.
                await self.aclose()
                raise
            passed = self.reading.feed(chunk)
            if passed:
                return passed
        raise StopAsyncIteration

    @abstractmethod
    async def aclose(self) -> None:
        """Give the connection back, or close it if the answer is not over."""

    def leave(self) -> bool:
        """Stop handing the body on; return whether the rest of it is worth reading."""
        over, self._ended = self._ended, True
        return not over and self.reading.rest_counts

    async def read_rest(self) -> None:
        """Read the rest of the body if it is short; errors are ignored."""
        if self._source is None:
            self._source = aiter(self.stream)
        size = 0
        with suppress(self.reading.library.HTTPError):
            while size < _LONGEST_REST:
                chunk = await anext(self._source, None)
                if chunk is None:
                    break
                self.reading.feed(chunk)
                size += len(chunk)

    async def close_stream(self) -> None:
        """Close the iterator and the stream of the body."""
        try:
            close: Any = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
        finally:
            await self.stream.aclose()


class _TrioReadAlong(ReadAlong):
    """A body that is closed even where its reader is cancelled."""

    async def aclose(self) -> None:
        if self._whole:
            await self.stream.aclose()
            return
        try:
            if self.leave():
                with trio.move_on_after(self.rest_sec):
                    await self.read_rest()
        finally:
            self.reading.close()
            with trio.CancelScope(shield=True):
                # The bytes come through nested generators, and only the outermost can be closed
                # from here; trio complains about the others. A cancellation goes through them all.
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await self.read_rest()
                await self.close_stream()


@define(eq=False, repr=False)
class RecordingTransport(WatchingTransport):
    """Sends requests over shared connections of trio and records what they say.

    The bytes pass through unchanged, but for two events of a stream. It says what it cost only if
    asked to: the transport asks, and takes out the one event that its caller has not asked for. And
    the mark at its end is taken out, since some versions of the SDK stop reading there: generators
    that are left before they have ended are garbage for trio to complain about.
    """

    hides = True
    hides_mark = True
    clock = staticmethod(trio.current_time)
    body = _TrioReadAlong

    _connections: Connections = field(factory=current_connections, init=False)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a shared connection."""
        return await self._connections.send(request)

    async def aclose(self) -> None:
        """Close connections of its own; shared ones stay open."""
        if self._connections.kept:
            await trio.lowlevel.checkpoint()
        else:
            await self._connections.aclose()


class _AsyncioReadAlong(ReadAlong):
    """A body that is read to its end where little is left of it."""

    async def aclose(self) -> None:
        try:
            if self.leave():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.rest_sec):
                        await self.read_rest()
        finally:
            self.reading.close()
            await self.close_stream()


@define(eq=False, repr=False)
class AsyncioTransport(WatchingTransport):
    """Sends requests over the connections of the running loop and records what they say.

    The usage of streams is asked for, and every byte is handed on: the frameworks read the event
    that comes with it.
    """

    hides = False
    clock = staticmethod(time.monotonic)
    body = _AsyncioReadAlong

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a connection of the running loop."""
        connections = await loop_connections()
        return await connections.send(request)
