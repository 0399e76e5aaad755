"""The model of a run: an endpoint, or any provider behind a gateway of the run's own process.

Theory of operation: with a gateway each attempt gets a token of its own, which ends with it. The
provider's key stays in this process, and what the attempt used is counted where it passes, also
for a server and an agent that say nothing about it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from rollout._redaction import public_url
from rollout.context import RolloutContext
from rollout.errors import EvaluationError, InvalidFieldError, RolloutServerError
from rollout.evaluation.config import ChatConfig
from rollout.types import MODEL_ENDPOINT, MODEL_KEY, RolloutStatus

if TYPE_CHECKING:
    from rollout.gateway import ModelGateway
    from rollout.integrations.recording.recorder import ConversationRecorder

__all__ = ["Access", "Model", "open_model"]

_TOKENS = ("prompt_tokens", "completion_tokens")


@frozen(repr=False)
class Access:
    """How one rollout reaches the model.

    Attributes:
        url: The endpoint that its agent is given.
        key: The key for that.
        here: The same for calls of this process.
        recorder: What a gateway has seen of its calls.
    """

    url: str
    key: str | None
    here: RolloutContext
    recorder: ConversationRecorder | None = None

    def complete(self, facts: dict[str, Any]) -> None:
        """Add to the facts of an end what the gateway knows better."""
        recorder = self.recorder
        if recorder is None or recorder.empty:
            return
        seen = recorder.metrics()
        facts["metrics"] |= {name: seen[name] for name in _TOKENS if name in seen}
        failed = facts["outcome"] == RolloutStatus.FAILURE.value and recorder.endpoint_failed
        if failed and facts["err_source"] is None:
            facts["err_source"] = MODEL_KEY if recorder.key_refused else MODEL_ENDPOINT


@define
class Model:
    """The model of a run.

    Attributes:
        place: Where it is asked, for messages.
    """

    _url: str = field(repr=False)
    _key: str | None = field(repr=False)
    _gateway: ModelGateway | None = None
    _name: str | None = None

    @property
    def place(self) -> str:
        """Which model it is, for messages."""
        return f"at {public_url(self._url)}" if self._gateway is None else f"{self._name}"

    @contextmanager
    def for_rollout(self, rollout_id: str) -> Generator[Access, None, None]:
        """Give a rollout access within the block."""
        if self._gateway is None:
            here = RolloutContext(chat_completions_url=self._url, api_key=self._key)
            yield Access(self._url, self._key, here)
            return
        with self._gateway.session(
            rollout_id=rollout_id,
            chat_completions_url="",
            api_key=None,
            progress=None,
            limits=None,
            limited=lambda: False,
        ) as session:
            given = session.context
            here = RolloutContext(
                chat_completions_url=self._gateway.local_url, api_key=given.api_key
            )
            yield Access(given.chat_completions_url, given.api_key, here, session.own_recorder)


@asynccontextmanager
async def open_model(chat: ChatConfig, key: str | None) -> AsyncGenerator[Model, None]:
    """Make the model available within the block.

    Args:
        chat: Which one it is.
        key: The endpoint's or the provider's key.

    Raises:
        EvaluationError: LiteLLM is not installed, does not know the provider, or the address for
            agents cannot be used.
    """
    if chat.url is not None:
        yield Model(chat.url, key)
        return
    # A web server takes a while to load.
    from rollout.gateway import LiteLLMUpstream, ModelGateway  # noqa: PLC0415
    from rollout.server.runner import serve_gateway  # noqa: PLC0415

    async with AsyncExitStack() as stack:
        try:
            upstream = LiteLLMUpstream(chat.model or "", key, chat.api_base)
            gateway = ModelGateway(upstreams=[upstream], advertise_url=chat.advertise_url)
            await stack.enter_async_context(serve_gateway(gateway, bind=chat.bind))
        except (InvalidFieldError, RolloutServerError) as error:
            raise EvaluationError(f"chat: {error}") from error
        yield Model("", None, gateway, chat.model)
