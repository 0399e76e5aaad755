"""Connections that break the rules of HTTP, or break off, harm nobody but themselves."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import hypercorn.trio.run
import hypercorn.trio.tcp_server
import pytest
import trio
import trio.testing
from server.faults import (
    API_KEY,
    admission,
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
from rollout.server.connections import Connection, Connections
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


@pytest.mark.parametrize(
    "lengths", ["Content-Length: 3\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked"]
)
async def test_a_body_whose_end_is_ambiguous_is_refused_and_the_connection_closed(lengths: str):
    """With two lengths, or chunked in HTTP/1.0, something in front may see another request."""
    version = "1.1" if "Content-Length" in lengths else "1.0"
    head = f"POST /rollout/cancel HTTP/{version}\r\nHost: test\r\n{lengths}\r\n\r\n".encode()
    async with served_http(make_app()) as http, connected(str(http.base_url)) as stream:
        await stream.send_all(head + b"0\r\n\r\n" + GET + b"\r\n")
        received = await receive_until_closed(stream)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    assert b"ambiguous" in received


async def test_a_feeds_body_beyond_all_bounds_is_refused_before_it_comes():
    request = request_bytes("POST", "/rollouts/feed", length=9_999_999_999_999_999_999)
    async with served_http(make_app()) as http:
        assert (await raw(http.base_url, request))[0] == 413


@pytest.mark.parametrize(
    "path", ["/rollout", "/rollout/x/result", "/rollouts/feed", "/no/such/path"]
)
async def test_no_body_is_asked_for_before_the_key_was_checked(path: str):
    body = json.dumps(admission()).encode()
    expecting = {"Expect": "100-continue", "Content-Type": "application/json"}
    head = request_bytes("POST", path, headers=expecting, length=len(body))
    async with served_http(make_app(api_key=API_KEY)) as http:
        async with connected(str(http.base_url)) as stream:
            await stream.send_all(head)
            received = await receive_until_closed(stream)
        assert received.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in received
        expecting["Authorization"] = f"Bearer {API_KEY}"
        head = request_bytes("POST", "/rollout", headers=expecting, length=len(body))
        async with connected(str(http.base_url)) as stream:
            await stream.send_all(head)
            assert (await read_answer(stream))[0] == 100
            await stream.send_all(body)
            assert (await read_answer(stream))[0] == 202


async def test_connections_without_the_key_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(runner, "connection_limit", lambda: 3)
    app = make_app(api_key=API_KEY)
    options = {"headers": {"Authorization": f"Bearer {API_KEY}"}}
    refused = request_bytes("POST", "/rollout", length=5)  # which waits for the body
    async with served_http(app, **options) as http:
        for beginning in (b"", b"GET", refused):
            streams = [
                await trio.open_tcp_stream("127.0.0.1", http.base_url.port) for _ in range(9)
            ]
            for stream in streams:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(beginning)
            assert (await http.get("/health")).status_code == 200
            for stream in streams:
                await stream.aclose()
        await assert_serves(http)


async def test_with_the_key_a_connection_waits_for_room(monkeypatch):
    monkeypatch.setattr(runner, "connection_limit", lambda: 1)
    async with served_http(make_app()) as http, connected(str(http.base_url)) as first:
        await first.send_all(GET + b"\r\n")
        assert (await read_answer(first))[0] == 200
        async with connected(str(http.base_url)) as second:
            await second.send_all(GET + b"\r\n")
            with trio.move_on_after(0.01) as scope:
                await second.receive_some(1)
            assert scope.cancelled_caught
            await first.send_all(GET + b"\r\n")
            assert (await read_answer(first))[0] == 200
            await first.aclose()
            assert (await read_answer(second))[0] == 200


async def test_a_peer_that_is_gone_leaves_no_connection_behind(monkeypatch):
    """Also while another of its requests waited for its turn."""
    monkeypatch.setattr(runner, "connection_limit", lambda: 1)
    async with served_http(make_app(result_wait_timeout_sec=0.05)) as http:
        patient = await admit(http, initial_messages=prompt(sleep=300))
        await poll(http, *patient)
        held = request_bytes("GET", result_path(patient[0]), headers=patient[1])
        await http.aclose()
        for end in ENDS:
            await misbehave(str(http.base_url), [held * 3], b"", end)
            assert (await raw(http.base_url, GET + b"Connection: close\r\n\r\n"))[0] == 200


async def test_the_end_of_a_peer_is_noticed_while_another_request_of_it_waits():
    feed = request_bytes("POST", "/rollouts/feed", b'{"leases": []}')
    async with served_http(make_app()) as http, connected(str(http.base_url)) as stream:
        await stream.send_all(feed + GET + b"\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        await stream.send_eof()
        with trio.fail_after(20):  # before a heartbeat
            await receive_until_closed(stream)


async def test_requests_that_wait_for_their_turn_are_all_answered():
    """Also when they are more than the server takes into memory."""
    async with served_http(make_app()) as http, connected(str(http.base_url)) as stream:
        patient = await admit(http, initial_messages=prompt(sleep=0.05))
        held = request_bytes("GET", result_path(patient[0]), headers=patient[1])
        padded = GET + b"X: " + b"x" * 1000 + b"\r\n\r\n"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, held + padded * 200)
            received = b""
            nursery.cancel_scope.deadline = trio.current_time() + 30
            while received.count(b"HTTP/1.1 200 ") < 201:
                received += await stream.receive_some()


NO_DESCRIPTORS = """
import json, os, resource, sys
from functools import partial
import trio, trio.testing
from server.faults import admission, read_answer, request_bytes
from support import make_app
from rollout.server import serve

hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 512)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

async def main():
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, make_app(), bind=f"unix:{sys.argv[1]}"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        async with await trio.open_unix_socket(sys.argv[1]) as stream:
            await trio.testing.wait_all_tasks_blocked()  # it is accepted
            try:
                while True:
                    os.dup(0)
            except OSError:
                pass
            body = json.dumps(admission()).encode()
            await stream.send_all(request_bytes("POST", "/rollout", body))
            print((await read_answer(stream))[0])
        nursery.cancel_scope.cancel()

trio.run(main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit of open files")
def test_a_rollout_is_admitted_when_no_descriptor_is_left(tmp_path):
    """The soft limit was raised before, and nothing is opened or imported for the first request."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTORS, str(tmp_path / "server.sock")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("202\n", 0), done.stderr


def test_other_applications_of_the_process_keep_their_connections():
    make_app()
    assert hypercorn.trio.run.TCPServer is hypercorn.trio.tcp_server.TCPServer


def connection() -> tuple[Connection, Connections, Any]:
    """A connection without a server, all its connections, and the peer's end of it."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    connections = Connections(limit=1, keep_alive_sec=75, grace_sec=3)
    return Connection(None, None, connections, ours), connections, theirs  # type: ignore[arg-type]


def was_hung_up(one: Connection) -> bool:
    return one._scope.cancel_called


async def test_a_connection_waits_for_a_request_as_long_as_its_peer_has_earned(autojump_clock):
    one, connections, _ = connection()
    assert await one._next_request() is None
    assert trio.current_time() == 10
    connections.recognized(one)
    assert await one._next_request() is None
    assert trio.current_time() == 85


async def test_a_peer_that_takes_nothing_of_its_answer_is_given_up(autojump_clock):
    one, _, _ = connection()
    await one.write(b"answer")
    assert trio.current_time() == 60
    assert was_hung_up(one)
    with pytest.raises(trio.ClosedResourceError):
        await one.stream.send_all(b"more")


async def test_a_slow_peer_gets_the_whole_answer(autojump_clock):
    one, _, theirs = connection()
    answer = bytes(range(256)) * 4096
    received = b""

    async def read_slowly() -> None:
        nonlocal received
        while len(received) < len(answer):
            await trio.sleep(50)
            received += await theirs.receive_some()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_slowly)
        await one.write(answer)
    assert received == answer
    assert not was_hung_up(one)
    assert trio.current_time() > 120


async def test_a_server_that_stops_waits_for_its_peers_no_longer_than_it_said(autojump_clock):
    one, connections, _ = connection()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.write, b"answer")
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
        connections.stop()
    assert trio.current_time() == 4


@pytest.mark.parametrize("error", [ValueError("secret"), LookupError("secret")])
async def test_what_goes_wrong_on_a_connection_is_logged_without_its_text(
    error: Exception, log_lines, monkeypatch
):
    async def fail(self: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise ExceptionGroup("group", [error])

    monkeypatch.setattr(Connection, "_serve", fail)
    one, _, _ = connection()
    await one.run()
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

    monkeypatch.setattr(Connection, "_serve", fail)
    one, _, _ = connection()
    with trio.CancelScope() as scope:
        scope.cancel()
        await one.run()
    assert scope.cancelled_caught


async def test_what_is_no_exception_of_a_connection_comes_out(monkeypatch):
    async def fail(self: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise BaseExceptionGroup("group", [KeyboardInterrupt(), ValueError()])

    monkeypatch.setattr(Connection, "_serve", fail)
    one, _, _ = connection()
    with pytest.raises(BaseExceptionGroup):
        await one.run()
