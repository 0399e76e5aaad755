"""An httpx transport that records calls of a model on their way.

Theory of operation: whatever asks the model (the OpenAI SDK in any version and with any of its
helpers, or plain httpx) sends a request and reads the bytes of its answer. Between the two stands
this transport. It reads along and tells the recorder, so that retries, streams, cancelled calls
and failures are all seen as they happen on the wire.

The bytes pass through unchanged, but for two events of a stream. It says what it cost only if
asked to: the transport asks, and takes out the one event that its caller has not asked for. And
the mark at its end is taken out, since some versions of the SDK stop reading there: generators
that are left before they have ended are garbage for trio to complain about.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import trio
from attrs import frozen

from rollout.integrations._connections import Connections, current_connections
from rollout.integrations._model_answers import (
    Answer,
    Events,
    StreamedAnswer,
    error_message,
    parse,
    read_answer,
)
from rollout.integrations._model_calls import Call
from rollout.integrations._recorder import ConversationRecorder

__all__ = ["NO_KEY", "Endpoint", "RecordingTransport"]

NO_KEY = "no-key-needed"
"""Stands for the key of an endpoint that needs none; it is never sent."""

_CHAT = "/chat/completions"
_APIS = {_CHAT: "chat", "/responses": "responses"}
_UNRECORDABLE = ("/completions",)
_OK = range(200, 300)


@frozen
class Endpoint:
    """The endpoint of a rollout's policy.

    Attributes:
        base_url: What routes such as ``/chat/completions`` are added to.
        query: The query that goes with each request.
        api_key: The key, ``None`` if it needs none.
    """

    base_url: str
    query: dict[str, str]
    api_key: str | None

    @classmethod
    def of(cls, url: str, api_key: str | None) -> Endpoint:
        """Read a ``chat_completions_url``, which may be the base or the route itself."""
        parsed = httpx.URL(url)
        path = parsed.path.rstrip("/").removesuffix(_CHAT)
        base = parsed.copy_with(path=path or "/", query=None, fragment=None)
        return cls(str(base).rstrip("/"), dict(parsed.params), api_key)

    def __repr__(self) -> str:
        return f"<Endpoint {self.base_url}>"

    def has(self, url: httpx.URL) -> bool:
        """Whether a URL is at the same host, so that the key may go there."""
        mine, other = urlsplit(self.base_url), urlsplit(str(url))
        return (mine.scheme, mine.netloc) == (other.scheme, other.netloc)


class RecordingTransport(httpx.AsyncBaseTransport):
    """Sends requests over shared connections and records what they say.

    Args:
        endpoint: Where the policy is. The key goes nowhere else.
        recorder: What to tell, ``None`` to record nothing.
        conversation: The name of the conversations that the calls belong to.
        stream_usage: Whether to ask for the usage of streams.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        recorder: ConversationRecorder | None,
        *,
        conversation: str,
        stream_usage: bool = True,
    ) -> None:
        self._endpoint = endpoint
        self._recorder = recorder
        self._conversation = conversation
        self._stream_usage = stream_usage
        self._connections: Connections = current_connections()
        self._owned = not self._connections.kept

    def __repr__(self) -> str:
        return f"<RecordingTransport to {self._endpoint.base_url}>"

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and hand the answer on.

        A cancellation closes the connection, and the call is recorded as interrupted.
        """
        here = self._endpoint.has(request.url)
        self._guard_key(request, here)
        path = request.url.path
        api = next((api for end, api in _APIS.items() if path.endswith(end)), None)
        if self._recorder is None or not here or request.method != "POST":
            return await self._connections.send(request)
        if api is None:
            if path.endswith(_UNRECORDABLE):
                self._recorder.note_unrecorded(path)
            return await self._connections.send(request)
        body = parse(await request.aread())
        body = body if isinstance(body, dict) else {}
        asks = self._stream_usage and api == "chat" and _wants_usage(body)
        if body.get("stream") is True:
            # A compressed stream could not be read along event by event.
            request.headers["Accept-Encoding"] = "identity"
        if asks:
            request = _asking_for_usage(request)
        call = self._recorder.start(
            body,
            api=api,
            conversation=self._conversation,
            at=datetime.now(UTC),
            retry=_retry(request),
        )
        reading = _Reading(self._recorder, call, hide_usage=asks)
        try:
            response = await self._connections.send(request)
        except BaseException as error:
            reading.fail(error)
            raise
        reading.begin(response)
        response.stream = _ReadAlong(cast("httpx.AsyncByteStream", response.stream), reading)
        return response

    def _guard_key(self, request: httpx.Request, here: bool) -> None:
        given = request.headers.get("Authorization", "")
        key = self._endpoint.api_key
        if given == f"Bearer {NO_KEY}" or (not here and key and given == f"Bearer {key}"):
            del request.headers["Authorization"]

    async def aclose(self) -> None:
        """Close connections of its own; shared ones stay open."""
        if self._owned:
            await self._connections.aclose()
        else:
            await trio.lowlevel.checkpoint()


def _retry(request: httpx.Request) -> int:
    text = request.headers.get("x-stainless-retry-count", "")
    return int(text) if text.isdecimal() and text.isascii() else 0


def _wants_usage(body: dict[str, Any]) -> bool:
    """Whether it is a stream whose caller has not decided about usage."""
    options = body.get("stream_options") or {}
    return (
        body.get("stream") is True and isinstance(options, dict) and "include_usage" not in options
    )


def _asking_for_usage(request: httpx.Request) -> httpx.Request:
    # Not out of the parsed body, which holds no more than what JSON can say faithfully.
    body = json.loads(request.content)
    body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    headers = request.headers.copy()
    headers.pop("Content-Length", None)
    return httpx.Request(
        request.method,
        request.url,
        headers=headers,
        content=json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(),
        extensions=request.extensions,
    )


class _Reading:
    """Reads one answer along, and tells the recorder how it ended, once."""

    def __init__(self, recorder: ConversationRecorder, call: Call, *, hide_usage: bool) -> None:
        self._recorder = recorder
        self._call = call
        self._hide_usage = hide_usage
        self._began = trio.current_time()
        self._status = 0
        self._is_stream = False
        self._headers: httpx.Headers = httpx.Headers()
        self._body = bytearray()
        self._events: Events | None = None
        self._streamed = StreamedAnswer(call.api)

    def begin(self, response: httpx.Response) -> None:
        """Take status and headers."""
        self._status = self._call.status_code = response.status_code
        self._headers = response.headers
        self._call.request_id = response.headers.get("x-request-id")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self._is_stream = kind == "text/event-stream"
        if self._status in _OK and self._is_stream and not self._encoded():
            self._events = Events()

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk; return what is handed on of it."""
        if self._events is None:
            self._body += chunk
            return chunk
        passed: list[bytes] = []
        for event in self._events.feed(chunk):
            was_done = self._streamed.done
            only_usage = self._streamed.add(event)
            ends_here = self._call.api == "chat" and self._streamed.done and not was_done
            if not ends_here and not (only_usage and self._hide_usage):
                passed.append(event)
        if self._streamed.done:
            self._tell(self._streamed.answer())
        return b"".join(passed)

    def end(self) -> bytes:
        """Take the end of the answer; return what is left to hand on."""
        rest = b""
        if self._events is not None:
            rest = self._events.rest()
            if rest:
                self._streamed.add(rest)
            self._tell(self._streamed.answer())
        else:
            self._tell(self._whole())
        return rest

    def close(self) -> None:
        """Take that nobody reads any further."""
        if self._events is not None:
            self._tell(self._streamed.answer())
        elif self._status in _OK:
            self._tell(Answer(complete=False))
        else:
            self._tell(self._whole())

    def fail(self, error: BaseException) -> None:
        """Take that an exception came out of it."""
        answer = self._streamed.answer() if self._events is not None else Answer(complete=False)
        if isinstance(error, Exception):
            answer.error = (
                f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            )
        answer.complete = False
        self._tell(answer)

    def _encoded(self) -> bool:
        return self._headers.get("content-encoding", "identity").lower() not in {"", "identity"}

    def _whole(self) -> Answer:
        data = bytes(self._body)
        if self._encoded():
            try:
                data = httpx.Response(200, headers=self._headers, content=data).content
            except httpx.DecodingError:
                data = b""
        if self._status in _OK:
            if self._is_stream:
                return _compressed_stream(data, self._call.api)
            return read_answer(data, self._call.api)
        said = error_message(parse(data))
        return Answer(error=f"HTTP {self._status}" + (f": {said}" if said else ""))

    def _tell(self, answer: Answer) -> None:
        self._recorder.finish(self._call, answer, trio.current_time() - self._began)


