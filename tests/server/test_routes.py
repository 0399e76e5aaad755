"""Methods, routes and request targets that are none of the four."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from quart import request
from server.faults import (
    API_KEY,
    admit,
    assert_refused,
    assert_serves,
    in_process_http,
    raw,
    request_bytes,
    result_path,
    served_http,
)
from support import make_app, prompt

pytestmark = pytest.mark.usefixtures("log_lines")

ROUTES = {
    "/health": {"GET", "HEAD"},
    "/rollout": {"POST"},
    "/rollout/cancel": {"POST"},
    "/rollout/a/result": {"GET"},
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_wrong_method_is_405_and_says_which_are_right(path: str):
    async with served_http(make_app()) as http:
        for method in METHODS:
            if method in ROUTES[path]:
                continue
            response = await http.request(method, path)
            assert response.status_code == 405, method
            assert set(response.headers["allow"].split(", ")) == ROUTES[path], method
            if method != "HEAD":
                assert_refused(response, 405)
        await assert_serves(http)


async def test_head_of_health_has_no_body():
    async with served_http(make_app()) as http:
        response = await http.head("/health")
        assert (response.status_code, response.content) == (200, b"")
        await assert_serves(http)


async def test_head_of_a_result_neither_renews_nor_shows_anything(autojump_clock):
    async with in_process_http(make_app()) as http:
        rollout_id, headers = await admit(http, initial_messages=prompt(sleep=1000))
        await trio.sleep(100)
        response = await http.head(result_path(rollout_id), headers=headers)
        assert (response.status_code, response.content) == (405, b"")
        await trio.sleep(30)
        result = (await http.get(result_path(rollout_id), headers=headers)).json()
        assert result["err_category"] == "lease_expired"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "/healthz",
        "/health/",
        "//health",
        "/Health",
        "/health/a",
        "/rollout/",
        "//rollout",
        "/rollout//cancel",
        "/rollout/cancel/",
        "/rollout/a",
        "/rollout/a/",
        "/rollout//result",
        "/rollout/a/result/",
        "/rollout/a//result",
        "/rollout/a/b/result",
        "/rollout/a/Result",
        "/static/a",
        "/favicon.ico",
        "/.env",
        "/health%00",
        "/health%20",
        "/%2e%2e/health",
        "/../health",
        "/rollout/../health",
        "/health;a=b",
        "/%",
    ],
)
async def test_an_unknown_route_is_404_and_never_a_redirect(path: str):
    async with served_http(make_app()) as http:
        for method in ("GET", "POST", "OPTIONS"):
            status, body = await raw(http.base_url, request_bytes(method, path))
            assert (status, json.loads(body)) == (404, {"detail": "not found"}), method


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "http://elsewhere/health", 200),
        ("GET", "http://elsewhere", 404),
        ("GET", "http://[elsewhere/health", 404),
        ("GET", "http://elsewhere:99999999/health", 200),
        ("GET", "?health", 404),
        ("GET", "/health?", 200),
        ("GET", "/health?a=%ff&b", 200),
        ("GET", "/health#a", 404),
        ("GET", "health", 404),
        ("GET", "*", 404),
        ("OPTIONS", "*", 404),
        ("CONNECT", "elsewhere:80", 404),
    ],
)
async def test_other_forms_of_a_request_target(method: str, target: str, status: int):
    async with served_http(make_app()) as http:
        got, body = await raw(http.base_url, request_bytes(method, target))
        assert got == status, body
        assert isinstance(json.loads(body), dict)
        await assert_serves(http)


async def test_a_query_changes_nothing():
    async with served_http(make_app()) as http:
        rollout_id, headers = await admit(http)
        response = await http.get(result_path(rollout_id) + "?wait=0&a=%ff", headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/nowhere", "//", "", "http://[x/"])
async def test_a_websocket_that_an_asgi_server_lets_through_is_refused(path: str):
    app = make_app()
    sent = await handshake(app, path, [])
    assert sent[0]["type"] == "websocket.http.response.start"
    assert 400 <= sent[0]["status"] < 500
    assert set(json.loads(sent[1]["body"])) == {"detail"}


async def test_a_websocket_needs_the_key_like_everything_else():
    app = make_app(api_key=API_KEY)
    for headers in ([], [(b"authorization", b"Bearer other")]):
        assert (await handshake(app, "/health", headers))[0]["status"] == 401
    right = [(b"authorization", f"Bearer {API_KEY}".encode())]
    assert (await handshake(app, "/health", right))[0]["status"] == 400


async def handshake(app, path: str, headers: list[tuple[bytes, bytes]]) -> list[dict]:
    """What the application answers to a handshake."""
    sent: list[dict] = []
    incoming = [{"type": "websocket.connect"}]

    async def receive():
        if not incoming:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return incoming.pop()

    async def send(message):
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "websocket",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "ws",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"test"), *headers],
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }
    async with app.serving():
        await app(scope, receive, send)
    return sent


async def test_a_request_of_http_1_0_is_answered():
    async with served_http(make_app()) as http:
        status, body = await raw(http.base_url, b"GET /health HTTP/1.0\r\n\r\n")
        assert (status, json.loads(body)["status"]) == (200, "ok")


async def test_an_application_with_functions_around_its_requests_has_them_around_every_route():
    app = make_app()
    called: list[str] = []

    @app.after_request
    async def note(response):
        await trio.lowlevel.checkpoint()
        called.append(request.path)
        return response

    @app.get("/added")
    async def added() -> str:
        await trio.lowlevel.checkpoint()
        return "added"

    async with served_http(app) as http:
        rollout_id, headers = await admit(http)
        assert (await http.get(result_path(rollout_id), headers=headers)).status_code == 200
        assert (await http.get("/added")).text == "added"
        assert_refused(await http.post("/rollout", content=b"["), 422)
    assert called == ["/rollout", result_path(rollout_id), "/added", "/rollout"]


async def test_below_a_root_path_the_routes_are_the_same():
    app = make_app()
    async with (
        app.serving(),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, root_path="/mounted"),
            base_url="http://test/mounted",
        ) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        rollout_id, headers = await admit(http)
        response = await http.get(result_path(rollout_id), headers=headers)
        assert response.status_code == 200
