"""Connections that break the rules of HTTP, or break off, harm nobody but themselves."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from server.faults import (
    admit,
    assert_serves,
    finished,
    poll,
    raw,
    read_answer,
    request_bytes,
    result_path,
    served_http,
)
from support import connected, make_app, prompt, receive_until_closed

from rollout.server import runner, serve
from rollout.server.guard import GuardedConnection
from rollout.types import SEEN_STATE_HEADER

pytestmark = pytest.mark.usefixtures("log_lines")

GET = b"GET /health HTTP/1.1\r\nHost: test\r\n"
POST = b"POST /rollout HTTP/1.1\r\nHost: test\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
H2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header in HPACK, literally and without indexing."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def h2_request(method: bytes = b"GET", path: bytes | None = b"/health") -> bytes:
    fields = literal(b":method", method) + literal(b":authority", b"x")
    if path is not None:
        fields += literal(b":scheme", b"http") + literal(b":path", path)
    return H2 + frame(4, 0, 0) + frame(1, 5, 1, fields)


PAUSE = object()
NASTY: dict[str, list[Any]] = {
    "nothing": [],
    "half a request line": [b"GET /hea"],
    "half a head": [GET],
    "NUL": [b"\0" * 100],
    "line breaks": [b"\r\n" * 100],
    "no HTTP": [b"\x01\x02garbage\r\n\r\n"],
    "a TLS handshake": [bytes.fromhex("16030100c8010000c40303") + b"\0" * 200],
    "no host": [b"GET /health HTTP/1.1\r\n\r\n"],
    "HTTP/0.9": [b"GET /health\r\n\r\n"],
    "HTTP/3.0": [b"GET /health HTTP/3.0\r\nHost: test\r\n\r\n"],
    "a huge head": [GET + b"X: " + b"a" * 300_000 + b"\r\n\r\n"],
    "endless headers": [GET + b"X: y\r\n" * 50_000],
    "two lengths": [POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"],
    "an unknown coding": [POST + b"Transfer-Encoding: gzip\r\n\r\nabcd"],
    "a length and chunks": [
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ],
    "a bad chunk": [CHUNKED + b"zz\r\n\r\n"],
    "a bad chunk later": [CHUNKED, PAUSE, b"zz\r\n\r\n"],
    "a bad chunk behind a good one": [CHUNKED + b"2\r\n{}\r\n", PAUSE, b"zz\r\n\r\n"],
    "a huge chunk size": [CHUNKED + b"f" * 100 + b"\r\n"],
    "a hundred requests at once": [(GET + b"\r\n") * 100],
    "garbage behind a request": [GET + b"\r\n\0BAD\r\n\r\n"],
    "garbage behind a poll": ["POLL", PAUSE, b"\0BAD\r\n\r\n"],
    "a poll behind a poll": ["POLL", "POLL", "POLL"],
    "100-continue": [POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", PAUSE, b"{}x"],
    "100-continue without a body": [POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n"],
    "a websocket": [GET + WEBSOCKET + b"\r\n"],
    "a websocket with data": [GET + WEBSOCKET + b"\r\n\xff\xff\xff\xff"],
    "a websocket with data later": [GET + WEBSOCKET + b"\r\n", PAUSE, b"\xff\xff\xff\xff"],
    "a websocket with a body": [GET + WEBSOCKET + b"Content-Length: 5\r\n\r\nhello"],
    "a websocket without a key": [GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"],
    "h2c": [GET + H2C + b"\r\n"],
    "h2c with bad settings": [GET + b"Upgrade: h2c\r\nHTTP2-Settings: !!!\r\n\r\n"],
    "h2c without settings": [GET + b"Upgrade: h2c\r\n\r\n"],
    "HTTP/2 by prior knowledge": [h2_request()],
    "HTTP/2 garbage": [H2 + b"\xff" * 100],
    "an HTTP/2 path beyond ASCII": [h2_request(path=b"/\xff")],
    "an HTTP/2 method beyond ASCII": [h2_request(method=b"G\xff")],
    "an HTTP/2 CONNECT": [h2_request(method=b"CONNECT", path=None)],
}
ENDS = ("close", "half-close", "reset", "reset later")


async def misbehave(url: str, steps: list[Any], poll_request: bytes, end: str) -> bytes:
    """Send the steps and end the connection; returns what came back."""
    received = b""
    async with connected(url) as stream:
        try:
            for step in steps:
                if step is PAUSE:
                    await trio.sleep(0.005)
                else:
                    await stream.send_all(poll_request if step == "POLL" else step)
            if end == "reset later":
                await trio.sleep(0.005)
            if end == "half-close":
                await stream.send_eof()
                received = await receive_until_closed(stream)
        except trio.BrokenResourceError:
            pass  # the server has hung up already, as it may
        if "reset" in end:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return received


@pytest.mark.parametrize("end", ENDS)
async def test_whatever_a_connection_does_the_others_are_served(end: str, log_lines):
    async with served_http(make_app(result_wait_timeout_sec=0.05)) as http:
        patient = await admit(http, initial_messages=prompt(sleep=300))
        await poll(http, *patient)
        held = request_bytes("GET", result_path(patient[0]), headers=patient[1])
        for name, steps in NASTY.items():
            received = await misbehave(str(http.base_url), steps, held, end)
            assert b"HTTP/1.1 5" not in received.replace(b"HTTP/1.1 501", b""), name
            assert b"Traceback" not in received, name
            response = await http.get("/health")
            assert response.status_code == 200, name
        at_once = {**patient[1], SEEN_STATE_HEADER: "queued"}
        assert (await poll(http, patient[0], at_once))["status"] == "running"
        await assert_serves(http)
    assert not [line for line in log_lines if "Traceback" in line]


async def test_an_offer_to_upgrade_is_ignored_and_the_request_answered():
    async with served_http(make_app()) as http:
        for offer in (WEBSOCKET, H2C, b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n"):
            status, body = await raw(http.base_url, GET + offer + b"\r\n")
            assert status == 200
            assert b'"lifecycle"' in body


async def test_a_connection_that_its_peer_has_closed_is_closed_at_once():
    """Whatever was answered before, and not only when it has idled for its time."""
    async with served_http(make_app()) as http:
        for heads in ([], [GET + b"\r\n"], [GET + H2C + b"\r\n"], [GET + b"\r\n"] * 2):
            async with connected(str(http.base_url)) as stream:
                for head in heads:
                    await stream.send_all(head)
                    assert (await read_answer(stream))[0] == 200
                await stream.send_eof()
                assert await receive_until_closed(stream) == b""


@pytest.mark.parametrize("head", [GET + b"\r\n", GET + H2C + b"\r\n", GET + WEBSOCKET + b"\r\n"])
async def test_a_peer_that_is_gone_before_its_answer_does_not_hold_up_the_end(head: bytes):
    async with served_http(make_app()) as http:
        for end in ENDS:
            await misbehave(str(http.base_url), [head], b"", end)
        await assert_serves(http)


@pytest.mark.parametrize("how", ["shutdown", "cancel"])
async def test_a_peer_that_reads_nothing_does_not_hold_up_the_end(how: str, monkeypatch):
    monkeypatch.setattr(runner, "_GRACE_SEC", 0.05)
    app = make_app()
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(serve, app, bind="127.0.0.1:0", handle_signals=False))
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:
            message = {"role": "user", "content": "x" * 12_000_000}
            rollout = await admit(http, initial_messages=[message])
            await finished(http, *rollout)
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
        request = request_bytes("GET", result_path(rollout[0]), headers=rollout[1])
        await stream.send_all(request)
        await stream.receive_some(1)  # the answer is on its way, and no buffer holds it
        if how == "shutdown":
            app.request_shutdown()
        else:
            nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        received = 0
        with suppress(trio.BrokenResourceError):
            async for data in stream:
                received += len(data)
        await stream.aclose()
    assert received < 12_000_000


class Protocol:
    """Notes what a connection tells its protocol."""

    def __init__(self) -> None:
        self.told: list[Event] = []

    async def handle(self, event: Event) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(event)


def connection() -> tuple[GuardedConnection, Any, Protocol]:
    """A connection without a server, the peer's end of it, and its protocol."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    guarded = GuardedConnection(None, Config(), WorkerContext(None), {}, ours)  # type: ignore[arg-type]
    protocol = Protocol()
    guarded.protocol = protocol  # type: ignore[assignment]
    return guarded, theirs, protocol


