"""Answers that the protocol does not allow, and what an error may say about them."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
import trio
from client.fakes import TOKEN, FakeServer, admitted, bare_client, refused, result, run

from rollout.client import RolloutClient, RolloutProtocolError
from rollout.types import RolloutErrorCategory, RolloutStatus

MIB = 1024 * 1024
API_KEY = "s3cret-server-key"
LLM_KEY = "s3cret-llm-key"

ADMISSION = json.loads(admitted().content)
RESULT = json.loads(result("success").content)


def changed(body, **fields):
    kept = {name: value for name, value in body.items() if name not in fields}
    return {**kept, **{name: value for name, value in fields.items() if value is not ...}}


async def protocol_error(server):
    client = bare_client(server, api_key=API_KEY)
    with pytest.raises(RolloutProtocolError) as caught:
        await run(client, llm_api_key=LLM_KEY)
    message = str(caught.value)
    assert not any(secret in message for secret in (API_KEY, LLM_KEY, TOKEN))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty"),
        (b"<html>hello</html>", "not JSON"),
        (b'{"rollout_id": "r", ', "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"queued"', "must be a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 1000 + b"]" * 1000, "nests deeper"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e400}', "beyond the range"),
        (b"{}", "rollout_id: is required"),
        (b'{"status": "queued", "status": "queued"}', "more than once"),
    ],
)
@pytest.mark.parametrize("where", ["admissions", "polls"])
async def test_bodies_that_are_no_answer(where, body, said):
    status = 202 if where == "admissions" else 200
    headers = {"Content-Type": "text/html"}
    server = FakeServer(**{where: [httpx.Response(status, content=body, headers=headers)]})
    error = await protocol_error(server)
    assert error.status_code == status
    assert said in str(error)


async def test_a_poll_answered_with_status_unknown_is_an_error():
    error = await protocol_error(FakeServer(polls=[result("unknown")]))
    assert error.status_code == 200
    assert str(error).endswith("GET /rollout/r/result answered with status 'unknown'")


async def test_html_where_json_is_due_is_named(autojump_clock):
    page = httpx.Response(200, html="<html>a proxy says hello</html>")
    error = await protocol_error(FakeServer(polls=[page]))
    assert "text/html" in str(error)
    assert "GET /rollout/r/result" in str(error)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rollout_id", ..., "rollout_id: is required"),
        ("rollout_id", 1, "rollout_id"),
        ("rollout_id", "other", "different rollout_id"),
        ("status", "done", "status: must be one of"),
        ("status", ..., "status: is required"),
        ("polling_lease_token", ..., "polling_lease_token: is required"),
        ("polling_lease_token", "", "polling_lease_token"),
        ("polling_lease_token", 7, "polling_lease_token"),
        ("polling_lease_token", "a\r\nX-Evil: 1", "no header can carry"),
        ("polling_lease_token", "tökén", "no header can carry"),
        ("polling_lease_token", " padded ", "no header can carry"),
        ("result_wait_timeout_sec", 0, "positive and finite"),
        ("result_wait_timeout_sec", -1, "positive and finite"),
        ("result_wait_timeout_sec", True, "must be a number"),
        ("result_wait_timeout_sec", "30", "must be a number"),
        ("result_wait_timeout_sec", None, "must be a number"),
        ("result_wait_timeout_sec", 10**400, "finite"),
        ("result_wait_timeout_sec", 120, "must exceed result_wait_timeout_sec"),
        ("polling_lease_timeout_sec", 30, "must exceed result_wait_timeout_sec"),
        ("polling_lease_timeout_sec", 29.9, "must exceed result_wait_timeout_sec"),
        ("polling_lease_timeout_sec", ..., "polling_lease_timeout_sec: is required"),
    ],
)
async def test_admissions_that_break_a_rule(field, value, said):
    server = FakeServer(admissions=[httpx.Response(202, json=changed(ADMISSION, **{field: value}))])
    error = await protocol_error(server)
    assert error.status_code == 202
    assert said in str(error)
    assert "POST /rollout" in str(error)
    assert len(server.calls) == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rollout_id", "other", "different rollout_id"),
        ("rollout_id", None, "rollout_id"),
        ("status", ..., "status: is required"),
        ("status", "finished", "status: must be one of"),
        ("err_category", "boredom", "err_category: must be one of"),
        ("err_message", 7, "err_message"),
        ("agent_started_at", "yesterday", "agent_started_at"),
        ("agent_started_at", "2026-01-02T03:04:05", "agent_started_at"),
        ("agent_started_at", 1767323045, "agent_started_at"),
        ("sample", [], "sample"),
        ("sample", {"messages": "hello"}, "sample.messages"),
        ("sample", {"messages": [], "reward": "1"}, "sample.reward"),
        ("sample", {"messages": [], "remove_sample": 1}, "sample.remove_sample"),
    ],
)
async def test_results_that_break_a_rule(field, value, said):
    server = FakeServer(polls=[httpx.Response(200, json=changed(RESULT, **{field: value}))])
    error = await protocol_error(server)
    assert error.status_code == 200
    assert said in str(error)
    assert len(server.poll_calls) == 1


async def test_a_body_that_is_not_encoded_as_its_header_says():
    async def answer(_):
        return httpx.Response(
            200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")
        )

    error = await protocol_error(FakeServer(polls=[answer]))
    assert error.status_code == 200
    assert "not encoded as its header says" in str(error)


async def test_a_compressed_answer_is_read():
    async def answer(_):
        body = gzip.compress(result("success", err_message="x" * 1000).content)
        return httpx.Response(
            200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(body)
        )

    assert (await run(bare_client(FakeServer(polls=[answer])))).err_message == "x" * 1000


# --- answers that are fine ------------------------------------------------------------------


async def test_unknown_fields_are_ignored():
    server = FakeServer(
        admissions=[admitted(server_version="9", queue={"position": 3})],
        polls=[
            result(
                "success",
                progress=1.0,
                sample={"messages": [], "reward": 0.5, "colour": "blue"},
            )
        ],
    )
    terminal = await run(bare_client(server))
    assert terminal.sample.reward == 0.5


async def test_a_result_without_the_optional_fields_is_fine():
    server = FakeServer(polls=[result("failure", err_message="boom", err_category="agent_error")])
    terminal = await run(bare_client(server))
    assert terminal.status is RolloutStatus.FAILURE
    assert terminal.err_category is RolloutErrorCategory.AGENT_ERROR
    assert terminal.agent_started_at is None
    assert terminal.sample is None


async def test_times_may_be_whole_numbers():
    server = FakeServer(admissions=[admitted(wait=30, lease=120)])
    assert (await run(bare_client(server))).status is RolloutStatus.SUCCESS


# --- redirects and secrets ------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("where", ["admissions", "polls"])
async def test_a_redirect_is_not_followed(where, status):
    elsewhere = httpx.Response(status, headers={"Location": "http://elsewhere.test/steal"})
    server = FakeServer(**{where: [elsewhere]})
    error = await protocol_error(server)
    assert error.status_code == status
    expected = 202 if where == "admissions" else 200
    assert str(error).endswith(
        f"{status}, not {expected} (redirects are never followed; check the url)"
    )
    assert not any("steal" in call.path for call in server.calls)
    assert {call.headers["host"] for call in server.calls} == {"rollouts.test"}


async def test_not_even_where_the_http_client_follows_redirects():
    elsewhere = httpx.Response(302, headers={"Location": "http://elsewhere.test/steal"})
    server = FakeServer(admissions=[elsewhere])
    client = bare_client(server, api_key=API_KEY)
    client.http_client.follow_redirects = True
    with pytest.raises(RolloutProtocolError):
        await run(client)
    assert len(server.calls) == 1


async def test_a_422_names_the_fields_and_repeats_no_input():
    detail = [
        {
            "type": "string_type",
            "loc": ["body", "llm_api_key"],
            "msg": "Input should be a valid string",
            "input": LLM_KEY,
            "ctx": {"key": API_KEY},
        },
        {"loc": ["body", "messages", 0], "msg": "Field required", "input": {"api": LLM_KEY}},
        "not an object",
        {"loc": "not a list", "msg": "ignored"},
        {"msg": "of the whole body"},
        {"loc": ["body", "metadata"]},
    ]
    error = await protocol_error(FakeServer(admissions=[refused(422, detail)]))
    assert error.status_code == 422
    assert str(error) == (
        "POST /rollout answered 422, not 202: body.llm_api_key: Input should be a valid string; "
        "body.messages.0: Field required; : of the whole body; body.metadata: "
    )


@pytest.mark.parametrize(
    "detail",
    [
        f"wrong key {API_KEY}",
        f"cannot reach the model with {LLM_KEY}",
        [{"loc": ["header", API_KEY], "msg": f"got {LLM_KEY}"}],
        "x" * 490 + API_KEY,  # is cut in the middle of the key
    ],
)
async def test_a_refusal_that_quotes_a_secret_is_not_repeated(detail):
    error = await protocol_error(FakeServer(admissions=[refused(401, detail)]))
    assert "[reda" in str(error)
    assert "s3cret" not in str(error)


async def test_even_a_secret_that_is_too_short_to_be_looked_for_elsewhere_is_blanked_out():
    server = FakeServer(admissions=[refused(401, "the key pin7 is wrong")])
    with pytest.raises(RolloutProtocolError, match=r"401, not 202: the key \[redacted\] is wrong"):
        await run(bare_client(server, api_key="pin7"))


async def test_a_poll_that_is_refused_with_its_token_does_not_show_it():
    error = await protocol_error(FakeServer(polls=[refused(403, f"{TOKEN} is not the lease")]))
    assert "[redacted] is not the lease" in str(error)


@pytest.mark.parametrize(
    "quoted",
    [
        "Basic dXNlcjpzM2NyZXQgaHUvc2g=",
        "user:s3cret hu/sh",
        "?password=s3cret%20hu%2Fsh",
        "s3cret+hu/sh",
        r'{"password": "s3cret hu\\\/sh"}',
        "7333637265742068752f7368",
    ],
)
async def test_credentials_of_the_url_are_not_repeated_in_any_form(quoted):
    server = FakeServer(healths=[refused(401, f"got {quoted}.")])
    http = httpx.AsyncClient(transport=server)
    client = RolloutClient(url="http://user:s3cret%20hu%2Fsh@rollouts.test", http_client=http)
    with pytest.raises(RolloutProtocolError, match=r"got .*\[redacted\]") as caught:
        await client.health()
    for part in ("dXNlcj", "s3cret", "hu", "7336"):
        assert part not in str(caught.value)


async def test_what_would_repaint_a_terminal_is_escaped():
    detail = "\x1b[2Jnothing\r\nERROR forged \u202e"
    error = await protocol_error(FakeServer(admissions=[refused(400, detail)]))
    assert str(error) == (
        r"POST /rollout answered 400, not 202: \x1b[2Jnothing\r\nERROR forged \u202e"
    )


@pytest.mark.parametrize("detail", [None, 7, {"a": "b"}, [], [1, 2]])
async def test_a_refusal_without_a_readable_detail(detail):
    error = await protocol_error(FakeServer(admissions=[refused(409, detail)]))
    assert str(error) == "POST /rollout answered 409, not 202"


async def test_long_details_types_and_ids_are_cut():
    detail = await protocol_error(FakeServer(admissions=[refused(400, "x" * 10_000)]))
    page = httpx.Response(202, content=b"?", headers={"Content-Type": "text/" + "x" * 5000})
    kind = await protocol_error(FakeServer(admissions=[page]))
    long_id = "i" * 30_000
    server = FakeServer(admissions=[admitted(long_id)], polls=[refused(404, "unknown")])
    with pytest.raises(RolloutProtocolError, match="unknown") as caught:
        await run(bare_client(server), long_id)
    assert all(len(str(error)) < 700 for error in (detail, kind, caught.value))


async def test_the_api_key_goes_with_every_request():
    server = FakeServer(polls=[result("running"), result("success")])
    client = bare_client(server, api_key=API_KEY)
    await run(client)
    await client.health()
    await client.wait_idle()
    await client.cancel_rollout("r")
    assert len(server.calls) == 6
    assert {call.headers["Authorization"] for call in server.calls} == {f"Bearer {API_KEY}"}


async def test_without_an_api_key_no_authorization_is_sent():
    server = FakeServer()
    await run(bare_client(server))
    assert not any("Authorization" in call.headers for call in server.calls)


async def test_the_api_key_wins_over_the_authentication_of_the_http_client():
    server = FakeServer()
    client = bare_client(server, api_key=API_KEY)
    client.http_client.auth = httpx.BasicAuth("user", "password")
    client.http_client.headers["Authorization"] = "Bearer other"
    await run(client)
    assert {call.headers["Authorization"] for call in server.calls} == {f"Bearer {API_KEY}"}


async def test_without_an_api_key_the_http_client_may_authenticate():
    server = FakeServer()
    client = bare_client(server)
    client.http_client.auth = httpx.BasicAuth("user", "password")
    await run(client)
    assert {call.headers["Authorization"] for call in server.calls} == {
        "Basic dXNlcjpwYXNzd29yZA=="
    }


async def test_the_http_client_may_authenticate_in_two_steps():
    challenge = 'Digest realm="r", nonce="n", qop="auth", algorithm=SHA-256'
    server = FakeServer(admissions=[refused(401, WWW_Authenticate=challenge), admitted()])
    client = bare_client(server)
    client.http_client.auth = httpx.DigestAuth("user", "password")
    assert (await run(client)).status is RolloutStatus.SUCCESS
    first, second = server.calls[:2]
    assert first.body == second.body
    assert second.headers["Authorization"].startswith("Digest ")


class Endless(httpx.AsyncByteStream):
    """A body that goes on and on; notes how much of it was read, and its end."""

    def __init__(self) -> None:
        self.read = 0
        self.closed = False

    async def __aiter__(self):
        while True:
            await trio.lowlevel.checkpoint()
            self.read += 1
            yield b"x" * MIB

    async def aclose(self) -> None:
        self.closed = True


def endless(status):
    bodies = []

    async def answer(_):
        bodies.append(Endless())
        return httpx.Response(status, stream=bodies[-1])

    return answer, bodies


@pytest.mark.parametrize("status", [202, 401, 500])
async def test_a_body_without_end_is_refused_and_let_go(status):
    answer, bodies = endless(status)
    error = await protocol_error(FakeServer(admissions=[answer]))
    assert str(error) == "POST /rollout answered with a body of more than 16 MiB"
    assert error.status_code == status
    (body,) = bodies
    assert (body.read, body.closed) == (17, True)


async def test_a_gateway_whose_answer_has_no_end_is_waited_out(autojump_clock):
    answer, bodies = endless(502)
    outcome = await run(bare_client(FakeServer(polls=[answer, answer, result("success")])))
    assert outcome.status is RolloutStatus.SUCCESS
    assert [body.closed for body in bodies] == [True, True]


async def test_a_result_may_be_larger_but_not_without_end(monkeypatch):
    long = json.dumps({**RESULT, "err_message": "x" * 17 * MIB}).encode()

    async def answer(_):
        return httpx.Response(200, stream=httpx.ByteStream(long))

    outcome = await run(bare_client(FakeServer(polls=[answer])))
    assert len(outcome.err_message) == 17 * MIB

    monkeypatch.setattr("rollout.client.wire._LARGEST_RESULT", 16 * MIB)
    error = await protocol_error(FakeServer(polls=[answer]))
    assert "a body of more than 16 MiB" in str(error)


@pytest.mark.parametrize("layers", [1, 2])
async def test_a_compressed_body_is_decoded_up_to_the_bound(layers):
    data = b'{"detail": "' + b" " * 100 * MIB + b'"}'
    for _ in range(layers):
        data = gzip.compress(data, 1)
    headers = {"Content-Encoding": ", ".join(["gzip"] * layers)}
    bomb = httpx.Response(401, headers=headers, stream=httpx.ByteStream(data))

    async def answer(_):
        return bomb

    error = await protocol_error(FakeServer(admissions=[answer]))
    assert str(error) == "POST /rollout answered with a body of more than 16 MiB"


async def test_a_compressed_body_of_many_pieces_is_read():
    noise = "".join(f"{n * 7919 % 10007:x}" for n in range(20_000))
    data = gzip.compress(json.dumps({**RESULT, "err_message": noise}).encode())
    assert len(data) > 20_000

    async def answer(_):
        return httpx.Response(
            200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(data)
        )

    outcome = await run(bare_client(FakeServer(polls=[answer])))
    assert outcome.err_message == noise
