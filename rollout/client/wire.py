"""One rollout server, as seen through HTTP: requests out, checked answers back.

Nothing here waits or retries. Every answer that the protocol does not allow becomes a
`RolloutProtocolError` that says what the server said, as far as that is safe to repeat.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import lru_cache
from typing import Any, TypeVar, cast
from urllib.parse import quote

import httpx
import trio
from attrs import define, field, frozen

from rollout._logs import printable
from rollout._redaction import Redactor
from rollout.client.http import BearerAuth, OneBody, read_body, secrets_of, unwind
from rollout.codec import dump_json, parse_json, structure, unstructure
from rollout.errors import (
    InvalidBodyError,
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

__all__ = ["AdmissionAnswer", "Admitted", "Busy", "Refused", "StreamedAnswer", "Wire"]

T = TypeVar("T")

_ADMIT = "POST /rollout"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LONGEST_DETAIL = 500
_LONGEST_TYPE = 100
_LONGEST_PATH = 200
_CLOSE_SEC = 2.0

_MIB = 1024 * 1024
_LARGEST_ANSWER = 16 * _MIB
_LARGEST_RESULT = 1024 * _MIB
"""Samples may be large, but whatever answers must not fill the memory of this process."""


@frozen
class Admitted:
    """An answer that admits a rollout (202).

    Attributes:
        response: The admission.
        sent_at: When the request was sent (trio time).
    """

    response: RolloutInitResponse
    sent_at: float

    @property
    def lease_deadline(self) -> float:
        """When the lease ends unless it is renewed: counted from when the request was sent."""
        return self.sent_at + self.response.polling_lease_timeout_sec


@frozen
class Busy:
    """An answer that puts a rollout off: the server has no room (429).

    Attributes:
        retry_after: When to ask again, as in a ``Retry-After`` header; ``None`` if it is missing.
    """

    retry_after: str | None


@frozen
class Refused:
    """Any other answer to a request for admission.

    Attributes:
        error: The error for the caller, with what the server said.
        certain: Whether it proves that nothing was admitted. A 503 does if it has a detail, as
            those of a rollout server have: one of a gateway may stand for a lost answer.
    """

    error: RolloutProtocolError
    certain: bool


AdmissionAnswer = Admitted | Busy | Refused


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
    """Requests to the routes of one server.

    Attributes:
        url: The base URL, without credentials and without a trailing slash.
        http: The HTTP client that sends the requests.
    """

    url: str
    http: httpx.AsyncClient = field(repr=False)
    _api_key: str | None = field(default=None, repr=False)
    _credentials: httpx.BasicAuth | None = field(default=None, repr=False)

    async def admit(
        self, request: RolloutInitRequest, body: bytes, on_sent: Callable[[], None]
    ) -> AdmissionAnswer:
        """Send one admission request.

        Args:
            request: The request.
            body: The same, encoded.
            on_sent: Called when it is on its way.

        Raises:
            httpx.TransportError: There was no answer.
        """
        await trio.lowlevel.checkpoint()  # where the time is up already, nothing is sent
        on_sent()
        sent_at = trio.current_time()
        return self.read_admission(await self.post("/rollout", body), request, sent_at)

    async def result(
        self, admission: RolloutInitResponse, *, seen: SeenState, timeout_sec: float
    ) -> RolloutResultResponse:
        """Send one poll.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        path = f"/rollout/{quote(admission.rollout_id, safe='')}/result"
        token = admission.polling_lease_token
        response = await self._send(
            "GET",
            path,
            headers={POLLING_LEASE_HEADER: token, SEEN_STATE_HEADER: seen.to_header()},
            timeout_sec=timeout_sec,
            largest=_LARGEST_RESULT,
        )
        route = f"GET {path[:_LONGEST_PATH]}"
        result = self._read(response, RolloutResultResponse, route, (token,))
        if result.status is RolloutStatus.UNKNOWN:
            raise RolloutProtocolError(f"{route} answered with status 'unknown'", status_code=200)
        _expect_id(result.rollout_id, admission.rollout_id, 200, route)
        return result

    async def cancel(
        self, request: CancelRolloutsRequest, *, timeout_sec: float
    ) -> CancelRolloutsResponse:
        """Send one cancel request.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        content = dump_json(unstructure(request))
        response = await self._send(
            "POST", "/rollout/cancel", content=content, timeout_sec=timeout_sec
        )
        return self._read(response, CancelRolloutsResponse, "POST /rollout/cancel")

    async def health(self) -> dict[str, Any]:
        """Read ``GET /health``.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        response = await self._send("GET", "/health")
        self._expect_ok(response, "GET /health")
        value = self._parse(response, "GET /health")
        if not isinstance(value, dict):
            raise RolloutProtocolError("GET /health answered with no JSON object", status_code=200)
        return value

    async def post(self, path: str, content: bytes) -> httpx.Response:
        """Send a request; the answer is not checked yet."""
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
            _parsed(f"{self.url}{path}"),
            content=content,
            headers={**(headers or {}), **more},
            timeout=httpx.USE_CLIENT_DEFAULT if timeout_sec is None else timeout_sec,
        )
        request.stream = OneBody(request.content)
        return request

    def _auth(self) -> Any:
        if self._api_key is not None:
            return BearerAuth(self._api_key)
        return self._credentials if self._credentials is not None else httpx.USE_CLIENT_DEFAULT

    # --- checking -----------------------------------------------------------------------------

    def read_admission(
        self, response: httpx.Response, request: RolloutInitRequest, sent_at: float
    ) -> AdmissionAnswer:
        """Read the answer to a request for admission, alone or for a batch as a whole."""
        try:
            body = self._parse(response, _ADMIT, request.secrets)
        except RolloutProtocolError as error:
            if response.status_code == httpx.codes.ACCEPTED:
                return Refused(error, certain=False)
            body = None
        retry_after = response.headers.get("Retry-After")
        return self._answer(response.status_code, body, retry_after, request, sent_at)

    def read_outcome(
        self, outcome: dict[str, Any], request: RolloutInitRequest, sent_at: float
    ) -> AdmissionAnswer:
        """Read one outcome of a batch, whose ``status_code`` is one of HTTP."""
        code = outcome["status_code"]
        retry_after = outcome.get("retry_after_sec")
        body = outcome.get("admission") if code == httpx.codes.ACCEPTED else outcome
        header = None if retry_after is None else str(retry_after)
        return self._answer(code, body, header, request, sent_at)

    def _answer(
        self,
        status_code: int,
        body: Any,
        retry_after: str | None,
        request: RolloutInitRequest,
        sent_at: float,
    ) -> AdmissionAnswer:
        if status_code == httpx.codes.ACCEPTED:
            try:
                return Admitted(self._admission(body, request), sent_at)
            except RolloutProtocolError as error:
                return Refused(error, certain=False)
        if status_code == httpx.codes.TOO_MANY_REQUESTS:
            return Busy(retry_after)
        detail = _detail(body)
        certain = httpx.codes.is_client_error(status_code) or (
            status_code == httpx.codes.SERVICE_UNAVAILABLE and bool(detail)
        )
        return Refused(self._unexpected(status_code, 202, _ADMIT, detail, request.secrets), certain)

    def _admission(self, body: Any, request: RolloutInitRequest) -> RolloutInitResponse:
        admission = self._structure(body, RolloutInitResponse, 202, _ADMIT, request.secrets)
        _expect_id(admission.rollout_id, request.rollout_id, 202, _ADMIT)
        if not _fits_header(admission.polling_lease_token):
            raise RolloutProtocolError(
                f"{_ADMIT} answered with a lease token that no header can carry", status_code=202
            )
        return admission

    def _read(
        self,
        response: httpx.Response,
        kind: type[T],
        route: str,
        secrets: Iterable[str | None] = (),
    ) -> T:
        """Check that an answer is a 200 with a body of this type.

        Args:
            response: The answer, read to its end.
            kind: The type of its body.
            route: What was asked, for the error.
            secrets: What an error must not repeat, besides the API key.

        Raises:
            RolloutProtocolError: It is anything else.
        """
        self._expect_ok(response, route, secrets)
        return self._structure(self._parse(response, route, secrets), kind, 200, route, secrets)

    def _expect_ok(
        self, response: httpx.Response, route: str, secrets: Iterable[str | None] = ()
    ) -> None:
        if response.status_code != httpx.codes.OK:
            try:
                detail = _detail(parse_json(response.content))
            except InvalidBodyError:
                detail = ""
            raise self._unexpected(response.status_code, 200, route, detail, secrets)

    def _parse(
        self, response: httpx.Response, route: str, secrets: Iterable[str | None] = ()
    ) -> Any:
        try:
            return parse_json(response.content)
        except InvalidBodyError as error:
            kind = response.headers.get("Content-Type", "no content type")
            message = f"{route} answered with an invalid body ({kind[:_LONGEST_TYPE]})"
            raise self._error(response.status_code, message, str(error), secrets) from None

    def _structure(
        self, body: Any, kind: type[T], status_code: int, route: str, secrets: Iterable[str | None]
    ) -> T:
        try:
            return structure(body, kind)
        except InvalidBodyError as error:
            message = f"{route} answered with an invalid body"
            raise self._error(status_code, message, str(error), secrets) from None

    def _unexpected(
        self,
        status_code: int,
        expected: int,
        route: str,
        detail: str,
        secrets: Iterable[str | None],
    ) -> RolloutProtocolError:
        message = f"{route} answered {status_code}, not {expected}"
        if status_code in _REDIRECTS:
            message += " (redirects are never followed; check the url)"
        return self._error(status_code, message, detail, secrets)

    def _error(
        self, status_code: int, message: str, detail: str, secrets: Iterable[str | None]
    ) -> RolloutProtocolError:
        """Make an error of what an answer says, without any secret that it may repeat."""
        # Hidden before it is cut: half of a secret would be found by nobody.
        said = printable(self._hide(detail, secrets))[:_LONGEST_DETAIL]
        message = printable(self._hide(message, secrets))
        return RolloutProtocolError(
            f"{message}: {said}" if said else message, status_code=status_code
        )

    def _hide(self, text: str, secrets: Iterable[str | None]) -> str:
        known = [self._api_key, *secrets_of(self._credentials), *secrets]
        text = Redactor(known).text(text)
        for secret in known:
            if secret:  # a very short one, too: a shredded message is better than a key
                text = text.replace(secret, "[redacted]")
        return text


@lru_cache(maxsize=1024)
def _parsed(url: str) -> httpx.URL:
    """Parse a URL; a client asks for the same ones again and again."""
    return httpx.URL(url)


def _fits_header(value: str) -> bool:
    return value.isascii() and value.isprintable() and value == value.strip()


def _expect_id(answered: str, asked: str, status_code: int, route: str) -> None:
    if answered != asked:
        raise RolloutProtocolError(
            f"{route} answered for a different rollout_id", status_code=status_code
        )


def _detail(body: Any) -> str:
    """Read the detail of a refusal; of a list only places and messages: inputs may be secrets."""
    detail = body.get("detail") if isinstance(body, dict) else None
    if isinstance(detail, list):
        lines = [
            ".".join(str(part) for part in item.get("loc", [])) + f": {item.get('msg', '')}"
            for item in detail
            if isinstance(item, dict) and isinstance(item.get("loc", []), list)
        ]
        detail = "; ".join(lines)
    return detail if isinstance(detail, str) else ""
