"""Bodies that are no admission, over real HTTP."""

from __future__ import annotations

import json
import threading
import zlib
from typing import Any

import pytest
import trio
from server.faults import (
    admission,
    assert_refused,
    assert_serves,
    in_process_http,
    problem_at,
    raw,
    read_answer,
    request_bytes,
    run,
    served_http,
)
from support import connected, make_app

from rollout.codec import parse_json

pytestmark = pytest.mark.usefixtures("log_lines")

GOOD = json.dumps(admission())


def body_with(**raw_json: str) -> bytes:
    """An admission with further fields in literal JSON."""
    extra = "".join(f',"{name}":{text}' for name, text in raw_json.items())
    return (json.dumps(admission())[:-1] + extra + "}").encode()


NO_ADMISSIONS = {
    "empty": b"",
    "blank": b" \r\n\t ",
    "no UTF-8": b'{"rollout_id": "\xff"}',
    "UTF-16": GOOD.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "no JSON": b"rollout_id=a",
    "HTML": b"<html></html>",
    "truncated": GOOD.encode()[:-5],
    "two documents": GOOD.encode() * 2,
    "trailing comma": GOOD.encode()[:-1] + b",}",
    "single quotes": GOOD.replace('"', "'").encode(),
    "a raw control character": b'{"rollout_id": "a\x01"}',
    "NUL": b"\x00",
    "NaN": body_with(agent_timeout_sec="NaN"),
    "NaN deep inside": body_with(metadata='{"a":[{"b":NaN}]}'),
    "Infinity": body_with(agent_timeout_sec="Infinity"),
    "-Infinity": body_with(agent_timeout_sec="-Infinity"),
    "1e400": body_with(metadata='{"a":1e400}'),
    "-1e400": body_with(metadata='{"a":-1e400}'),
    "too many digits": body_with(metadata='{"a":' + "9" * 10_000 + "}"),
    "arrays a thousand deep": b"[" * 1000 + b"]" * 1000,
    "objects a thousand deep": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "a metadata a thousand deep": body_with(metadata='{"a":' * 1000 + "1" + "}" * 1000),
    "a hundred thousand open brackets": b"[" * 100_000,
    "a key twice": body_with(label='"43"'),
    "a key twice deep inside": body_with(metadata='{"a":{"b":1,"b":2}}'),
    "an array": b"[]",
    "an array with an admission": f"[{GOOD}]".encode(),
    "a string": b'"admission"',
    "a number": b"7",
    "null": b"null",
    "true": b"true",
}


async def test_what_is_no_admission_is_refused_with_what_is_wrong():
    async with served_http(make_app()) as http:
        for name, body in NO_ADMISSIONS.items():
            for path in ("/rollout", "/rollout/cancel"):
                response = await http.post(path, content=body)
                detail = assert_refused(response, 422)
                assert detail[0]["loc"][0] == "body", name
                assert len(response.content) < 1000, name
        assert (await http.get("/health")).json()["lifecycle"]["active_rollouts"] == 0
        await assert_serves(http)


async def test_the_refusal_says_what_is_wrong_with_the_json():
    async with served_http(make_app()) as http:
        for name, part in {
            "empty": "empty",
            "no UTF-8": "UTF-8",
            "truncated": "line 1 column",
            "NaN": "NaN",
            "1e400": "beyond the range",
            "too many digits": "digits",
            "arrays a thousand deep": "nests deeper than 128",
            "an array": "must be a JSON object",
        }.items():
            response = await http.post("/rollout", content=NO_ADMISSIONS[name])
            (problem,) = assert_refused(response, 422)
            assert part in problem["msg"], name
        response = await http.post("/rollout", content=NO_ADMISSIONS["a key twice"])
        assert problem_at(response) == [["body", "label"]]


async def test_unknown_fields_and_a_json_suffix_are_fine():
    async with served_http(make_app()) as http:
        result = await run(http, controller_url="http://127.0.0.1:9", something_new={"a": [1]})
        assert result["status"] == "success"
        for kind in (
            "application/json; charset=utf-8",
            "application/vnd.rollout+json",
            "APPLICATION/JSON",
        ):
            response = await http.post(
                "/rollout", content=json.dumps(admission()), headers={"Content-Type": kind}
            )
            assert response.status_code == 202, kind


async def test_another_content_type_is_refused():
    async with served_http(make_app()) as http:
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/jsonp",
            "text/html",
        ):
            response = await http.post(
                "/rollout", content=json.dumps(admission()), headers={"Content-Type": kind}
            )
            (problem,) = assert_refused(response, 422)
            assert problem["type"] == "content_type", kind
        await assert_serves(http)


async def test_a_compressed_body_is_not_json():
    async with served_http(make_app()) as http:
        response = await http.post(
            "/rollout",
            content=zlib.compress(GOOD.encode()),
            headers={"Content-Encoding": "deflate"},
        )
        assert_refused(response, 422)
        await assert_serves(http)


async def test_lone_surrogates_come_back_as_they_went():
    text = "\ud800 and \udfff"
    async with served_http(make_app()) as http:
        result = await run(
            http,
            label=text,
            initial_messages=[{"role": "user", "content": text, "answer": text, text: text}],
            metadata={text: [text]},
        )
    assert result["status"] == "success"
    assert result["sample"]["reward"] == 1.0
    assert result["sample"]["label"] == text
    assert result["sample"]["messages"][0][text] == text


# --- size -------------------------------------------------------------------------------------