async def test_a_peer_that_takes_nothing_of_its_answer_is_given_up(autojump_clock):
    guarded, _, protocol = connection()
    await guarded.protocol_send(RawData(data=b"answer"))
    assert trio.current_time() == 60
    assert protocol.told == [Closed()]
    with pytest.raises(trio.ClosedResourceError):
        await guarded.stream.send_all(b"more")


async def test_a_slow_peer_gets_the_whole_answer(autojump_clock):
    guarded, theirs, protocol = connection()
    answer = bytes(range(256)) * 4096
    received = b""

    async def read_slowly() -> None:
        nonlocal received
        while len(received) < len(answer):
            await trio.sleep(50)
            received += await theirs.receive_some()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_slowly)
        await guarded.protocol_send(RawData(data=answer))
    assert received == answer
    assert protocol.told == []
    assert trio.current_time() > 120


async def test_a_server_that_stops_waits_for_its_peers_no_longer_than_it_said(autojump_clock):
    guarded, _, protocol = connection()
    guarded.config.graceful_timeout = 3
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guarded.protocol_send, RawData(data=b"answer"))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
        await guarded.context.terminated.set()
    assert trio.current_time() == 4
    assert protocol.told == []


@pytest.mark.parametrize("error", [ValueError("secret"), OSError(), LookupError("secret")])
async def test_what_goes_wrong_on_a_connection_is_logged_without_its_text(
    error: Exception, log_lines, monkeypatch
):
    async def fail(self: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise ExceptionGroup("group", [error])

    monkeypatch.setattr(TCPServer, "run", fail)
    guarded, _, _ = connection()
    await guarded.run()
    assert type(error).__name__ in log_lines[-1]
    assert "secret" not in log_lines[-1]


async def test_a_cancelled_connection_that_fails_is_cancelled(monkeypatch):
    async def fail(self: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError

    monkeypatch.setattr(TCPServer, "run", fail)
    guarded, _, _ = connection()
    with trio.CancelScope() as scope:
        scope.cancel()
        await guarded.run()
    assert scope.cancelled_caught


async def test_what_is_no_exception_of_a_connection_comes_out(monkeypatch):
    async def fail(self: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise BaseExceptionGroup("group", [KeyboardInterrupt(), ValueError()])

    monkeypatch.setattr(TCPServer, "run", fail)
    guarded, _, _ = connection()
    with pytest.raises(BaseExceptionGroup):
        await guarded.run()
