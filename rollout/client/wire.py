"""One rollout server, as seen through HTTP: requests out, checked answers back.

Nothing here waits or retries. Every answer that the protocol does not allow becomes a
`RolloutProtocolError` that says what the server said, as far as that is safe to repeat.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlsplit

import httpx
import trio
from attrs import define, field, frozen

from rollout._http import SpreadTransport, limits_of_pools, proxy_for, tls_context
from rollout._logs import printable
from rollout._redaction import Redactor
from rollout.client.bodies import OneBody, read_body, unwind
from rollout.codec import dump_json, parse_json, structure, unstructure
from rollout.errors import (
    InvalidBodyError,
    InvalidFieldError,
    RolloutClientClosedError,
    RolloutProtocolError,
)
from rollout.rules import SeenState
from rollout.types import (
    POLLING_LEASE_HEADER,
    SEEN_STATE_HEADER,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutResultResponse,
    RolloutStatus,
)

__all__ = ["Wire", "check_url", "is_refusal", "own_http_client"]

T = TypeVar("T")

_CONNECT_TIMEOUT_SEC = 10.0
_REQUEST_TIMEOUT_SEC = 60.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LONGEST_DETAIL = 500
_LONGEST_TYPE = 100
_LONGEST_PATH = 200
_CLOSE_SEC = 2.0

_MIB = 1024 * 1024
_LARGEST_ANSWER = 16 * _MIB
_LARGEST_RESULT = 1024 * _MIB
"""Samples may be large, but whatever answers must not fill the memory of this process."""


def check_url(url: str) -> tuple[str, httpx.BasicAuth | None]:
    """Take a base URL apart: without credentials and trailing slash, and the credentials.

    Kept in the URL, a password would stand in every line that logs a request.

    Raises:
        InvalidFieldError: It is no ``http`` or ``https`` URL with a host, or has a query.
    """
    if not isinstance(url, str):
        raise InvalidFieldError("url", "must be a string", kind="type_error")
    try:
        parsed = httpx.URL(url)
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, httpx.InvalidURL):
        # What is wrong with it is not repeated, since that may quote a part of a password.
        raise InvalidFieldError("url", "cannot be read as a URL") from None
    if parsed.scheme not in {"http", "https"} or not host or not parsed.host:
        raise InvalidFieldError("url", "must be an http:// or https:// URL with a host")
    if any(character.isspace() for character in parts.netloc):
        raise InvalidFieldError("url", "has white space in its host")
    if "?" in url or "#" in url:
        raise InvalidFieldError("url", "must have no query and no fragment")
    if not parsed.userinfo:
        return url.rstrip("/"), None
    plain = str(parsed.copy_with(userinfo=b"")).rstrip("/")
    return plain, httpx.BasicAuth(parsed.username, parsed.password)


def own_http_client(url: str) -> httpx.AsyncClient:
    """Make an HTTP client for long polls.

    As many connections as there are polls, since a capped pool starves the rollouts beyond
    the cap; no waiting for the pool; idle connections are dropped before a server drops them;
    and no proxy from the environment stands between this process and its own machine.

    Raises:
        InvalidFieldError: The certificates that the environment names cannot be read.
    """
    limits = limits_of_pools()
    context = tls_context(url)
    transport: httpx.AsyncBaseTransport | None = None
    if proxy_for(url) is None:
        # With a transport of its own httpx asks the environment for nothing.
        transport = SpreadTransport(lambda: httpx.AsyncHTTPTransport(verify=context, limits=limits))
    return httpx.AsyncClient(
        transport=transport,
        verify=context,
        limits=limits,
        timeout=httpx.Timeout(_REQUEST_TIMEOUT_SEC, connect=_CONNECT_TIMEOUT_SEC, pool=None),
        follow_redirects=False,
    )


class _Bearer(httpx.Auth):
    """Sends the API key, whatever authentication the user's own HTTP client is set to."""

    def __init__(self, api_key: str) -> None:
        self._header = f"Bearer {api_key}"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = self._header
        yield request


@frozen
class StreamedAnswer:
    """An answer that is still coming in.

    Attributes:
        status_code: Its status.
        data: Its body, piece by piece, not decoded.
    """

    status_code: int
    data: AsyncGenerator[bytes, None]


