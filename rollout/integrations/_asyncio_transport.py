"""Connections to model endpoints on the asyncio side, and the transport that records calls there.

Theory of operation: what `_connections` and `_recording_transport` are for trio, in the loop of a
bridge. Clients belong to a loop, so each loop has pools of its own, shared by all rollouts; the
clients around them are made per rollout and cost microseconds. The pools of a loop are kept by an
asynchronous generator: a loop closes its generators once its tasks have ended, so the end of the
bridge closes the pools when nobody uses them any more.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, cast

import httpx
from attrs import define, field

from rollout.integrations._connections import Connections
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
from rollout.integrations._recording_transport import NO_KEY, Endpoint

__all__ = ["AsyncioTransport"]

_APIS = {"/chat/completions": "chat", "/responses": "responses"}
_UNRECORDABLE = "/completions"
_OK = range(200, 300)
_DRAIN_SEC = 0.1


@define(eq=False)
class _LoopConnections(Connections):
    """The pools of one loop."""

    _keeper: AsyncGenerator[None, None] | None = field(default=None, init=False)

    async def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop close the pools at its end."""
        self._keeper = self._until_closed(loop)
        await anext(self._keeper)

    async def _until_closed(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            _of_loops.pop(loop, None)
            await self.aclose()

    async def aclose(self) -> None:
        """Close every pool."""
        await self.close_ways()


_of_loops: dict[asyncio.AbstractEventLoop, _LoopConnections] = {}


async def _connections() -> Connections:
    """Return the connections of the running loop."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = _LoopConnections(kept=True)
        await found.keep(loop)
    return found


class AsyncioTransport(httpx.AsyncBaseTransport):
    """Sends requests over the connections of the running loop and records what they say.

    Args:
        endpoint: Where the policy is. The key goes nowhere else.
        recorder: What to tell, ``None`` to record nothing.
        conversation: The name of the conversations that the calls belong to.
    """

    def __init__(
        self, endpoint: Endpoint, recorder: ConversationRecorder | None, *, conversation: str
    ) -> None:
        self._endpoint = endpoint
        self._recorder = recorder
        self._conversation = conversation

    def __repr__(self) -> str:
        return f"<AsyncioTransport to {self._endpoint.base_url}>"

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and hand the answer on.

        A cancellation closes the connection, and the call is recorded as interrupted.
        """
        connections = await _connections()
        here = self._endpoint.has(request.url)
        self._guard_key(request, here=here)
        recorder = self._recorder
        if recorder is None or not here or request.method != "POST":
            return await connections.send(request)
        path = request.url.path
        api = next((api for end, api in _APIS.items() if path.endswith(end)), None)
        if api is None:
            if path.endswith(_UNRECORDABLE):
                recorder.note_unrecorded(path)
            return await connections.send(request)
        body = parse(await request.aread())
        body = body if isinstance(body, dict) else {}
        if api == "chat" and _wants_usage(body):
            request = _asking_for_usage(request)
        retry = request.headers.get("x-stainless-retry-count", "")
        call = recorder.start(
            body,
            api=api,
            conversation=self._conversation,
            at=datetime.now(UTC),
            retry=int(retry) if retry.isdecimal() and retry.isascii() else 0,
        )
        reading = _Reading(recorder, call)
        try:
            response = await connections.send(request)
        except BaseException as error:
            reading.fail(error)
            raise
        reading.begin(response)
        response.stream = _ReadAlong(cast("httpx.AsyncByteStream", response.stream), reading)
        return response

    def _guard_key(self, request: httpx.Request, *, here: bool) -> None:
        given = request.headers.get("Authorization", "")
        key = self._endpoint.api_key
        if given == f"Bearer {NO_KEY}" or (not here and key and given == f"Bearer {key}"):
            del request.headers["Authorization"]


def _wants_usage(body: dict[str, Any]) -> bool:
    """Whether it is a stream whose caller has not decided about usage."""
    options = body.get("stream_options") or {}
    return (
        body.get("stream") is True and isinstance(options, dict) and "include_usage" not in options
    )


def _asking_for_usage(request: httpx.Request) -> httpx.Request:
    # The frameworks read the event that comes with it; so it need not be taken out again.
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
    """Reads one answer along, and tells the recorder how it ended; the first time counts."""

    def __init__(self, recorder: ConversationRecorder, call: Call) -> None:
        self._recorder = recorder
        self._call = call
        self._began = time.monotonic()
        self._status = 0
        self._decoder: Any = None
        self._body = bytearray()
        self._events: Events | None = None
        self._streamed = StreamedAnswer(call.api)

    def begin(self, response: httpx.Response) -> None:
        """Take status and headers."""
        self._status = self._call.status_code = response.status_code
        self._call.request_id = response.headers.get("x-request-id")
        # A response of its own decodes as the one that is handed on does.
        self._decoder = httpx.Response(200, headers=response.headers)._get_content_decoder()  # noqa: SLF001
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if self._status in _OK and kind == "text/event-stream":
            self._events = Events()

    @property
    def said_all(self) -> bool:
        """Whether a stream has said that it ends here."""
        return self._streamed.done

    def feed(self, chunk: bytes) -> None:
        """Take a chunk."""
        try:
            data = self._decoder.decode(chunk)
        except httpx.DecodingError:
            return  # whoever reads the answer gets that error
        if self._events is None:
            self._body += data
            return
        for event in self._events.feed(data):
            self._streamed.add(event)
        if self._streamed.done:
            self._tell(self._streamed.answer())

    def end(self) -> None:
        """Take the end of the answer."""
        if self._events is not None:
            self._streamed.add(self._events.rest())
            self._tell(self._streamed.answer())
        else:
            self._tell(self._whole())

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
        answer = self._streamed.answer() if self._events is not None else Answer()
        if isinstance(error, Exception):
            name = type(error).__name__
            answer.error = f"{name}: {error}" if str(error) else name
        answer.complete = False
        self._tell(answer)

    def _whole(self) -> Answer:
        if self._status in _OK:
            return read_answer(bytes(self._body), self._call.api)
        said = error_message(parse(bytes(self._body)))
        return Answer(error=f"HTTP {self._status}" + (f": {said}" if said else ""))

    def _tell(self, answer: Answer) -> None:
        self._recorder.finish(self._call, answer, time.monotonic() - self._began)


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
                self._reading.end()
                break
            except BaseException as error:
                self._ended = True
                self._reading.fail(error)
                # A stream whose reader is cancelled may have nobody else who closes it.
                await self.aclose()
                raise
            self._reading.feed(chunk)
            return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Give the connection back, or close it if the answer is not over."""
        over, self._ended = self._ended, True
        self._reading.close()
        try:
            if self._reading.said_all and not over:
                await self._drain()
            close: Any = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
        finally:
            await self._stream.aclose()

    async def _drain(self) -> None:
        """Read what is behind the mark of a stream's end, so that the connection can be kept.

        Some versions of the SDK stop reading at the mark. What comes after it is mostly there.
        """
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_DRAIN_SEC):
                while self._source is not None and await anext(self._source, None) is not None:
                    pass
