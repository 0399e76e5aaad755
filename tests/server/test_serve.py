"""`rollout.server.serve` over real sockets: where it listens, TLS, failures, its end."""

from __future__ import annotations

import gc
import socket
import ssl
import sys
import threading
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio
import trustme
from support import (
    CHAT_URL,
    Script,
    connected,
    fresh_id,
    local_backend,
    make_app,
    prompt,
    receive_until_closed,
    served,
)

from rollout import ExecutionBackend
from rollout.client import RolloutClient
from rollout.errors import RolloutServerError
from rollout.server import ShutdownBudget, serve
from rollout.types import RolloutStatus


async def test_it_says_where_it_listens():
    async with served(make_app()) as url:
        assert httpx.URL(url).host == "127.0.0.1"
        assert httpx.URL(url).port
        async with RolloutClient(url=url) as client:
            assert (await client.health())["status"] == "ok"


async def test_ipv6_and_unix_sockets(tmp_path):
    async with trio.open_nursery() as nursery:
        options = {"handle_signals": False}
        urls = await nursery.start(partial(serve, make_app(), bind="[::1]:0", **options))
        async with RolloutClient(url=urls[0]) as client:
            assert (await client.health())["status"] == "ok"
        path = tmp_path / "server.sock"
        await nursery.start(partial(serve, make_app(), bind=f"unix:{path}", **options))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with (
            httpx.AsyncClient(transport=transport) as http,
            RolloutClient(url="http://server", http_client=http) as client,
        ):
            assert (await client.health())["status"] == "ok"
        nursery.cancel_scope.cancel()


async def test_a_port_in_use_is_a_plain_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RolloutServerError, match=f"cannot listen on {bind}"):
            await serve(make_app(), bind=bind)


@pytest.mark.parametrize("kind", ["port", "path"])
async def test_an_address_that_is_served_is_left_to_its_server(kind, tmp_path):
    path = tmp_path / "server.sock"
    first = make_app()
    async with trio.open_nursery() as nursery:
        bind = "127.0.0.1:0" if kind == "port" else f"unix:{path}"
        (url,) = await nursery.start(partial(serve, first, bind=bind, handle_signals=False))
        if kind == "port":
            bind = url.removeprefix("http://")
        for _ in range(2):
            with pytest.raises(RolloutServerError, match=f"cannot listen on {bind}: .*in use"):
                await serve(make_app(), bind=bind)
        transport = httpx.AsyncHTTPTransport(uds=str(path) if kind == "path" else None)
        async with httpx.AsyncClient(transport=transport) as http:
            address = url if kind == "port" else "http://server"
            assert (await http.get(f"{address}/health")).status_code == 200
        first.request_shutdown()
    assert not path.exists()


async def test_a_path_that_a_killed_server_has_left_is_taken(tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    app = make_app()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, app, bind=f"unix:{path}", handle_signals=False))
        path.unlink()
        path.write_text("of somebody else")
        app.request_shutdown()
    assert path.read_text() == "of somebody else"
    with pytest.raises(RolloutServerError, match="cannot listen on unix:"):
        await serve(app, bind=f"unix:{path}")
    assert path.read_text() == "of somebody else"


@pytest.mark.parametrize("bind", ["nowhere", "127.0.0.1", "::1:8000", "127.0.0.1:99999", "a:b"])
async def test_an_address_that_is_none_is_a_plain_error(bind):
    with pytest.raises(RolloutServerError, match=r"bind must be|cannot listen"):
        await serve(make_app(), bind=bind)


async def test_a_lifespan_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr("rollout.server.runner._GRACE_SEC", 0.01)

    @asynccontextmanager
    async def lifespan(app):
        yield
        await trio.sleep_forever()

    nothing = ShutdownBudget(
        drain_sec=0, cleanup_sec=0, forced_sec=0, delivery_sec=0, backend_sec=0
    )
    app = make_app(lifespan=lifespan)
    expected = pytest.RaisesExc(RolloutServerError, match="the lifespan did not end")
    with pytest.RaisesGroup(expected):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, app, bind="127.0.0.1:0", shutdown=nothing))
            app.request_shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"certfile": "a.pem"}, "both a certfile and a keyfile"),
        ({"keyfile": "a.pem"}, "both a certfile and a keyfile"),
        ({"certfile": "missing.pem", "keyfile": "missing.pem"}, "certfile: there is no file"),
        ({"ca_certs": "missing.pem"}, "ca_certs: there is no file"),
        ({"ca_certs": __file__}, "ca_certs needs TLS"),
    ],
)
async def test_tls_files_are_checked_first(options, message):
    with pytest.raises(RolloutServerError, match=message):
        await serve(make_app(), bind="127.0.0.1:0", **options)


@pytest.fixture
def authority():
    return trustme.CA()


async def test_tls(tmp_path, authority):
    certificate = authority.issue_cert("127.0.0.1")
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(certfile)
    certificate.private_key_pem.write_to_path(keyfile)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with (
        served(make_app(), certfile=certfile, keyfile=keyfile) as url,
        httpx.AsyncClient(verify=context) as http,
        RolloutClient(url=url, http_client=http) as client,
    ):
        assert url.startswith("https://")
        result = await client.run_rollout(prompt(), CHAT_URL, fresh_id(), label="42")
        assert result.status is RolloutStatus.SUCCESS


async def test_a_key_that_does_not_fit_its_certificate_is_a_plain_error(tmp_path, authority):
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(certfile)
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(keyfile)
    with pytest.raises(RolloutServerError, match="TLS"):
        await serve(make_app(), bind="127.0.0.1:0", certfile=certfile, keyfile=keyfile)