def _compressed_stream(data: bytes, api: str) -> Answer:
    events, streamed = Events(), StreamedAnswer(api)
    for event in (*events.feed(data), events.rest()):
        streamed.add(event)
    return streamed.answer()


class _ReadAlong(httpx.AsyncByteStream):
    """The body of an answer on its way."""

    def __init__(self, stream: httpx.AsyncByteStream, reading: _Reading) -> None:
        self._stream = stream
        self._reading = reading
        self._source: AsyncIterator[bytes] | None = None
        self._ended = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._source is None:
            self._source = aiter(self._stream)
        while not self._ended:
            try:
                chunk = await anext(self._source)
            except StopAsyncIteration:
                self._ended = True
                rest = self._reading.end()
                if rest:
                    return rest
                break
            except BaseException as error:
                self._ended = True
                self._reading.fail(error)
                # A stream whose reader is cancelled may have nobody else who closes it.
                with trio.CancelScope(shield=True):
                    await self._stream.aclose()
                raise
            passed = self._reading.feed(chunk)
            if passed:
                return passed
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Give the connection back, or close it if the answer is not over."""
        self._ended = True
        self._reading.close()
        with trio.CancelScope(shield=True):
            await self._close_source()
            await self._stream.aclose()

    async def _close_source(self) -> None:
        close: Any = getattr(self._source, "aclose", None)
        if close is not None:
            await close()
