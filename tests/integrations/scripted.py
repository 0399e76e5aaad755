"""A scripted OpenAI-compatible endpoint on loopback, for tests of everything that calls a model.

A script says what comes next; the endpoint says it in the form that the request asks for (a whole
answer or a stream, a chat completion or a response), and keeps what it was sent::

    async with scripted_endpoint(call("add", left=6, right=7), say("13")) as endpoint:
        ...  # ask endpoint.url
    assert endpoint.requests[0].body["model"] == "policy"

A script is a row of steps, or a function of the request that returns the step.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import h11
import trio
from attrs import define, evolve, field, frozen

__all__ = [
    "Endpoint",
    "Received",
    "Step",
    "call",
    "others",
    "refuse",
    "say",
    "scripted_endpoint",
    "stall",
]

MODEL = "scripted-1"


@frozen(kw_only=True)
class Step:
    """What the endpoint does with one request.

    Attributes:
        status: The HTTP status.
        headers: Further headers.
        texts: What the model says, in the pieces that a stream brings it in; one list for each
            choice.
        reasoning: What it thinks before.
        calls: The tools that it calls, by name and arguments.
        usage: What it counts; by default words of the prompt and pieces of the reply.
        error: The message of a refusal, or of an error in the middle of a stream.
        raw: A body instead of all that.
        hold_after: After how many pieces of a stream it stalls; 0 stalls before the head.
        cut_after: After how many pieces of a stream it closes the connection; a whole answer is
            cut in its middle.
    """

    status: int = 200
    headers: dict[str, str] = field(factory=dict)
    texts: list[list[str]] = field(factory=list)
    reasoning: str | None = None
    calls: list[tuple[str, Any]] = field(factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None
    raw: bytes | None = None
    hold_after: int | None = None
    cut_after: int | None = None


Script = Callable[["Received"], Step]


def say(*choices: str, **more: Any) -> Step:
    """The model says something; each further text is one more choice."""
    return Step(texts=[_pieces(text) for text in choices], **more)


def call(name: str, /, **arguments: Any) -> Step:
    """The model calls a tool."""
    return Step(calls=[(name, arguments)])


def refuse(status: int, message: str = "not now", **headers: str) -> Step:
    """The endpoint refuses, with headers such as ``retry_after="0.01"``."""
    return Step(
        status=status,
        error=message,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def stall(text: str = "", *, after: int = 0) -> Step:
    """The endpoint stops answering until its client has gone: at once, or in mid-stream."""
    return evolve(say(text), hold_after=after)


def _pieces(text: str) -> list[str]:
    words = text.split(" ")
    return [word if not place else f" {word}" for place, word in enumerate(words)]


@define(eq=False)
class Received:
    """A request that the endpoint got.

    Attributes:
        number: Its place, from 0.
        stalled: Set once the endpoint has stopped answering it.
        gone: Set once its client has closed the connection before the answer was over.
    """

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    stalled: trio.Event = field(factory=trio.Event)
    gone: trio.Event = field(factory=trio.Event)

    @property
    def key(self) -> str | None:
        """The bearer key that it presented."""
        given = self.headers.get("authorization")
        return given.removeprefix("Bearer ") if given is not None else None


@define(eq=False)
class Endpoint:
    """A running endpoint.

    Attributes:
        url: Its base URL.
        requests: What it was sent.
        connections: How many connections it has accepted.
        open_connections: How many of them are open.
    """

    url: str
    script: Script
    requests: list[Received] = field(factory=list)
    connections: int = 0
    open_connections: int = 0
    _arrived: trio.Event = field(factory=trio.Event)
    _closed: trio.Event = field(factory=trio.Event)

    async def all_closed(self) -> None:
        """Wait until no connection is open; fails where one leaks."""
        with trio.fail_after(20):
            while self.open_connections:
                await self._closed.wait()

    def close_one(self) -> None:
        """Take that a connection has closed."""
        self.open_connections -= 1
        self._closed.set()
        self._closed = trio.Event()

    async def received(self, number: int = 0) -> Received:
        """Wait until a request has come, and return it."""
        while len(self.requests) <= number:
            await self._arrived.wait()
        return self.requests[number]

    def take(self, request: Received) -> Step:
        """Keep a request, and decide what happens to it."""
        self.requests.append(request)
        self._arrived.set()
        self._arrived = trio.Event()
        return self.script(request)


@asynccontextmanager
async def scripted_endpoint(*steps: Step | Script) -> AsyncGenerator[Endpoint, None]:
    """Serve a script on a free loopback port for the length of the block.

    Args:
        steps: One step for each request, the last one also for all that follow; or a function.
    """
    first = steps[0]
    if callable(first):
        script: Script = first
    else:
        script = lambda request: steps[min(request.number, len(steps) - 1)]  # noqa: E731
    numbers = count()
    async with trio.open_nursery() as nursery:
        endpoint = Endpoint("", script)

        async def handle(stream: trio.SocketStream) -> None:
            endpoint.connections += 1
            endpoint.open_connections += 1
            try:
                async with stream:
                    await _Connection(endpoint, stream, numbers).serve()
            except (trio.BrokenResourceError, h11.RemoteProtocolError):
                pass  # the client has gone
            finally:
                endpoint.close_one()

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        endpoint.url = f"http://127.0.0.1:{port}/v1"
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        yield endpoint
        nursery.cancel_scope.cancel()


class _Connection:
    def __init__(self, endpoint: Endpoint, stream: trio.SocketStream, numbers: Any) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._numbers = numbers
        self._http = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        while True:
            head = await self._next()
            if not isinstance(head, h11.Request):
                return
            data = bytearray()
            while not isinstance(event := await self._next(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    return
                data += event.data
            request = Received(
                next(self._numbers),
                head.method.decode(),
                head.target.decode(),
                {name.decode().lower(): value.decode() for name, value in head.headers},
                json.loads(data) if data else None,
            )
            over = await self._answer(request, self._endpoint.take(request))
            if over or self._http.our_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._stream.receive_some())
        return event

    async def _send(self, event: Any) -> None:
        await self._stream.send_all(self._http.send(event) or b"")

    async def _answer(self, request: Received, step: Step) -> bool:
        """Answer; return whether the connection is over with it."""
        if step.hold_after == 0:
            await self._hold(request)
            return True
        headers = {"x-request-id": f"req-{request.number}", **step.headers}
        if step.raw is not None or (step.error is not None and step.status >= 400):
            error = {"error": {"message": step.error, "type": "scripted", "code": None}}
            raw = step.raw if step.raw is not None else json.dumps(error).encode()
            await self._whole(step.status, headers, raw)
            return False
        answer = _form(request)(request, step)
        if not request.body.get("stream"):
            if step.hold_after is not None:
                await self._hold(request)
                return True
            whole = json.dumps(answer.whole()).encode()
            await self._whole(step.status, headers, whole, cut=step.cut_after is not None)
            return step.cut_after is not None
        headers["content-type"] = "text/event-stream; charset=utf-8"
        await self._send(_head(step.status, headers))
        for number, event in enumerate([*answer.events(), b""]):
            if number == step.hold_after:
                await self._hold(request)
                return True
            if number == step.cut_after:
                return True
            if event:
                await self._send(h11.Data(data=event))
        await self._send(h11.EndOfMessage())
        return False

    async def _whole(
        self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        headers = {"content-type": "application/json", **headers, "content-length": str(len(body))}
        await self._send(_head(status, headers))
        if cut:
            await self._send(h11.Data(data=body[: len(body) // 2]))
            return
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def _hold(self, request: Received) -> None:
        request.stalled.set()
        try:
            data = await self._stream.receive_some()
        except trio.BrokenResourceError:
            data = b""
        assert data == b"", "a client that waits for an answer sends nothing"
        request.gone.set()


def _head(status: int, headers: dict[str, str]) -> h11.Response:
    return h11.Response(status_code=status, headers=list(headers.items()))


def others(sample: Any) -> dict[str, Any]:
    """The extra fields of a recorded sample, but for those that each has."""
    details = ("message_details", "reply_details")
    return {k: v for k, v in sample.extra_fields.items() if k not in details}


def words(messages: Any) -> int:
    """How many words there are in messages: what this endpoint takes for tokens of the prompt."""
    return len(json.dumps(messages).split())


class _Completion:
    def __init__(self, request: Received, step: Step) -> None:
        self.body = request.body
        self.step = step
        self.head = {
            "id": f"chatcmpl-{request.number}",
            "created": 1_700_000_000 + request.number,
            "model": MODEL,
        }
        self.calls = [
            {
                "id": f"call-{request.number}-{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for place, (name, arguments) in enumerate(step.calls)
        ]
        self.texts: list[list[str] | None] = [*step.texts] or [None]
        self.reason = "tool_calls" if self.calls else "stop"

    def usage(self) -> dict[str, Any]:
        if self.step.usage is not None:
            return self.step.usage
        asked = words(self.body["messages"])
        said = sum(len(pieces or ()) for pieces in self.texts) + len(self.calls)
        return {
            "prompt_tokens": asked,
            "completion_tokens": said,
            "total_tokens": asked + said,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    def logprobs(self, pieces: list[str] | None) -> Any:
        if not self.body.get("logprobs") or pieces is None:
            return None
        tokens = [
            {"token": piece, "logprob": -0.5, "bytes": None, "top_logprobs": []} for piece in pieces
        ]
        return {"content": tokens, "refusal": None}

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, pieces in enumerate(self.texts):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if pieces is None else "".join(pieces),
                "refusal": None,
                "annotations": [],
            }
            if self.step.reasoning is not None:
                message["reasoning_content"] = self.step.reasoning
            if self.calls:
                message["tool_calls"] = self.calls
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self.logprobs(pieces),
                    "finish_reason": self.reason,
                }
            )
        return {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.usage(),
        }

    def events(self) -> list[bytes]:
        events = []
        for index, pieces in enumerate(self.texts):
            deltas: list[tuple[dict[str, Any], list[str] | None]] = []
            if self.step.reasoning is not None:
                deltas.append(({"reasoning_content": self.step.reasoning}, None))
            deltas += [({"content": piece}, [piece]) for piece in pieces or ()]
            for place, each in enumerate(self.calls):
                text = each["function"]["arguments"]
                begun = {**each, "function": {**each["function"], "arguments": ""}}
                deltas += [
                    ({"tool_calls": [{"index": place, **begun}]}, None),
                    *(
                        ({"tool_calls": [{"index": place, "function": {"arguments": part}}]}, None)
                        for part in (text[:3], text[3:])
                    ),
                ]
            for number, (delta, logged) in enumerate(deltas):
                events.append(
                    self._chunk(
                        index,
                        {"role": "assistant", **delta} if not number else delta,
                        self.logprobs(logged),
                    )
                )
            events.append(self._chunk(index, {}, None, self.reason))
        if self.step.error is not None:
            events.append(_event({"error": {"message": self.step.error, "type": "scripted"}}))
            return events
        if (self.body.get("stream_options") or {}).get("include_usage"):
            head = {**self.head, "object": "chat.completion.chunk"}
            events.append(_event({**head, "choices": [], "usage": self.usage()}))
        return [*events, b"data: [DONE]\n\n"]

    def _chunk(self, index: int, delta: Any, logprobs: Any, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return _event({**self.head, "object": "chat.completion.chunk", "choices": [choice]})


class _Response:
    def __init__(self, request: Received, step: Step) -> None:
        self.body = request.body
        self.step = step
        self.id = f"resp-{request.number}"
        number = request.number
        self.output: list[dict[str, Any]] = []
        if step.reasoning is not None:
            summary = [{"type": "summary_text", "text": step.reasoning}]
            self.output.append({"type": "reasoning", "id": f"rs-{number}", "summary": summary})
        for pieces in step.texts:
            part = {"type": "output_text", "text": "".join(pieces), "annotations": []}
            self.output.append(
                {
                    "type": "message",
                    "id": f"msg-{number}",
                    "role": "assistant",
                    "status": "completed",
                    "content": [part],
                }
            )
        for place, (name, arguments) in enumerate(step.calls):
            self.output.append(
                {
                    "type": "function_call",
                    "id": f"fc-{number}-{place}",
                    "call_id": f"call-{number}-{place}",
                    "name": name,
                    "arguments": json.dumps(arguments),
                    "status": "completed",
                }
            )

    def whole(self, status: str = "completed") -> dict[str, Any]:
        asked, said = (
            words(self.body["input"]),
            sum(map(len, self.step.texts)) + len(self.step.calls),
        )
        usage = {
            "input_tokens": asked,
            "output_tokens": said,
            "total_tokens": asked + said,
            "input_tokens_details": {"cached_tokens": 1},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        over = status == "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": 1_700_000_000,
            "model": MODEL,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.get("instructions"),
            "metadata": {},
            "output": self.output if over else [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": usage if over else None,
        }

    def events(self) -> list[bytes]:
        rows: list[dict[str, Any]] = [
            {"type": "response.created", "response": self.whole("in_progress")}
        ]
        for index, item in enumerate(self.output):
            at = {"output_index": index}
            blank = {**item, "content": []} if item["type"] == "message" else item
            rows.append({"type": "response.output_item.added", **at, "item": blank})
            if item["type"] == "message":
                where = {**at, "item_id": item["id"], "content_index": 0}
                part = item["content"][0]
                rows.append(
                    {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
                )
                rows += [
                    {"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []}
                    for piece in self.step.texts[0]
                ]
            rows.append({"type": "response.output_item.done", **at, "item": item})
        rows.append({"type": "response.completed", "response": self.whole()})
        return [
            _event({**row, "sequence_number": number}, row["type"])
            for number, row in enumerate(rows)
        ]


class _TextCompletion:
    def __init__(self, request: Received, step: Step) -> None:
        self.step = step
        self.head = {"id": f"cmpl-{request.number}", "object": "text_completion", "model": MODEL}
        said = sum(map(len, step.texts))
        asked = len(str(request.body["prompt"]).split())
        self.usage = {
            "prompt_tokens": asked,
            "completion_tokens": said,
            "total_tokens": asked + said,
        }
        self.asks = (request.body.get("stream_options") or {}).get("include_usage")

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def whole(self) -> dict[str, Any]:
        choices = [self._choice("".join(self.step.texts[0]), "stop")]
        return {**self.head, "choices": choices, "usage": self.usage}

    def events(self) -> list[bytes]:
        pieces = self.step.texts[0]
        events = [_event({**self.head, "choices": [self._choice(each, None)]}) for each in pieces]
        events.append(_event({**self.head, "choices": [self._choice("", "stop")]}))
        if self.asks:
            events.append(_event({**self.head, "choices": [], "usage": self.usage}))
        return [*events, b"data: [DONE]\n\n"]


class _Message:
    """A message of Anthropic's API."""

    def __init__(self, request: Received, step: Step) -> None:
        self.step = step
        number = request.number
        asked = words(request.body["messages"])
        self.usage = {
            "input_tokens": asked,
            "output_tokens": sum(map(len, step.texts)) + len(step.calls),
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
        }
        self.blocks: list[dict[str, Any]] = []
        if step.reasoning is not None:
            self.blocks.append({"type": "thinking", "thinking": step.reasoning, "signature": "sig"})
        self.blocks += [{"type": "text", "text": "".join(pieces)} for pieces in step.texts]
        self.blocks += [
            {"type": "tool_use", "id": f"toolu-{number}-{place}", "name": name, "input": given}
            for place, (name, given) in enumerate(step.calls)
        ]
        self.head = {"id": f"msg-{number}", "type": "message", "role": "assistant", "model": MODEL}
        self.ends = {"stop_reason": "tool_use" if step.calls else "end_turn", "stop_sequence": None}

    def whole(self) -> dict[str, Any]:
        return {**self.head, "content": self.blocks, **self.ends, "usage": self.usage}

    def events(self) -> list[bytes]:
        blank = dict.fromkeys(self.ends)
        usage = {**self.usage, "output_tokens": 1}
        start = {**self.head, "content": [], **blank, "usage": usage}
        rows: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
        texts = iter(self.step.texts)
        for index, block in enumerate(self.blocks):
            kind = block["type"]
            if kind == "text":
                empty, pieces = {**block, "text": ""}, next(texts)
                deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
            elif kind == "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": "sig"},
                ]
            else:
                text = json.dumps(block["input"])
                empty = {**block, "input": {}}
                deltas = [
                    {"type": "input_json_delta", "partial_json": part}
                    for part in ("", text[:3], text[3:])
                ]
            rows.append({"type": "content_block_start", "index": index, "content_block": empty})
            rows += [
                {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
            ]
            rows.append({"type": "content_block_stop", "index": index})
        if self.step.error is not None:
            error = {"type": "overloaded_error", "message": self.step.error}
            rows.append({"type": "error", "error": error})
        else:
            ended = {"output_tokens": self.usage["output_tokens"]}
            rows += [
                {"type": "message_delta", "delta": self.ends, "usage": ended},
                {"type": "message_stop"},
            ]
        return [_event(row, row["type"]) for row in rows]


def _form(request: Received) -> Any:
    if "/responses" in request.path:
        return _Response
    if "/messages" in request.path:
        return _Message
    return _TextCompletion if "prompt" in (request.body or {}) else _Completion


def _event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
