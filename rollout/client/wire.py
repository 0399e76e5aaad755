"""One rollout server, as seen through HTTP: requests out, checked answers back.

Nothing here waits or retries.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import lru_cache
from typing import Any, cast
from urllib.parse import quote

import httpx
import trio
from attrs import define, field, frozen

from rollout._telemetry.tracing import TRACEPARENT, current_traceparent
from rollout._threads import BODIES, run_off_loop
from rollout.client.answers import AdmissionAnswer, AnswerReader
from rollout.client.http import (
    LARGE_BODY,
    BearerAuth,
    OneBody,
    read_body,
    secrets_of,
    unwind,
)
from rollout.codec import dump_json, unstructure
from rollout.errors import (
    RolloutClientClosedError,
    RolloutProtocolError,
    TrajectoryUnavailableError,
)
from rollout.rules import SeenState
from rollout.trajectory import Trajectory, read_trajectory
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

__all__ = ["StreamedAnswer", "Wire"]

_LONGEST_PATH = 200
_CLOSE_SEC = 2.0
_START_PATH = "/rollouts/start"
_UNAVAILABLE = frozenset({httpx.codes.NOT_FOUND, httpx.codes.CONFLICT})

_MIB = 1024 * 1024
_LARGEST_ANSWER = 16 * _MIB
_LARGEST_RESULT = 1024 * _MIB
"""Samples may be large, but whatever answers must not fill the memory of this process."""


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
        traceparent = current_traceparent()
        headers = None if traceparent is None else {TRACEPARENT: traceparent}
        response = await self.post("/rollout", body, headers)
        return self.admission_reader(request).admission(response, request, sent_at)

    def admission_reader(self, request: RolloutInitRequest) -> AnswerReader:
        """Return a reader of answers to an admission request, alone or in a batch."""
        return self.reader("POST /rollout", *request.secrets)

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
        reader = self.reader(f"GET {path[:_LONGEST_PATH]}", token)
        result = reader.read(response, RolloutResultResponse)
        if result.status is RolloutStatus.UNKNOWN:
            raise reader.error(200, "with status 'unknown'")
        reader.expect_id(result.rollout_id, admission.rollout_id, 200)
        return result

    async def trajectory(self, rollout_id: str, token: str, *, timeout_sec: float) -> Trajectory:
        """Ask for the trajectory of a rollout that has ended.

        Raises:
            TrajectoryUnavailableError: The server has none.
            TrajectoryError: It breaks a rule of the format.
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        path = f"/rollout/{quote(rollout_id, safe='')}/trajectory"
        reader = self.reader(f"GET {path[:_LONGEST_PATH]}", token)
        response = await self._send(
            "GET",
            path,
            headers={POLLING_LEASE_HEADER: token},
            timeout_sec=timeout_sec,
            largest=_LARGEST_RESULT,
        )

        def read() -> Trajectory:
            return read_trajectory(reader.parse(response))

        try:
            if len(response.content) <= LARGE_BODY:
                return read()
            return await run_off_loop(read, BODIES)
        except RolloutProtocolError as error:
            if error.status_code in _UNAVAILABLE:
                raise TrajectoryUnavailableError(
                    str(error), status_code=error.status_code
                ) from None
            raise

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
        return self.reader("POST /rollout/cancel").read(response, CancelRolloutsResponse)

    async def start(self, admissions: Iterable[RolloutInitResponse]) -> dict[str, int]:
        """Confirm that the agents of admitted rollouts may start.

        Returns:
            The status of each by id: 200, the agent may start; 403, the lease is not its; 404, it
            is unknown; 409, its agent does not wait for this, not yet or no longer.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer; the request may have arrived.
        """
        tokens = {each.rollout_id: each.polling_lease_token for each in admissions}
        claims = [{"rollout_id": name, "polling_lease_token": tokens[name]} for name in tokens]
        reader = self.reader(f"POST {_START_PATH}", *tokens.values())
        body = reader.parse(await self.post(_START_PATH, dump_json({"rollouts": claims})))
        outcomes = body.get("outcomes") if isinstance(body, dict) else None
        codes: dict[str, int] = {}
        for outcome in outcomes if isinstance(outcomes, list) else ():
            name = outcome.get("rollout_id") if isinstance(outcome, dict) else None
            code = outcome.get("status_code") if isinstance(outcome, dict) else None
            if isinstance(name, str) and type(code) is int:
                codes[name] = code
        if codes.keys() != tokens.keys():
            raise reader.error(200, "without an outcome for each rollout")
        return codes

    async def health(self) -> dict[str, Any]:
        """Read ``GET /health``.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer.
        """
        reader = self.reader("GET /health")
        value = reader.parse(await self._send("GET", "/health"))
        if not isinstance(value, dict):
            raise reader.error(200, "with no JSON object")
        return value

    async def policy(
        self,
        action: str | None = None,
        body: dict[str, Any] | None = None,
        *,
        timeout_sec: float | None = None,
    ) -> dict[str, Any]:
        """Read the state of the policy behind a server's gateway, or change it.

        Args:
            action: ``pause`` or ``resume``; ``None`` to read it.
            body: The fields of the request.
            timeout_sec: How long the answer may take.

        Raises:
            RolloutProtocolError: The answer is not what the protocol allows.
            httpx.TransportError: There was no answer; the request may have arrived.
        """
        method, path = ("GET", "/policy") if action is None else ("POST", f"/policy/{action}")
        content = None if action is None else dump_json(body or {})
        reader = self.reader(f"{method} {path}")
        value = reader.parse(
            await self._send(method, path, content=content, timeout_sec=timeout_sec)
        )
        if not isinstance(value, dict):
            raise reader.error(200, "with no JSON object")
        return value

    async def post(
        self, path: str, content: bytes, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Send a request; the answer is not checked yet."""
        return await self._send("POST", path, content=content, headers=headers)

    @asynccontextmanager
    async def stream(
        self, path: str, content: bytes | None, *, read_timeout_sec: float
    ) -> AsyncGenerator[StreamedAnswer, None]:
        """Send a request whose answer is read as it comes.

        Args:
            path: Where to.
            content: The body; ``None`` for a GET, which has none.
            read_timeout_sec: How long the answer may be silent.

        Raises:
            RolloutClientClosedError: The HTTP client was closed.
            httpx.TransportError: There was no answer, or it broke off.
        """
        method = "GET" if content is None else "POST"
        request = self._request(method, path, content, None, read_timeout_sec)
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

    def reader(self, route: str, *secrets: str | None) -> AnswerReader:
        """Return a reader of a route's answers whose errors repeat none of the secrets."""
        return AnswerReader(route, (self._api_key, *secrets_of(self._credentials), *secrets))


@lru_cache(maxsize=1024)
def _parsed(url: str) -> httpx.URL:
    """Parse a URL; a client asks for the same ones again and again."""
    return httpx.URL(url)
