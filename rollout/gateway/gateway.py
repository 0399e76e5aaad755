"""`ModelGateway`: its settings, and the rollouts whose agents call their model through it.

Theory of operation: while a rollout executes it has a `Session`, found by the digest of the
rollout's token. The session knows the endpoint and the key that the request named; the rollout's
`RolloutContext` names the gateway and the token in their place. So nothing that runs for the
rollout has the key, and nothing that outlives it can use the token.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from attrs import define, field, frozen

from rollout._checks import check_api_key, check_flag, check_number, check_whole, setting
from rollout._http import is_loopback_host
from rollout._redaction import url_secrets
from rollout.context import RolloutContext, RolloutProgress
from rollout.errors import InvalidFieldError, RolloutServerError
from rollout.gateway.counts import ModelCounts
from rollout.gateway.flow import Bounds, Flow
from rollout.gateway.limits import Price, tighter
from rollout.gateway.litellm import LiteLLMUpstream
from rollout.gateway.places import flow_state
from rollout.gateway.policy import Policy
from rollout.gateway.proxy import CallSettings, ModelCall, Session
from rollout.gateway.wire import PREFIX, ModelReply, error_reply, expects_anthropic, find_route
from rollout.integrations.transport.connections import Connections
from rollout.integrations.transport.recording import Endpoint
from rollout.types._fields import url_host
from rollout.types.limits import Limits

__all__ = ["ModelGateway", "Upstream"]

_TOKEN_BYTES = 32
_MEBIBYTE = 1024 * 1024


def _base_url(_: Any, attribute: Any, value: Any) -> None:
    if value is None:
        return
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or url_host(str(value)) is None or parts.query or parts.fragment:
        raise InvalidFieldError(attribute.name, "must be an http:// or https:// URL, or None")


def _is_mapping(value: Any, kind: type) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(each, kind) for name, each in value.items()
    )


def _names(_: Any, attribute: Any, value: Any) -> None:
    if not _is_mapping(value, str):
        raise InvalidFieldError(attribute.name, "must be a mapping from names to names")


def _prices(_: Any, attribute: Any, value: Any) -> None:
    if not _is_mapping(value, Price):
        raise InvalidFieldError(attribute.name, "must be a mapping from names to Price")


def _capture(_: Any, attribute: Any, value: Any) -> None:
    if value not in (None, "tokens"):
        raise InvalidFieldError(attribute.name, "must be 'tokens' or None")


def _is_limits(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, Limits):
        raise InvalidFieldError(attribute.name, "must be Limits")


def _endpoint_url(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or url_host(value) is None:
        raise InvalidFieldError(attribute.name, "must be an http:// or https:// URL")


def _key(_: Any, __: Any, value: Any) -> None:
    check_api_key(value)


@frozen(repr=False)
class Upstream:
    """An endpoint of a gateway's own.

    Attributes:
        url: Its ``chat_completions_url``, the base or the route itself.
        api_key: The key for it, ``None`` if it needs none. It never leaves the server.

    Raises:
        InvalidFieldError: The URL is not one, or the key cannot be sent.
    """

    url: str = field(validator=_endpoint_url)
    api_key: str | None = field(default=None, validator=_key)

    def __repr__(self) -> str:
        return f"<Upstream {self.endpoint.shown}>"

    @property
    def endpoint(self) -> Endpoint:
        """How to reach it."""
        return Endpoint.of(self.url, self.api_key)


_KINDS = (Upstream, LiteLLMUpstream)


def _upstreams(
    given: Iterable[Upstream | LiteLLMUpstream | str] | None,
) -> tuple[Upstream | LiteLLMUpstream, ...] | None:
    """Convert the upstreams of a gateway, which may be plain URLs."""
    if given is None:
        return None
    if isinstance(given, (str, *_KINDS)) or not isinstance(given, Iterable):
        raise InvalidFieldError("upstreams", "must be a list of URLs and Upstream, or None")
    upstreams: list[Upstream | LiteLLMUpstream] = []
    for index, each in enumerate(given):
        if not isinstance(each, (str, *_KINDS)):
            raise InvalidFieldError("upstreams", f"item {index} must be a URL or an Upstream")
        try:
            upstreams.append(each if isinstance(each, _KINDS) else Upstream(each))
        except InvalidFieldError as error:
            raise InvalidFieldError("upstreams", f"item {index} {error.reason}") from None
    if not upstreams:
        raise InvalidFieldError(
            "upstreams", "must have an item; leave it out for the endpoints that requests name"
        )
    return tuple(upstreams)


@define(eq=False, kw_only=True)
class ModelGateway:
    """A server's own model endpoint, which passes the calls of its rollouts on and records them.

    For `rollout.server.create_rollout_server`. One gateway belongs to one server.

    Args:
        advertise_url: The URL under which agents reach the server, for agents in containers or
            on other machines, say ``"http://172.17.0.1:8000"``. By default the address that
            `rollout.server.serve` is bound to, or one of the loopback for a Unix socket and TLS.
        models: The names that the endpoint gets for those that agents send; ``"*"`` stands for
            all others: ``{"*": "policy"}``.
        limits: The most that any rollout may use; requests may ask for less.
        prices: What models cost, by the name that the endpoint gets, or ``"*"``. Needed for
            limits of the cost.
        capture: ``"tokens"`` to ask the endpoint for token ids and log-probabilities, which are
            kept in the trajectory and do not reach an agent that has not asked for them.
        silence_sec: How long the endpoint may send nothing, in seconds.
        pause_wait_sec: How long a call waits while the policy is paused, in seconds.
        max_answer_bytes: How large an answer may be.
        stream_usage: Whether to ask for the usage of streams whose agent does not; ``False`` for
            endpoints that cannot say it (``stream_options``).
        upstreams: The policy's endpoints, as URLs, `Upstream` or `LiteLLMUpstream`, in place of
            those that requests name. A rollout stays with one and moves when that fails; new ones
            go to that with least to do.
        max_calls_in_flight: The most calls that are in flight to each endpoint; the others wait.
            ``None`` for no bound.
        min_calls_in_flight: The least to which their number falls when an endpoint is overloaded.
        retries: How often a call is sent again whose endpoint refuses it for overload, fails or
            cannot be reached, before a byte of its answer has reached the agent.
        retry_sec: How long after the first failure the last retry may start, in seconds.

    Attributes:
        policy: Pauses and resumes calls, and knows the version of the weights.
        bounds: The bounds of the calls in flight to each endpoint, which may change at any time.
        counts: How many calls there were, and what they used.

    Raises:
        InvalidFieldError: A setting is refused; the message names it.
    """

    advertise_url: str | None = field(default=None, validator=_base_url)
    models: Mapping[str, str] = field(factory=dict, validator=_names)
    limits: Limits = field(factory=Limits, validator=_is_limits)
    prices: Mapping[str, Price] = field(factory=dict, validator=_prices)
    capture: str | None = field(default=None, validator=_capture)
    silence_sec: float = field(default=600.0, validator=setting(check_number, above=0))
    pause_wait_sec: float = field(default=600.0, validator=setting(check_number, least=0))
    max_answer_bytes: int = field(default=64 * _MEBIBYTE, validator=setting(check_whole))
    stream_usage: bool = field(default=True, validator=setting(check_flag))
    upstreams: tuple[Upstream | LiteLLMUpstream, ...] | None = field(
        default=None, converter=_upstreams
    )
    max_calls_in_flight: int | None = field(default=None, validator=setting(check_whole, none=True))
    min_calls_in_flight: int = field(default=1, validator=setting(check_whole))
    retries: int = field(default=2, validator=setting(check_whole, least=0))
    retry_sec: float = field(default=30.0, validator=setting(check_number, least=0))
    policy: Policy = field(factory=Policy, init=False, repr=False)
    bounds: Bounds = field(init=False, repr=False)
    counts: ModelCounts = field(factory=ModelCounts, init=False, repr=False)
    _own_flow: Flow[Endpoint] | None = field(default=None, init=False, repr=False)
    _flows: MutableMapping[Any, Flow[Endpoint]] = field(
        factory=WeakValueDictionary, init=False, repr=False
    )
    _address: str | None = field(default=None, init=False)
    _sessions: dict[bytes, Session] = field(factory=dict, init=False, repr=False)
    _connections: Connections = field(factory=lambda: Connections(kept=True), init=False)

    def __attrs_post_init__(self) -> None:
        if self.limits.cost_usd is not None and not self.prices:
            raise InvalidFieldError("prices", "are needed for a limit of the cost")
        most = self.max_calls_in_flight
        if most is not None and self.min_calls_in_flight > most:
            raise InvalidFieldError("min_calls_in_flight", "must not exceed max_calls_in_flight")
        self.bounds = Bounds(minimum=self.min_calls_in_flight, maximum=most)
        if self.upstreams is not None:
            self._own_flow = Flow((each.endpoint for each in self.upstreams), self.bounds)

    @property
    def base_url(self) -> str:
        """What agents get as the base URL of their model.

        Raises:
            RolloutServerError: It is not known.
        """
        address = self.advertise_url or self._address
        if address is None:
            raise RolloutServerError(
                "the model gateway needs an advertise_url, the URL under which agents reach this "
                "server, where rollout.server.serve does not run it"
            )
        return f"{address.rstrip('/')}{PREFIX}/v1"

    def share(self, servers: int) -> None:
        """Leave an equal part of the calls in flight to each of some servers, one at least."""
        if self.bounds.maximum is not None:
            self.bounds.maximum = max(self.bounds.maximum // servers, 1)

    def bound(self, url: str) -> bool:
        """Note the URL that the server listens on; return whether agents can be given one.

        They cannot if it is that of a Unix socket, or one with TLS, whose certificate is for a
        name, and no other is advertised.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.port is None:
            return self.advertise_url is not None
        host = parts.hostname or ""
        if is_loopback_host(host):  # the address of all interfaces counts
            host = "[::1]" if ":" in host else "127.0.0.1"
            url = f"http://{host}:{parts.port}"
        self._address = url
        return True

    @property
    def local_url(self) -> str:
        """The base URL for callers on the machine of a server that `bound` has an address of.

        It differs from `base_url` where another address is advertised.
        """
        return f"{self._address}{PREFIX}/v1"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Keep connections to endpoints within the block.

        Raises:
            RolloutServerError: No agent could reach the gateway, or LiteLLM cannot be used.
        """
        _ = self.base_url
        self._connections = Connections(kept=True)
        try:
            async with AsyncExitStack() as stack:
                for each in self.upstreams or ():
                    if isinstance(each, LiteLLMUpstream):
                        await stack.enter_async_context(each.serving(self._connections))
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
        progress: RolloutProgress | None,
        limits: Mapping[str, Any] | None,
        limited: Callable[[], bool],
    ) -> Generator[Session, None, None]:
        """Give a rollout its token for the length of the block; at its end calls are cancelled.

        Args:
            rollout_id: The rollout.
            chat_completions_url: Its endpoint, which counts if the gateway has no upstreams.
            api_key: The key for that.
            progress: Where its context reports to, if anywhere.
            limits: The limits that its request names.
            limited: Says whether limits count at the moment.
        """
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        endpoint = Endpoint.of(chat_completions_url, api_key)
        own = [(api_key, chat_completions_url)]
        own += [(each.api_key, each.url) for each in self.upstreams or ()]
        session = Session(
            endpoint=endpoint,
            secrets=tuple(each for key, url in own for each in (key, *url_secrets(url))),
            flow=self._flow_of(endpoint),
            context=RolloutContext(
                chat_completions_url=self.base_url,
                api_key=token,
                rollout_id=rollout_id,
                progress=progress,
            ),
            connections=self._connections,
            policy=self.policy,
            settings=CallSettings(
                models=self.models,
                prices=self.prices,
                capture=self.capture,
                silence_sec=self.silence_sec,
                pause_wait_sec=self.pause_wait_sec,
                max_answer_bytes=self.max_answer_bytes,
                stream_usage=self.stream_usage,
                retries=self.retries,
                retry_sec=self.retry_sec,
            ),
            limits=tighter(self.limits, Limits.of(limits)),
            limited=limited,
            counts=self.counts,
        )
        digest = _digest(token.encode())
        self._sessions[digest] = session
        try:
            yield session
        finally:
            del self._sessions[digest]
            session.close()

    def state(self) -> dict[str, Any]:
        """Return what there is to see of it while it runs, as JSON."""
        return {
            "rollouts": len(self._sessions),
            "policy": self.policy.state(),
            **self.counts.state(),
            "flow": self.health(),
        }

    def health(self) -> dict[str, Any]:
        """Return the flow of calls as JSON, without secrets."""
        flows = [self._own_flow] if self._own_flow is not None else [*self._flows.values()]
        return {
            "calls": self.counts.begun,
            "calls_waiting": sum(each.waiting for each in flows),
            "retries": self.counts.retries,
            "wait_sec": self.counts.wait_sec,
            "upstreams": [upstream for each in flows for upstream in flow_state(each)],
        }

    def _flow_of(self, endpoint: Endpoint) -> Flow[Endpoint] | None:
        """Return where and when a rollout's calls go; ``None`` if nothing bounds them."""
        if self._own_flow is not None or self.bounds.maximum is None:
            return self._own_flow
        key = endpoint.base_url, *endpoint.query.items(), endpoint.api_key
        found = self._flows.get(key)
        if found is None:
            found = self._flows[key] = Flow([endpoint], self.bounds)
        return found

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
        rest = path.removeprefix(PREFIX)
        anthropic = expects_anthropic(rest, dict(headers))
        if session is None:
            message = "the token is not that of a rollout that runs here; it ends with its rollout"
            return error_reply(401, message, anthropic=anthropic, code="invalid_api_key")
        route = find_route(method, rest)
        if route is None:
            message = f"the model gateway has no {method} {path}"
            return error_reply(404, message, anthropic=anthropic)
        return ModelCall(session, route, method=method, query=query, headers=headers)

    def _session_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Session | None:
        found: Mapping[bytes, bytes] = dict(headers)
        given = found.get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer":
            token = found.get(b"x-api-key", b"")
        # A lookup by digest says nothing about a token by its time.
        return self._sessions.get(_digest(token.strip())) if token else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
