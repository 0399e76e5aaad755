"""Faults on a real socket."""

from __future__ import annotations

import socket
import struct

import httpx
import pytest
import trio
from client.fakes import admitted, healthy, refused, result, run, start
from client.sockets import RawRequest, encode, id_of, raw_server

from rollout.client import (
    RolloutAdmissionTimeoutError,
    RolloutClient,
    RolloutClientClosedError,
    RolloutHandleCancelled,
    RolloutProtocolError,
)
from rollout.types import EXTENSIONS, RolloutStatus


def scripted(*polls):
    """Admit everything; answer polls with the given functions, one after the other."""
    script = list(polls)

    async def handle(request: RawRequest) -> None:
        if request.path.endswith("/health"):
            await request.answer(healthy())
        elif request.path == "/rollout":
            await request.answer(admitted(id_of(request)))
        else:
            step = script.pop(0) if len(script) > 1 else script[0]
            await step(request)

    return handle


async def succeed(request: RawRequest) -> None:
    await request.answer(result("success", id_of(request)))


async def run_and_hang_up(request: RawRequest) -> None:
    """Answer, then close the kept connection, as a server does that is tired of waiting."""
    await request.answer(result("running", id_of(request)), close=True)


async def hang(request: RawRequest) -> None:
    await request.stream.receive_some()
    await request.stream.aclose()


async def drop(request: RawRequest) -> None:
    await request.stream.aclose()


async def reset(request: RawRequest) -> None:
    """Close so that the peer gets a reset."""
    linger = struct.pack("ii", 1, 0)
    request.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await request.stream.aclose()


async def reset_in_the_middle(request: RawRequest) -> None:
    await request.stream.send_all(encode(result("success", id_of(request)))[:-10])
    await reset(request)


async def end_in_the_middle(request: RawRequest) -> None:
    await request.stream.send_all(encode(result("success", id_of(request)))[:-10])
    await request.stream.aclose()


async def talk_nonsense(request: RawRequest) -> None:
    await request.stream.send_all(b"this is no HTTP\r\n\r\n")
    await request.stream.aclose()


@pytest.mark.parametrize(
    "fault", [drop, reset, reset_in_the_middle, end_in_the_middle, talk_nonsense]
)
async def test_a_poll_that_is_lost_on_the_wire_is_tried_again(fault):
    async with raw_server(scripted(fault, succeed)) as server:
        async with RolloutClient(url=server.url) as client:
            assert (await run(client)).status is RolloutStatus.SUCCESS
    assert server.requests == ["POST /rollout", *["GET /rollout/r/result"] * 2]


async def test_a_poll_that_stays_lost_raises_the_error_of_the_wire():
    async with raw_server(scripted(drop)) as server, RolloutClient(url=server.url) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await run(client)
    assert len(server.requests) == 4


@pytest.mark.parametrize("extensions", [[], [*EXTENSIONS]], ids=str)
@pytest.mark.parametrize(
    "fault", [drop, reset, reset_in_the_middle, end_in_the_middle, talk_nonsense]
)
async def test_an_admission_that_is_lost_on_the_wire_is_repeated_where_that_is_safe(
    fault, extensions
):
    script = [fault]

    async def handle(request):
        if script and request.method == "POST":
            await script.pop()(request)
        elif request.path.endswith("/health"):
            health = healthy(extensions=extensions, polling_lease_timeout_sec=120)
            await request.answer(health)
        else:
            await scripted(succeed)(request)

    async with raw_server(handle) as server, RolloutClient(url=server.url) as client:
        if extensions:
            assert (await run(client)).status is RolloutStatus.SUCCESS
        else:
            with pytest.raises((httpx.RemoteProtocolError, httpx.NetworkError)):
                await run(client)
    again = ["POST /rollout", "GET /rollout/r/result"] if extensions else []
    assert server.requests == ["POST /rollout", "GET /health", *again]


async def test_a_kept_connection_that_the_server_has_closed_is_not_used():
    async with raw_server(scripted(run_and_hang_up, run_and_hang_up, succeed)) as server:
        async with RolloutClient(url=server.url) as client:
            assert (await run(client)).status is RolloutStatus.SUCCESS
            assert (await client.health())["status"] == "ok"
    assert server.requests[0] == "POST /rollout"
    assert server.connections == 3