LIMIT = 4096
TOO_MUCH = b" " * (LIMIT + 1)


async def chunks(data: bytes, size: int = 1000):
    for start in range(0, len(data), size):
        yield data[start : start + size]
        await trio.lowlevel.checkpoint()


async def test_a_body_at_the_limit_is_taken_and_one_byte_more_is_not():
    async with served_http(make_app(max_request_bytes=LIMIT)) as http:
        body = json.dumps(admission()).encode()
        response = await http.post("/rollout", content=body + b" " * (LIMIT - len(body)))
        assert response.status_code == 202
        detail = assert_refused(await http.post("/rollout", content=TOO_MUCH), 413)
        assert str(LIMIT) in detail


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT])
async def test_a_body_that_is_too_large_leaves_the_connection_usable(size: int, chunked: bool):
    body = b"x" * size
    if chunked:
        head = request_bytes("POST", "/rollout", headers={"Transfer-Encoding": "chunked"})
        request = head + b"".join(
            b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:100], body[100:])
        )
        request += b"0\r\n\r\n"
    else:
        request = request_bytes("POST", "/rollout", body)
    async with (
        served_http(make_app(max_request_bytes=LIMIT)) as http,
        connected(str(http.base_url)) as stream,
    ):
        await stream.send_all(request)
        status, answer = await read_answer(stream)
        assert (status, set(json.loads(answer))) == (413, {"detail"})
        await stream.send_all(request_bytes("GET", "/health"))
        status, answer = await read_answer(stream)
        assert (status, json.loads(answer)["status"]) == (200, "ok")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/rollout", 413), ("POST", "/nowhere", 404), ("POST", "/health", 405)],
)
async def test_a_refused_body_is_read_while_it_is_sent(method: str, path: str, status: int):
    """Megabytes that nobody wants must not stall a client that writes before it reads."""
    async with served_http(make_app(max_request_bytes=2**20)) as http:
        response = await http.request(method, path, content=b"x" * 2**21)
        assert_refused(response, status)
        response = await http.request(method, path, content=chunks(b"x" * 2**21, 2**16))
        assert_refused(response, status)
        await assert_serves(http)


@pytest.mark.parametrize("path", ["/rollout", "/rollouts", "/rollouts/feed"])
async def test_a_body_with_too_many_values_is_too_large(path: str, monkeypatch):
    monkeypatch.setattr("rollout.server.asgi.MAX_BODY_VALUES", 1000)
    async with served_http(make_app()) as http:
        for count in (1000, 200_000):
            content = b'{"a": [' + b",".join([b"[]"] * count) + b"]}"
            detail = assert_refused(await http.post(path, content=content), 413)
            assert detail == "the body holds more than 1000 values"
        within_text = json.dumps(admission(label="[[,{" * 100_000))
        assert (await http.post("/rollout", content=within_text)).status_code == 202


async def test_a_large_body_is_decoded_in_a_thread_and_a_small_one_is_not(monkeypatch):
    threads: list[bool] = []

    def parse(data: bytes, **options: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return parse_json(data, **options)

    monkeypatch.setattr("rollout.server.asgi.parse_json", parse)
    async with served_http(make_app()) as http:
        for label in ("42", "x" * 100_000):
            response = await http.post("/rollout", json=admission(label=label))
            assert response.status_code == 202
    assert threads == [False, True]


async def test_past_the_bound_of_draining_the_connection_is_closed():
    """The whole declared body is far beyond what is worth reading."""
    async with (
        served_http(make_app(max_request_bytes=LIMIT)) as http,
        connected(str(http.base_url)) as stream,
    ):
        await stream.send_all(request_bytes("POST", "/rollout", b"x" * 5 * LIMIT, length=2**40))
        status, _ = await read_answer(stream)
        assert status == 413
        assert await stream.receive_some() == b""
        await assert_serves(http)


async def test_lies_about_the_length_are_refused():
    async with served_http(make_app()) as http:
        for length in ("-1", "x", "1e3", "3, 4", "9" * 5000):
            head = request_bytes("POST", "/rollout", headers={"Content-Length": length})
            assert (await raw(http.base_url, head))[0] == 400, length
        await assert_serves(http)


# --- time -------------------------------------------------------------------------------------


async def call(app, messages: list[dict], path: str = "/rollout") -> list[dict]:
    """Call the application as an ASGI server does, with a peer that stops after *messages*."""
    sent: list[dict] = []
    incoming = list(messages)

    async def receive():
        if not incoming:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return incoming.pop(0)

    async def send(message):
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"test"), (b"content-length", b"100")],
    }
    await app(scope, receive, send)
    return sent


async def test_a_body_that_stops_coming_is_given_up(autojump_clock):
    app = make_app()
    async with in_process_http(app) as http:
        piece = {"type": "http.request", "body": b"{", "more_body": True}
        start, *rest = await call(app, [piece])
        assert start["status"] == 408
        assert (b"connection", b"close") in [
            (name.lower(), value) for name, value in start["headers"]
        ]
        assert set(json.loads(b"".join(message["body"] for message in rest))) == {"detail"}
        assert trio.current_time() < 100
        await assert_serves(http)


async def test_a_refusal_does_not_wait_long_for_a_body_that_stops_coming(autojump_clock):
    """A peer that sends nothing more is waiting for the answer."""
    app = make_app()
    async with in_process_http(app) as http:
        start, *_ = await call(app, [], "/nowhere")
        assert start["status"] == 404
        assert trio.current_time() <= 2
        await assert_serves(http)
