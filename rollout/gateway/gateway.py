"""`ModelGateway`: its settings, and the rollouts whose agents call their model through it.

Theory of operation: while a rollout executes it has a `Session`, found by the digest of the
rollout's token. The session knows the endpoint and the key that the request named; the rollout's
`RolloutContext` names the gateway and the token in their place. So nothing that runs for the
rollout has the key, and nothing that outlives it can use the token.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field

from rollout._checks import check_flag, check_number, check_whole, setting
from rollout._http import is_loopback_host
from rollout.context import RolloutContext, RolloutProgress
from rollout.errors import InvalidFieldError, RolloutServerError
from rollout.gateway.proxy import ModelCall, Session
from rollout.gateway.wire import PREFIX, ModelReply, error_reply, find_route
from rollout.integrations.transport.connections import Connections
from rollout.types._fields import url_host

__all__ = ["ModelGateway"]

_TOKEN_BYTES = 32
_MEBIBYTE = 1024 * 1024


def _base_url(_: Any, attribute: Any, value: Any) -> None:
    if value is None:
        return
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or url_host(str(value)) is None or parts.query or parts.fragment:
        raise InvalidFieldError(attribute.name, "must be an http:// or https:// URL, or None")


@define(eq=False, kw_only=True)
class ModelGateway:
    """A server's own model endpoint, which passes the calls of its rollouts on and records them.

    For `rollout.server.create_rollout_server`. One gateway belongs to one server.

    Args:
        advertise_url: The URL under which agents reach the server, for agents in containers or
            on other machines, say ``"http://172.17.0.1:8000"``. By default the address that
            `rollout.server.serve` is bound to.
        silence_sec: How long the endpoint may send nothing, in seconds.
        max_answer_bytes: How large an answer may be.
        stream_usage: Whether to ask for the usage of streams whose agent does not; ``False`` for
            endpoints that cannot say it (``stream_options``).

    Raises:
        InvalidFieldError: A setting is refused; the message names it.
    """

    advertise_url: str | None = field(default=None, validator=_base_url)
    silence_sec: float = field(default=600.0, validator=setting(check_number, above=0))
    max_answer_bytes: int = field(default=64 * _MEBIBYTE, validator=setting(check_whole))
    stream_usage: bool = field(default=True, validator=setting(check_flag))
    _address: str | None = field(default=None, init=False)
    _sessions: dict[bytes, Session] = field(factory=dict, init=False, repr=False)
    _connections: Connections = field(factory=lambda: Connections(kept=True), init=False)

    @property
    def base_url(self) -> str:
        """What agents get as the base URL of their model.

        Raises:
            RolloutServerError: It is not known.
        """
        address = self.advertise_url or self._address
        if address is None:
            raise RolloutServerError(
                "the model gateway needs an advertise_url, the URL under which agents reach "
                "this server: it is known by itself only where rollout.server.serve listens "
                "on TCP without TLS"
            )
        return f"{address.rstrip('/')}{PREFIX}/v1"

    def bound(self, url: str) -> None:
        """Note the URL that the server listens on; agents get it unless another is advertised."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.port is None:
            return  # a unix socket, or TLS, whose certificate is for a name
        host = parts.hostname or ""
        if is_loopback_host(host):  # the address of all interfaces counts
            host = "[::1]" if ":" in host else "127.0.0.1"
            url = f"http://{host}:{parts.port}"
        self._address = url

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Keep connections to endpoints within the block.

        Raises:
            RolloutServerError: No agent could reach the gateway.
        """
        _ = self.base_url
        self._connections = Connections(kept=True)
        try:
            yield
        finally:
            await self._connections.aclose()

    @contextmanager
    def session(
        self,
        *,
        rollout_id: str,
        chat_completions_url: str,
        api_key: str | None,
        progress: RolloutProgress,
    ) -> Generator[Session, None, None]:
        """Give a rollout its token for the length of the block; at its end calls are cancelled."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        session = Session(
            chat_completions_url=chat_completions_url,
            api_key=api_key,
            context=RolloutContext(
                chat_completions_url=self.base_url,
                api_key=token,
                rollout_id=rollout_id,
                progress=progress,
            ),
            connections=self._connections,
            silence_sec=self.silence_sec,
            max_answer_bytes=self.max_answer_bytes,
            stream_usage=self.stream_usage,
        )
        digest = _digest(token.encode())
        self._sessions[digest] = session
        try:
            yield session
        finally:
            del self._sessions[digest]
            session.close()

    def recognizes(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the headers of a request carry the token of a rollout that runs."""
        return self._session_of(headers) is not None

    def begin(
        self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]]
    ) -> ModelCall | ModelReply:
        """Authorise a request; return the call that it is, or why it is refused.

        Args:
            method: The HTTP method.
            path: The decoded path, which begins with `rollout.gateway.wire.PREFIX`.
            query: The query string.
            headers: The headers, names in lower case.
        """
        session = self._session_of(headers)
        if session is None:
            return error_reply(
                401,
                "the token is not that of a rollout that runs here; it ends with its rollout",
                code="invalid_api_key",
            )
        route = find_route(method, path.removeprefix(PREFIX))
        if route is None:
            return error_reply(404, f"the model gateway has no {method} {path}")
        return ModelCall(session, route, method=method, query=query, headers=headers)

    def _session_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Session | None:
        found: Mapping[bytes, bytes] = dict(headers)
        given = found.get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer":
            token = b""
        # A lookup by digest says nothing about a token by its time.
        return self._sessions.get(_digest(token.strip())) if token else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