@define(eq=False)
class Wire:
    """The four routes of one server.

    Attributes:
        url: The base URL, without credentials and without a trailing slash.
        http: What sends the requests.
    """

    url: str
    http: httpx.AsyncClient = field(repr=False)
    _api_key: str | None = field(default=None, repr=False)
    _credentials: httpx.BasicAuth | None = field(default=None, repr=False)

    async def admit(self, body: bytes) -> httpx.Response:
        """Send one admission request; the answer is not checked yet."""
        return await self._send("POST", "/rollout", content=body)

    async def result(
        self, admission: RolloutInitResponse, *, seen: SeenState, timeout_sec: float
    ) -> httpx.Response:
        """Send one poll; the answer is not checked yet."""
        return await self._send(
            "GET",
            _result_path(admission.rollout_id),
            headers={
                POLLING_LEASE_HEADER: admission.polling_lease_token,
                SEEN_STATE_HEADER: seen.to_header(),
            },
            timeout_sec=timeout_sec,
            largest=_LARGEST_RESULT,
        )

    async def cancel(
        self, request: CancelRolloutsRequest, *, timeout_sec: float
    ) -> CancelRolloutsResponse:
        """Send one cancel request.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        response = await self._send(
            "POST",
            "/rollout/cancel",
            content=dump_json(unstructure(request)),
            timeout_sec=timeout_sec,
        )
        return self.read(response, CancelRolloutsResponse, "POST /rollout/cancel", expected=200)

    async def health(self) -> dict[str, Any]:
        """Read ``GET /health``.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        response = await self._send("GET", "/health")
        self._expect(response, 200, "GET /health", ())
        value = self._parse(response, "GET /health", ())
        if not isinstance(value, dict):
            raise RolloutProtocolError("GET /health answered with no JSON object", status_code=200)
        return value

    async def post(self, path: str, content: bytes) -> httpx.Response:
        """Send a request of an extension; the answer is not checked."""
        return await self._send("POST", path, content=content)

    @asynccontextmanager
    async def stream(
        self, path: str, content: bytes, *, read_timeout_sec: float
    ) -> AsyncGenerator[StreamedAnswer, None]:
        """Send a request whose answer is read as it comes.

        Args:
            path: Where to.
            content: The body.
            read_timeout_sec: How long the answer may be silent.

        Raises:
            RolloutClientClosedError: The HTTP client was closed.
            httpx.TransportError: There was no answer, or it broke off.
        """
        request = self._request("POST", path, content, None, read_timeout_sec)
        answer = await self.http.send(
            request, stream=True, auth=self._auth(), follow_redirects=False
        )
        try:
            # An async generator, whatever httpx declares; left open it would warn.
            data = cast("AsyncGenerator[bytes, None]", answer.aiter_raw())
            async with aclosing(data):
                try:
                    yield StreamedAnswer(answer.status_code, data)
                finally:
                    await unwind(data)
        finally:
            with trio.move_on_after(_CLOSE_SEC, shield=True):
                await answer.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        largest: int = _LARGEST_ANSWER,
    ) -> httpx.Response:
        """Send one request and read the answer to its end; follow no redirect.

        Raises:
            RolloutClientClosedError: The HTTP client was closed, before or meanwhile.
            RolloutProtocolError: The body is not encoded as its header says, or it is larger
                than *largest* bytes, or than any error has to be.
            httpx.TransportError: There was no answer.
        """
        request = self._request(method, path, content, headers, timeout_sec)
        try:
            answer = await self.http.send(
                request, stream=True, auth=self._auth(), follow_redirects=False
            )
            if answer.status_code != httpx.codes.OK:  # then little of it is of interest
                largest = min(largest, _LARGEST_ANSWER)
            if answer.is_stream_consumed:  # a transport of the user's own has read it already
                return answer
            try:
                return await read_body(answer, f"{method} {path[:_LONGEST_PATH]}", largest=largest)
            finally:
                await answer.aclose()
        except httpx.TransportError as error:
            if self.http.is_closed:
                raise RolloutClientClosedError(
                    "the HTTP client was closed while a request was under way"
                ) from error
            raise

    def _request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: dict[str, str] | None,
        timeout_sec: float | None,
    ) -> httpx.Request:
        if self.http.is_closed:
            raise RolloutClientClosedError("the HTTP client of this rollout client was closed")
        more = {} if content is None else {"Content-Type": "application/json"}
        request = self.http.build_request(
            method,
            f"{self.url}{path}",
            content=content,
            headers={**(headers or {}), **more},
            timeout=httpx.USE_CLIENT_DEFAULT if timeout_sec is None else timeout_sec,
        )
        request.stream = OneBody(request.content)
        return request

    def _auth(self) -> Any:
        if self._api_key is not None:
            return _Bearer(self._api_key)
        return self._credentials if self._credentials is not None else httpx.USE_CLIENT_DEFAULT

    # --- checking -----------------------------------------------------------------------------

    def read_admission(
        self, response: httpx.Response, request: RolloutInitRequest
    ) -> RolloutInitResponse:
        """Check an admission; anything but a valid 202 for that id is an error."""
        route = "POST /rollout"
        admission = self.read(
            response, RolloutInitResponse, route, expected=202, secrets=request.secrets
        )
        _expect_id(admission.rollout_id, request.rollout_id, response, route)
        if not _fits_header(admission.polling_lease_token):
            raise RolloutProtocolError(
                f"{route} answered with a lease token that no header can carry", status_code=202
            )
        return admission

    def read_result(
        self, response: httpx.Response, admission: RolloutInitResponse
    ) -> RolloutResultResponse:
        """Check the answer to a poll; anything but a valid 200 for that id is an error."""
        route = f"GET {_result_path(admission.rollout_id)[:_LONGEST_PATH]}"
        result = self.read(
            response,
            RolloutResultResponse,
            route,
            expected=200,
            secrets=(admission.polling_lease_token,),
        )
        if result.status is RolloutStatus.UNKNOWN:
            raise RolloutProtocolError(f"{route} answered with status 'unknown'", status_code=200)
        _expect_id(result.rollout_id, admission.rollout_id, response, route)
        return result

    def read(
        self,
        response: httpx.Response,
        kind: type[T],
        route: str,
        *,
        expected: int,
        secrets: Iterable[str | None] = (),
    ) -> T:
        """Check status and body of an answer.

        Args:
            response: The answer, read to its end.
            kind: What its body is to be.
            route: What was asked, for the error.
            expected: The status that it is to have.
            secrets: What an error must not repeat, besides the API key.

        Raises:
            RolloutProtocolError: Either is not what it should be.
        """
        self._expect(response, expected, route, secrets)
        try:
            return structure(self._parse(response, route, secrets), kind)
        except InvalidBodyError as error:
            raise self._refuse(
                response, f"{route} answered with an invalid body", error, secrets
            ) from None

    def _parse(self, response: httpx.Response, route: str, secrets: Iterable[str | None]) -> Any:
        try:
            return parse_json(response.content)
        except InvalidBodyError as error:
            kind = response.headers.get("Content-Type", "no content type")
            message = f"{route} answered with an invalid body ({kind[:_LONGEST_TYPE]})"
            raise self._refuse(response, message, error, secrets) from None

    def _expect(
        self, response: httpx.Response, expected: int, route: str, secrets: Iterable[str | None]
    ) -> None:
        if response.status_code == expected:
            return
        message = f"{route} answered {response.status_code}, not {expected}"
        if response.status_code in _REDIRECTS:
            message += " (redirects are never followed; check the url)"
        raise self._refuse(response, message, _detail(response), secrets)

    def _refuse(
        self,
        response: httpx.Response,
        message: str,
        detail: object,
        secrets: Iterable[str | None],
    ) -> RolloutProtocolError:
        """Make an error of what an answer says, without any secret that it may repeat."""
        # Hidden before it is cut: half of a secret would be found by nobody.
        said = printable(self._hide(str(detail), secrets))[:_LONGEST_DETAIL]
        message = printable(self._hide(message, secrets))
        return RolloutProtocolError(
            f"{message}: {said}" if said else message, status_code=response.status_code
        )

    def _hide(self, text: str, secrets: Iterable[str | None]) -> str:
        known = [self._api_key, *_secrets_of(self._credentials), *secrets]
        text = Redactor(known).text(text)
        for secret in known:
            if secret:  # a very short one, too: a shredded message is better than a key
                text = text.replace(secret, "[redacted]")
        return text


