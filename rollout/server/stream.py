"""The route of the result feed, as a bare ASGI application.

Quart cancels a handler on disconnect but sends responses shielded, which is right for an
answer and wrong for a stream that has no end. So this route stands in front of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout
from werkzeug.http import parse_options_header
from werkzeug.sansio.utils import get_content_length

from rollout.codec import dump_json
from rollout.errors import FieldProblem, InvalidBodyError, InvalidFieldError
from rollout.server.batch import field_problems
from rollout.server.body import IncomingBody, receive_into, send_body
from rollout.server.feed import HEARTBEAT, Feed, FeedHub, hello, read_claims
from rollout.server.refusals import RefusalLog

__all__ = ["FEED_PATH", "FeedRoute"]

FEED_PATH = "/rollouts/feed"
_BODY_TIMEOUT_SEC = 60.0
_SEND_SEC = 60.0
"""How long an answer may take to go out once its peer is gone, in seconds."""

_JSON = (b"content-type", b"application/json")
_LINES = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx, among others, then does not buffer it
]


class FeedRoute:
    """Answers ``POST /rollouts/feed``.

    Args:
        hub: The open feeds.
        authorized: Says whether the headers of a request carry the server's key.
        accepting: Says whether feeds are opened at all.
        refusals: Logs requests without the key.
        heartbeat_sec: The longest silence of a feed, in seconds.
        max_request_bytes: Larger bodies are refused.
    """

    def __init__(
        self,
        hub: FeedHub,
        *,
        authorized: Callable[[list[tuple[bytes, bytes]]], bool],
        accepting: Callable[[], bool],
        refusals: RefusalLog,
        heartbeat_sec: float,
        max_request_bytes: int,
    ) -> None:
        self._hub = hub
        self._authorized = authorized
        self._accepting = accepting
        self._refusals = refusals
        self._heartbeat_sec = heartbeat_sec
        self._limit = max_request_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request; a disconnect ends it, and closes its feed."""
        declared = get_content_length(
            _header(scope, b"content-length"), _header(scope, b"transfer-encoding")
        )
        body = IncomingBody(limit=self._limit, declared=declared)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, body, receive, nursery.cancel_scope)
            await self._answer(scope, body, send)
            nursery.cancel_scope.cancel()

    async def _answer(self, scope: Any, body: IncomingBody, send: Any) -> None:
        refuse = partial(_refuse, scope, send, body)
        if not self._authorized(list(scope["headers"])):
            peer = (scope.get("client") or (None,))[0]
            self._refusals.note(401, scope["method"], FEED_PATH, peer)
            challenge = (b"www-authenticate", b"Bearer")
            await refuse(401, "missing or wrong api key", challenge)
        elif scope["method"] != "POST":
            await refuse(405, "method not allowed", (b"allow", b"POST"))
        elif not self._accepting():
            await refuse(503, "the rollout server is not serving")
        else:
            try:
                kind, _ = parse_options_header(_header(scope, b"content-type"))
                claims = read_claims(await body.read_json(kind, _BODY_TIMEOUT_SEC))
            except InvalidBodyError as error:
                await refuse(422, field_problems("body", error.problems))
            except InvalidFieldError as error:
                problem = FieldProblem((error.field,), error.reason, error.kind)
                await refuse(422, field_problems("body", (problem,)))
            except RequestEntityTooLarge as error:
                await refuse(413, error.description)
            except RequestTimeout:
                await refuse(408, "the body took too long")
            else:
                await trio.lowlevel.checkpoint()
                feed, token, refused = self._hub.open(claims)
                try:
                    await self._stream(feed, hello(token, refused, self._heartbeat_sec), send)
                finally:
                    self._hub.forget(feed, token)

    async def _stream(self, feed: Feed, first: bytes, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _LINES})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        said_at = trio.current_time()
        while True:
            await feed.wait(said_at + self._heartbeat_sec)
            pieces, taken = feed.take()
            if not pieces:
                if feed.closed:
                    break
                if trio.current_time() < said_at + self._heartbeat_sec:
                    continue  # what has changed was no news
                pieces = [HEARTBEAT]
            # Writing waits for the reader, and meanwhile marks add up, not messages.
            for piece in pieces:
                await send_body(send, piece)
            feed.sent(taken)
            said_at = trio.current_time()
        # Once the answer is complete, a disconnect is reported while the ASGI server still
        # puts the connection back to idle; cancelled there, it would never time out.
        with trio.move_on_after(_SEND_SEC, shield=True):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _header(scope: Any, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key.lower() == name:
            return str(value.decode("latin-1"))
    return None


async def _refuse(
    scope: Any,
    send: Any,
    body: IncomingBody,
    status: int,
    detail: Any,
    *headers: tuple[bytes, bytes],
) -> None:
    content = dump_json({"detail": detail})
    all_headers = [_JSON, (b"content-length", str(len(content)).encode()), *headers]
    if not await body.drain_bounded() and scope.get("http_version", "1.1").startswith("1"):
        all_headers.append((b"connection", b"close"))
    if scope["method"] == "HEAD":
        content = b""
    with trio.move_on_after(_SEND_SEC, shield=True):
        await send({"type": "http.response.start", "status": status, "headers": all_headers})
        await send({"type": "http.response.body", "body": content, "more_body": False})
