"""One rollout server, as seen through HTTP: requests out, checked answers back.

Nothing here waits or retries. Every answer that the protocol does not allow becomes a
`RolloutProtocolError` that says what the server said, as far as that is safe to repeat.
"""

from __future__ import annotations

import ipaddress
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from attrs import define, field

from rollout.codec import dump_json, parse_json, structure, unstructure
from rollout.errors import InvalidBodyError, InvalidFieldError, RolloutProtocolError
from rollout.rules import SeenState
from rollout.types import (
    POLLING_LEASE_HEADER,
    SEEN_STATE_HEADER,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    RolloutInitResponse,
    RolloutResultResponse,
)

__all__ = ["Wire", "check_url", "own_http_client"]

T = TypeVar("T")

_KEEP_ALIVE_EXPIRY_SEC = 4.0
"""Below the five seconds after which common servers close an idle connection."""

_CONNECT_TIMEOUT_SEC = 10.0
_REQUEST_TIMEOUT_SEC = 60.0
_KEPT_CONNECTIONS = 100
_LONGEST_DETAIL = 500


def check_url(url: str) -> str:
    """Return the base URL without a trailing slash.

    Raises:
        InvalidFieldError: It is no ``http`` or ``https`` URL with a host, or has a query.
    """
    if not isinstance(url, str):
        raise InvalidFieldError("url", "must be a string", kind="type_error")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidFieldError("url", f"cannot be read: {error}") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise InvalidFieldError("url", "must be an http:// or https:// URL with a host")
    if parts.query or parts.fragment:
        raise InvalidFieldError("url", "must have no query and no fragment")
    return url.rstrip("/")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_http_client(url: str) -> httpx.AsyncClient:
    """Make an HTTP client for long polls.

    As many connections as there are polls, since a capped pool starves the rollouts beyond
    the cap; no waiting for the pool; idle connections are dropped before a server drops them;
    and no proxy from the environment stands between this process and its own machine.
    """
    return httpx.AsyncClient(
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=_KEPT_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_EXPIRY_SEC,
        ),
        timeout=httpx.Timeout(_REQUEST_TIMEOUT_SEC, connect=_CONNECT_TIMEOUT_SEC, pool=None),
        follow_redirects=False,
        trust_env=not _is_loopback(url),
    )


@define(eq=False)
class Wire:
    """The four routes of one server.

    Attributes:
        url: The base URL, without a trailing slash.
        http: What sends the requests.
    """

    url: str
    http: httpx.AsyncClient = field(repr=False)
    _api_key: str | None = field(default=None, repr=False)

    async def admit(self, body: bytes) -> httpx.Response:
        """Send one admission request; the answer is not checked yet."""
        return await self.http.post(
            f"{self.url}/rollout",
            content=body,
            headers=self._headers({"Content-Type": "application/json"}),
            follow_redirects=False,
        )

    async def result(
        self, admission: RolloutInitResponse, *, seen: SeenState, timeout_sec: float
    ) -> httpx.Response:
        """Send one poll; the answer is not checked yet."""
        return await self.http.get(
            f"{self.url}/rollout/{quote(admission.rollout_id, safe='')}/result",
            headers=self._headers(
                {
                    POLLING_LEASE_HEADER: admission.polling_lease_token,
                    SEEN_STATE_HEADER: seen.to_header(),
                }
            ),
            timeout=timeout_sec,
            follow_redirects=False,
        )

    async def cancel(
        self, request: CancelRolloutsRequest, *, timeout_sec: float
    ) -> CancelRolloutsResponse:
        """Send one cancel request.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        response = await self.http.post(
            f"{self.url}/rollout/cancel",
            content=dump_json(unstructure(request)),
            headers=self._headers({"Content-Type": "application/json"}),
            timeout=timeout_sec,
            follow_redirects=False,
        )
        return self.read(response, CancelRolloutsResponse, "POST /rollout/cancel", expected=200)

    async def health(self) -> dict[str, Any]:
        """Read ``GET /health``.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        response = await self.http.get(
            f"{self.url}/health", headers=self._headers({}), follow_redirects=False
        )
        self._expect(response, 200, "GET /health")
        value = self._parse(response, "GET /health")
        if not isinstance(value, dict):
            raise RolloutProtocolError("GET /health answered with no JSON object", status_code=200)
        return value

    # --- checking -----------------------------------------------------------------------------

    def read_admission(self, response: httpx.Response, rollout_id: str) -> RolloutInitResponse:
        """Check an admission; anything but a valid 202 for that id is an error."""
        admission = self.read(response, RolloutInitResponse, "POST /rollout", expected=202)
        self._expect_id(admission.rollout_id, rollout_id, response, "POST /rollout")
        return admission

    def read_result(self, response: httpx.Response, rollout_id: str) -> RolloutResultResponse:
        """Check the answer to a poll; anything but a valid 200 for that id is an error."""
        route = f"GET /rollout/{rollout_id}/result"
        result = self.read(response, RolloutResultResponse, route, expected=200)
        self._expect_id(result.rollout_id, rollout_id, response, route)
        return result

    def read(self, response: httpx.Response, kind: type[T], route: str, *, expected: int) -> T:
        """Check status and body of an answer.

        Raises:
            RolloutProtocolError: Either is not what it should be.
        """
        self._expect(response, expected, route)
        try:
            return structure(self._parse(response, route), kind)
        except InvalidBodyError as error:
            raise RolloutProtocolError(
                self._safe(f"{route} answered with an invalid body: {error}"),
                status_code=response.status_code,
            ) from None

    def _parse(self, response: httpx.Response, route: str) -> Any:
        try:
            return parse_json(response.content)
        except InvalidBodyError as error:
            kind = response.headers.get("Content-Type", "no content type")
            raise RolloutProtocolError(
                self._safe(f"{route} answered with an invalid body ({kind}): {error}"),
                status_code=response.status_code,
            ) from None

    def _expect(self, response: httpx.Response, expected: int, route: str) -> None:
        if response.status_code == expected:
            return
        detail = _detail(response)
        message = f"{route} answered {response.status_code}, not {expected}"
        raise RolloutProtocolError(
            self._safe(f"{message}: {detail}" if detail else message),
            status_code=response.status_code,
        )

    def _expect_id(self, answered: str, asked: str, response: httpx.Response, route: str) -> None:
        if answered != asked:
            raise RolloutProtocolError(
                f"{route} answered for a different rollout_id", status_code=response.status_code
            )

    def _safe(self, text: str) -> str:
        return text.replace(self._api_key, "[redacted]") if self._api_key else text

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        if self._api_key is not None:
            more["Authorization"] = f"Bearer {self._api_key}"
        return more


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
    return detail[:_LONGEST_DETAIL] if isinstance(detail, str) else ""