def _secrets_of(credentials: httpx.BasicAuth | None) -> list[str]:
    """Return what a server may repeat of credentials: the password, and all of them encoded."""
    if credentials is None:
        return []
    request = next(credentials.auth_flow(httpx.Request("GET", "http://localhost")))
    encoded = request.headers["Authorization"].removeprefix("Basic ")
    password = base64.b64decode(encoded).decode("utf-8", "replace").partition(":")[2]
    return [encoded, password]


def is_refusal(response: httpx.Response) -> bool:
    """Whether an answer proves that nothing was admitted.

    A 503 does if it says what a rollout server says: one of a gateway may stand for a lost answer.
    """
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return bool(_detail(response))
    return httpx.codes.is_client_error(response.status_code)


def _result_path(rollout_id: str) -> str:
    return f"/rollout/{quote(rollout_id, safe='')}/result"


def _fits_header(value: str) -> bool:
    return value.isascii() and value.isprintable() and value == value.strip()


def _expect_id(answered: str, asked: str, response: httpx.Response, route: str) -> None:
    if answered != asked:
        raise RolloutProtocolError(
            f"{route} answered for a different rollout_id", status_code=response.status_code
        )


def _detail(response: httpx.Response) -> str:
    """Read what a refusal says. Of a list only places and messages: inputs may be secrets."""
    try:
        body = parse_json(response.content)
    except InvalidBodyError:
        return ""
    detail = body.get("detail") if isinstance(body, dict) else None
    if isinstance(detail, list):
        lines = [
            ".".join(str(part) for part in item.get("loc", [])) + f": {item.get('msg', '')}"
            for item in detail
            if isinstance(item, dict) and isinstance(item.get("loc", []), list)
        ]
        detail = "; ".join(lines)
    return detail if isinstance(detail, str) else ""