async def test_a_connection_is_kept():
    async with raw_server(scripted(succeed)) as server, RolloutClient(url=server.url) as client:
        for n in range(5):
            await run(client, f"r{n}")
        await client.health()
    assert server.connections == 1


async def test_a_server_that_accepts_and_never_answers():
    async def handle(request):
        well = request.path == "/health" and "POST /rollout" in server.requests
        await (request.answer(healthy()) if well else hang(request))

    async with raw_server(handle) as server:
        short = httpx.AsyncClient(timeout=httpx.Timeout(30, read=0.05))
        async with short, RolloutClient(url=server.url, http_client=short) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.health()
            with pytest.raises(httpx.ReadTimeout):
                await run(client)
        assert server.requests == ["GET /health", "POST /rollout", "GET /health"]
        server.requests.clear()
        async with RolloutClient(url=server.url, admission_timeout_sec=0.05) as client:
            with trio.move_on_after(0.05) as scope:
                await client.health()
            assert scope.cancelled_caught
            with pytest.raises(RolloutAdmissionTimeoutError, match="may have succeeded"):
                await run(client)
    assert server.requests == ["GET /health", "POST /rollout"]


async def test_a_port_where_nobody_listens():
    async with raw_server(succeed) as server:
        url = server.url
    async with RolloutClient(url=url) as client:
        with pytest.raises(httpx.ConnectError):
            await run(client)
        with pytest.raises(httpx.ConnectError):
            await client.cancel_rollout("r")


async def test_a_redirect_to_another_port_takes_the_key_nowhere():
    async with raw_server(succeed) as elsewhere:

        async def redirect(request: RawRequest) -> None:
            response = httpx.Response(307, headers={"Location": f"{elsewhere.url}/steal"})
            await request.answer(response, close=True)

        async with raw_server(redirect) as server:
            async with RolloutClient(url=server.url, api_key="s3cret") as client:
                for call in (run(client), client.health(), client.cancel_rollout("r")):
                    with pytest.raises(RolloutProtocolError, match="never followed") as caught:
                        await call
                    assert caught.value.status_code == 307
    assert elsewhere.connections == 0


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_no_proxy_from_the_environment_stands_before_this_machine(monkeypatch, name, host):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with raw_server(scripted(succeed)) as server:
        async with RolloutClient(url=server.url.replace("127.0.0.1", host)) as client:
            assert (await run(client)).status is RolloutStatus.SUCCESS


async def test_a_proxy_from_the_environment_stands_before_other_machines(monkeypatch):
    async with raw_server(scripted(succeed)) as proxy:
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        async with RolloutClient(url="http://rollouts.example") as client:
            await client.health()
    assert proxy.requests == ["GET http://rollouts.example/health"]


async def test_closing_the_client_ends_a_run_in_another_task():
    asked = trio.Event()

    async def wait(request: RawRequest) -> None:
        asked.set()
        await request.stream.receive_some()

    async def other(client):
        with pytest.raises(RolloutClientClosedError):
            await run(client)

    async with raw_server(scripted(wait)) as server, trio.open_nursery() as nursery:
        client = RolloutClient(url=server.url)
        nursery.start_soon(other, client)
        await asked.wait()
        await client.aclose()
    assert server.requests == ["POST /rollout", "GET /rollout/r/result"]


async def test_closing_the_client_hangs_up_on_the_server():
    asked = trio.Event()
    left = trio.Event()

    async def wait(request: RawRequest) -> None:
        asked.set()
        assert await request.stream.receive_some() == b""
        left.set()
        await request.stream.aclose()

    async with raw_server(scripted(wait)) as server:
        async with RolloutClient(url=server.url) as client:
            handle = await start(client)
            await asked.wait()
            await client.aclose()
            await left.wait()
            with pytest.raises(RolloutHandleCancelled):
                await handle


async def test_a_gateway_page_on_the_wire():
    async def gateway(request: RawRequest) -> None:
        await request.answer(httpx.Response(502, html="<html>bad gateway</html>"))

    async def unauthorized(request: RawRequest) -> None:
        await request.answer(refused(403, "wrong lease"))

    async with raw_server(scripted(gateway, succeed)) as server:
        async with RolloutClient(url=server.url) as client:
            assert (await run(client)).status is RolloutStatus.SUCCESS
    async with raw_server(scripted(unauthorized)) as server:
        async with RolloutClient(url=server.url) as client:
            with pytest.raises(RolloutProtocolError, match="wrong lease"):
                await run(client)