async def test_a_lifespan_that_fails_is_a_plain_error():
    @asynccontextmanager
    async def lifespan(app):
        raise RuntimeError("the weights are missing")
        yield

    with pytest.raises(RolloutServerError, match="RuntimeError: the weights are missing") as caught:
        await serve(make_app(lifespan=lifespan), bind="127.0.0.1:0")
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_a_backend_that_cannot_run_keeps_the_server_from_starting():
    class Broken(ExecutionBackend):
        @asynccontextmanager
        async def running(self):
            raise RuntimeError("there is no sandbox")
            yield

        async def execute(self, request):
            raise AssertionError

    with pytest.raises(RolloutServerError, match="RuntimeError: there is no sandbox"):
        await serve(make_app(Broken()), bind="127.0.0.1:0")


async def test_a_start_that_nobody_waits_for_is_given_up():
    tidied = trio.Event()
    app = make_app()

    @asynccontextmanager
    async def lifespan(_):
        app.request_shutdown()
        try:
            await trio.sleep_forever()  # warming up
            yield
        finally:
            tidied.set()

    app._user_lifespan = lifespan
    with pytest.raises(RolloutServerError, match="asked to stop before it had started"):
        await serve(app, bind="127.0.0.1:0")
    assert tidied.is_set()


async def test_a_failure_of_the_servers_own_tasks_stops_it():
    app = make_app()

    async def crash():
        await trio.lowlevel.checkpoint()
        raise RuntimeError("a defect")

    expected = pytest.RaisesExc(RolloutServerError, match="RuntimeError: a defect")
    with pytest.RaisesGroup(expected):
        async with served(app):
            app.registry._nursery.start_soon(crash)
            await trio.sleep_forever()


async def test_a_requested_shutdown_hands_the_results_over_and_returns():
    app = make_app(local_backend(max_concurrent=None))
    budget = ShutdownBudget(drain_sec=0)
    results = []

    async def run(client, rollout_id):
        results.append(await client.run_rollout(prompt(sleep=3600), CHAT_URL, rollout_id, label=""))

    async with trio.open_nursery() as server:
        urls = await server.start(
            partial(serve, app, bind="127.0.0.1:0", handle_signals=False, shutdown=budget)
        )
        async with RolloutClient(url=urls[0]) as client, trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(run, client, f"r{number}")
            while len(app.registry.active_ids) < 20:
                await trio.lowlevel.checkpoint()
            app.request_shutdown()
    assert [result.status for result in results] == [RolloutStatus.CANCELLED] * 20
    assert app.registry.active_ids == []


async def test_idle_connections_do_not_hold_the_shutdown_up():
    app = make_app()
    async with trio.open_nursery() as server:
        urls = await server.start(partial(serve, app, bind="127.0.0.1:0", handle_signals=False))
        async with connected(urls[0]) as idle, connected(urls[0]) as used:
            await used.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            while not received.endswith(b"}}"):
                received += await used.receive_some()
            app.request_shutdown()
            with trio.fail_after(30):
                assert await idle.receive_some() == b""
                assert await used.receive_some() == b""


async def test_cancelling_serve_cancels_the_executions():
    stopped = trio.Event()

    class Notices(Script):
        async def run(self, ctx):
            try:
                await trio.sleep_forever()
            finally:
                stopped.set()

    app = make_app(local_backend(workflow=Notices))
    async with served(app) as url, RolloutClient(url=url) as client:
        handle = await client.run_rollout_async(prompt(), CHAT_URL, fresh_id(), label="42")
        await handle.wait_for_running()
        handle.cancel()
    assert stopped.is_set()
    assert app.registry.active_ids == []


@pytest.mark.skipif(sys.platform == "win32", reason="threads cannot receive signals anyway")
def test_it_runs_outside_of_the_main_thread():
    outcome = []

    async def main():
        async with served(make_app()) as url, RolloutClient(url=url) as client:
            outcome.append((await client.health())["status"])

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    thread.join()
    assert outcome == ["ok"]


async def test_a_used_connection_is_closed_once_it_has_been_idle(monkeypatch):
    monkeypatch.setattr("rollout.server.runner.KEEP_ALIVE_SEC", 0.05)
    async with served(make_app()) as url, connected(url) as stream:
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        with trio.fail_after(30):
            assert (await receive_until_closed(stream)).startswith(b"HTTP/1.1 200")


async def test_no_address_is_told_when_the_lifespan_fails():
    @asynccontextmanager
    async def lifespan(app):
        raise LookupError("no weights")
        yield

    expected = pytest.RaisesExc(RolloutServerError, match="LookupError: no weights")
    told = False
    with pytest.RaisesGroup(expected):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, make_app(lifespan=lifespan), bind="127.0.0.1:0"))
            told = True
    assert not told


# --- the process --------------------------------------------------------------------------------


@pytest.fixture
def threshold():
    """Sets the garbage collector's threshold; what it was before comes back."""
    before = gc.get_threshold()
    yield lambda first: gc.set_threshold(first, *before[1:])
    gc.set_threshold(*before)


@pytest.mark.parametrize(("own", "seldom"), [(700, True), (2000, True), (0, False), (9000, False)])
async def test_the_garbage_collector_looks_less_often_meanwhile(threshold, own, seldom):
    threshold(own)
    async with served(make_app()):
        assert (gc.get_threshold()[0] > own) is seldom
        assert (gc.get_threshold()[0] == own) is not seldom
    assert gc.get_threshold()[0] == own


async def test_a_threshold_that_a_program_sets_meanwhile_stays(threshold):
    threshold(700)
    async with served(make_app()):
        threshold(1234)
    assert gc.get_threshold()[0] == 1234
