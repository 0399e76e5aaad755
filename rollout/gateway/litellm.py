"""LiteLLM as an upstream of a gateway: any provider, in the form of OpenAI's chat completions.

Theory of operation: the gateway sends a call to an address of its own (`PLACE`), and its
connections hand what goes there to a transport that asks LiteLLM instead of the network. So
tokens, records, limits, retries and the flow of calls are those of every upstream. LiteLLM knows
asyncio, and runs behind a bridge: a call that is cancelled closes its connection to the provider,
which it would not in a thread, and a stream passes piece by piece.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import trio
from attrs import define, field, frozen

from rollout._checks import check_api_key
from rollout._http import library_of, stream_class
from rollout._redaction import redact, url_secrets
from rollout.codec import dump_json
from rollout.errors import InvalidFieldError, RolloutServerError
from rollout.gateway.wire import error_event, error_reply
from rollout.integrations.asyncio_bridge import AsyncioBridge, open_asyncio_bridge
from rollout.integrations.transport.connections import Connections
from rollout.integrations.transport.recording import Endpoint
from rollout.types._fields import url_host

__all__ = ["LiteLLMUpstream"]

_FIELDS = frozenset(
    {
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "modalities",
        "model",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    }
)
"""What an agent may ask for. All else would be taken for a setting of LiteLLM, such as the address
to which the key is sent."""

_WITHOUT_ITS_FILES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
"""While it is imported: it fetches no list of prices, and reads no ``.env`` into this process."""

_CONNECTION = "APIConnectionError"
_LONGEST_LABEL = 63


def _model(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not all(value.partition("/")[::2]) or not value.isprintable():
        raise InvalidFieldError(
            attribute.name, "must be PROVIDER/MODEL, as in anthropic/claude-sonnet-4-5"
        )


def _key(_: Any, __: Any, value: Any) -> None:
    check_api_key(value)


def _base(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or url_host(value) is None):
        raise InvalidFieldError(attribute.name, "must be an http:// or https:// URL, or None")


@frozen(repr=False)
class LiteLLMUpstream:
    """A model of any provider, asked through LiteLLM, as an upstream of a gateway.

    Chat completions pass, whole and as streams; other routes are answered with 404. Whatever model
    an agent names, this one answers. Needs the extra ``litellm``.

    Attributes:
        model: Provider and model as LiteLLM names them, ``anthropic/claude-sonnet-4-5``.
        api_key: The provider's key; ``None`` for what LiteLLM finds in the environment. It never
            leaves this process.
        api_base: The provider's URL, where it is not the usual one.

    Raises:
        InvalidFieldError: The model has no provider, the URL is not one, or the key cannot be sent.
    """

    model: str = field(validator=_model)
    api_key: str | None = field(default=None, validator=_key)
    api_base: str | None = field(default=None, validator=_base)

    def __repr__(self) -> str:
        return f"<LiteLLMUpstream {self.model}>"

    @property
    def url(self) -> str:
        """Where its secrets may be, besides the key."""
        return self.api_base or ""

    @property
    def secrets(self) -> list[str | None]:
        """What agents must not see of it."""
        return [self.api_key, *url_secrets(self.url)]

    @property
    def endpoint(self) -> Endpoint:
        """The address by which `Connections` knows it."""
        return Endpoint(f"http://{self._host}/v1", {}, None)

    @property
    def _host(self) -> str:
        shown = re.sub(r"[^a-z0-9]+", "-", self.model.lower())[:_LONGEST_LABEL].strip("-")
        return f"{shown}.{id(self):x}.litellm.invalid"

    @asynccontextmanager
    async def serving(self, connections: Connections) -> AsyncGenerator[None, None]:
        """Answer the requests that go to its endpoint within the block.

        Args:
            connections: What they are sent over.

        Raises:
            RolloutServerError: LiteLLM is not installed, or does not know the provider.
        """
        library = await trio.to_thread.run_sync(_load)
        try:
            library.get_llm_provider(model=self.model, api_base=self.api_base)
        except library.exceptions.BadRequestError:
            raise RolloutServerError(
                f"LiteLLM knows no provider of {self.model!r}; name it as PROVIDER/MODEL"
            ) from None
        async with open_asyncio_bridge(name="litellm") as bridge:
            connections.answer_for(self._host, _Transport(self, library, bridge))
            try:
                yield
            finally:
                with trio.CancelScope(shield=True):
                    await bridge.run(library.close_litellm_async_clients)
                    library.in_memory_llm_clients_cache.flush_cache()


def _load() -> Any:
    before = {name: os.environ.get(name) for name in _WITHOUT_ITS_FILES}
    os.environ.update(_WITHOUT_ITS_FILES)
    try:
        library: Any = importlib.import_module("litellm")
    except ModuleNotFoundError as error:
        if error.name != "litellm":
            raise
        raise RolloutServerError(
            'LiteLLM is not installed: pip install "trio-rollout[litellm]"'
        ) from None
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    library.suppress_debug_info = True  # it prints advice for each error
    return library


@define(eq=False, repr=False)
class _Transport(httpx.AsyncBaseTransport):
    """Answers requests with what LiteLLM says."""

    _upstream: LiteLLMUpstream
    _library: Any
    _bridge: AsyncioBridge

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        library = library_of(request)
        if request.method != "POST" or request.url.path != "/v1/chat/completions":
            await trio.lowlevel.checkpoint()
            return _refusal(library, 404, "only chat completions pass through LiteLLM")
        body = json.loads(request.content)
        unknown = sorted(body.keys() - _FIELDS)
        if unknown:
            await trio.lowlevel.checkpoint()
            said = f"does not pass through LiteLLM: {', '.join(map(repr, unknown))}"
            return _refusal(library, 400, said)
        ask = partial(
            self._library.acompletion,
            **body
            | {
                "model": self._upstream.model,
                "api_key": self._upstream.api_key,
                "api_base": self._upstream.api_base,
                "timeout": request.extensions["timeout"]["read"],
                "max_retries": 0,  # the gateway does it
            },
        )
        try:
            if body.get("stream"):
                return await self._streamed(ask, library)
            reply = await self._bridge.run(ask)
        except Exception as error:  # noqa: BLE001 - LiteLLM raises those of every provider
            return _failure(library, error)
        answer: httpx.Response = library.Response(
            200, headers={"content-type": "application/json"}, content=dump_json(_plain(reply))
        )
        return answer

    async def _streamed(self, ask: Any, library: Any) -> httpx.Response:
        async with AsyncExitStack() as stack:
            pieces = await stack.enter_async_context(self._bridge.iterate(ask))
            first = await anext(aiter(pieces), None)  # what is refused is refused before it
            events = stream_class(_Events, library.AsyncByteStream)
            stream = events(first, pieces, stack.pop_all(), self._upstream.secrets)
        answer: httpx.Response = library.Response(
            200, headers={"content-type": "text/event-stream"}, stream=stream
        )
        return answer


class _Events(httpx.AsyncByteStream):
    """A stream of LiteLLM as the events of OpenAI's API."""

    def __init__(
        self,
        first: Any,
        pieces: AsyncIterator[Any],
        stack: AsyncExitStack,
        secrets: list[str | None],
    ) -> None:
        self._secrets = secrets
        self._first = first
        self._pieces = pieces
        self._stack = stack

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            if self._first is not None:
                yield _event(self._first)
            async for piece in self._pieces:
                yield _event(piece)
        except Exception as error:  # noqa: BLE001 - LiteLLM raises those of every provider
            said = redact(_said(error), self._secrets)
            yield error_event(_status(error), said, anthropic=False)
        else:
            yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        """End the call; LiteLLM closes its connection."""
        await self._stack.aclose()


def _plain(answer: Any) -> dict[str, Any]:
    plain: dict[str, Any] = answer.model_dump(mode="json", exclude_none=True, warnings=False)
    for choice in plain.get("choices", ()):
        if "message" in choice:
            choice["message"].setdefault("content", None)  # as endpoints say of a tool's call
    return plain


def _event(piece: Any) -> bytes:
    return b"data: " + json.dumps(_plain(piece), separators=(",", ":")).encode() + b"\n\n"


def _status(error: Exception) -> int:
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or type(error).__name__ == _CONNECTION:
        return 502
    return status


def _said(error: Exception) -> str:
    return str(getattr(error, "message", None) or error) or type(error).__name__


def _failure(library: Any, error: Exception) -> httpx.Response:
    given = getattr(getattr(error, "response", None), "headers", None) or {}
    asked = {name: given[name] for name in ("retry-after",) if name in given}
    return _refusal(library, _status(error), _said(error), asked)


def _refusal(
    library: Any, status: int, message: str, headers: dict[str, str] | None = None
) -> httpx.Response:
    reply = error_reply(status, message, anthropic=False)
    answer: httpx.Response = library.Response(
        status, headers={"content-type": "application/json", **(headers or {})}, content=reply.body
    )
    return answer
