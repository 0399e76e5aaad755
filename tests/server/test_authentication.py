"""The server's api key: asked for on every route, before anything else."""

from __future__ import annotations

import json

import pytest
from server.faults import (
    API_KEY,
    admission,
    assert_refused,
    assert_serves,
    raw,
    read_answer,
    request_bytes,
    run,
    served_http,
)
from support import connected, make_app

pytestmark = pytest.mark.usefixtures("log_lines")

RIGHT = {"Authorization": f"Bearer {API_KEY}"}
WRONG = {
    "missing": {},
    "empty": {"Authorization": ""},
    "another key": {"Authorization": "Bearer other"},
    "a prefix": {"Authorization": f"Bearer {API_KEY[:-1]}"},
    "more": {"Authorization": f"Bearer {API_KEY}x"},
    "another case": {"Authorization": f"Bearer {API_KEY.upper()}"},
    "the scheme in lower case": {"Authorization": f"bearer {API_KEY}"},
    "another scheme": {"Authorization": f"Basic {API_KEY}"},
    "no scheme": {"Authorization": API_KEY},
    "no space": {"Authorization": f"Bearer{API_KEY}"},
    "two spaces": {"Authorization": f"Bearer  {API_KEY}"},
    "a list": {"Authorization": f"Bearer {API_KEY}, Bearer {API_KEY}"},
    "bytes beyond ASCII": {"Authorization": "Bearer \xfc\xff"},
    "another header": {"X-Api-Key": API_KEY},
}
ROUTES = [
    ("GET", "/health"),
    ("HEAD", "/health"),
    ("POST", "/health"),
    ("POST", "/rollout"),
    ("GET", "/rollout"),
    ("GET", "/rollout/a/result"),
    ("POST", "/rollout/cancel"),
    ("GET", "/nowhere"),
    ("POST", "/nowhere"),
    ("OPTIONS", "/health"),
    ("GET", "/"),
    ("GET", "//"),
    ("BREW", "/rollout"),
]


@pytest.mark.parametrize("case", WRONG)
async def test_without_the_exact_header_every_route_is_401(case: str):
    headers = WRONG[case]
    async with served_http(make_app(api_key=API_KEY), headers=RIGHT) as http:
        for method, path in ROUTES:
            status, body = (
                await raw(http.base_url, request_bytes(method, path, headers=headers))
                if method != "HEAD"
                else (
                    (await _head(http.base_url, path, headers)),
                    b'{"detail": ""}',
                )
            )
            assert status == 401, (method, path)
            assert set(json.loads(body)) == {"detail"}
        await assert_serves(http)


async def _head(url, path, headers) -> int:
    async with connected(str(url)) as stream:
        await stream.send_all(request_bytes("HEAD", path, headers=headers))
        received = b""
        while b"\r\n\r\n" not in received:
            received += await stream.receive_some()
        return int(received.split()[1])


async def test_a_401_says_how_to_authenticate():
    async with served_http(make_app(api_key=API_KEY)) as http:
        response = await http.get("/health")
        assert_refused(response, 401)
        assert response.headers["www-authenticate"] == "Bearer"


async def test_the_header_twice_is_not_the_exact_header():
    async with served_http(make_app(api_key=API_KEY), headers=RIGHT) as http:
        for second in ("Bearer other", f"Bearer {API_KEY}"):
            for pair in ((f"Bearer {API_KEY}", second), (second, f"Bearer {API_KEY}")):
                request = "GET /health HTTP/1.1\r\nHost: test\r\n" + "".join(
                    f"Authorization: {value}\r\n" for value in pair
                )
                assert (await raw(http.base_url, f"{request}\r\n".encode()))[0] == 401
        await assert_serves(http)


async def test_the_right_header_opens_every_route():
    async with served_http(make_app(api_key=API_KEY), headers=RIGHT) as http:
        assert (await run(http))["status"] == "success"
        assert (await http.post("/rollout/cancel", json={"all": True})).status_code == 200
        assert_refused(await http.get("/nowhere"), 404)
        assert_refused(await http.post("/health"), 405)
        assert_refused(await http.post("/rollout", content=b"["), 422)


async def test_without_a_key_of_its_own_a_server_asks_for_none():
    async with served_http(make_app(), headers={"Authorization": "Bearer anything"}) as http:
        await assert_serves(http)


async def test_401_comes_before_the_body_is_looked_at():
    async with served_http(make_app(api_key=API_KEY)) as http:
        for content in (b"[", json.dumps(admission()).encode(), b"x" * 2**20):
            for kind in ("application/json", "text/html"):
                response = await http.post(
                    "/rollout", content=content, headers={"Content-Type": kind}
                )
                assert_refused(response, 401)
        assert_refused(await http.get("/rollout/a/result"), 401)


async def test_401_does_not_wait_for_a_body_that_never_comes():
    async with served_http(make_app(api_key=API_KEY), headers=RIGHT) as http:
        async with connected(str(http.base_url)) as stream:
            await stream.send_all(request_bytes("POST", "/rollout", length=1000))
            status, body = await read_answer(stream)
            assert (status, set(json.loads(body))) == (401, {"detail"})
            assert await stream.receive_some() == b""
        await assert_serves(http)


async def test_a_websocket_handshake_is_401_too():
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with served_http(make_app(api_key=API_KEY), headers=RIGHT) as http:
        for target in ("/health", "/nowhere"):
            status, body = await raw(http.base_url, request_bytes("GET", target, headers=upgrade))
            assert status == 401
            assert set(json.loads(body)) == {"detail"}
        await assert_serves(http)


@pytest.mark.parametrize("key", ["", " ", "\t\n", " key", "key\n", "k\x00y", "k\xfcy", 7, b"key"])
def test_a_key_that_cannot_be_sent_is_refused_at_construction(key):
    with pytest.raises(ValueError, match="api_key"):
        make_app(api_key=key)


@pytest.mark.parametrize("key", ["k", "a b", "~!@#$%^&*()", "x" * 1000])
async def test_any_other_key_works(key: str):
    async with served_http(
        make_app(api_key=key), headers={"Authorization": f"Bearer {key}"}
    ) as http:
        await assert_serves(http)
