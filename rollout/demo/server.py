"""The rollout server of the demo: a workflow that asks a chat endpoint, and its grader."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import httpx

from rollout._http import tls_context
from rollout.backend import LocalBackend
from rollout.context import AgentWorkflowContext, GraderContext, get_rollout_context
from rollout.demo.arithmetic import MODEL_NAME, last_number
from rollout.demo.tool_call import PREAMBLE, RESPONSE_FORMAT, answer_of, as_tool_call
from rollout.errors import IntegrationError, RolloutServerError
from rollout.grader import Grader
from rollout.server import RolloutServer, create_rollout_server
from rollout.types import AgentWorkflowConfig, AgentWorkflowOutput, ConcurrencyConfig
from rollout.workflow import AgentWorkflow

__all__ = ["AnswerGrader", "AskConfig", "AskModel", "CallGrader", "create_demo_server"]

_CHAT_TIMEOUT_SEC = 600.0
"""For an answer, the wait for the requests before it included: a busy machine is slow."""

_http: ContextVar[httpx.AsyncClient] = ContextVar("demo_http_client")


class AskConfig(AgentWorkflowConfig):
    """What can be set about the workflow.

    Attributes:
        model: The model to ask for.
        by_tool: Whether the answer is a tool call; see `rollout.demo.tool_call`.
        options: Further fields of each request.
    """

    model: str = MODEL_NAME
    by_tool: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 - attrs makes each instance its own


class AskModel(AgentWorkflow[AskConfig]):
    """Sends the prompt to the rollout's chat endpoint and returns the conversation.

    A ``seed`` in the rollout's metadata goes along, so that samples of one prompt differ and
    each can be drawn again.
    """

    async def run(self, ctx: AgentWorkflowContext[AskConfig]) -> AgentWorkflowOutput:
        """Ask once.

        Raises:
            httpx.HTTPError: The endpoint could not be reached.
            IntegrationError: The endpoint answered with an error.
        """
        rollout = get_rollout_context()
        if rollout is None:
            raise RolloutServerError("the demo's workflow runs inside of a rollout only")
        config = ctx.config or AskConfig(name="ask-model")
        messages = [*PREAMBLE, *ctx.prompt] if config.by_tool else ctx.prompt
        request = {"model": config.model, "messages": messages, **config.options}
        if config.by_tool:
            request["response_format"] = RESPONSE_FORMAT
        if ctx.metadata and "seed" in ctx.metadata:
            request["seed"] = ctx.metadata["seed"]
        response = await _http.get().post(
            f"{rollout.chat_completions_url}/chat/completions",
            headers={"Authorization": f"Bearer {rollout.api_key}"},
            json=request,
        )
        if response.is_error:
            raise IntegrationError(
                f"the model answered {response.status_code}: {response.text}",
                status_code=response.status_code,
            )
        body = response.json()
        reply = body["choices"][0]["message"]
        if config.by_tool:
            reply = as_tool_call(reply["content"] or "")
        return AgentWorkflowOutput(
            messages=[*messages, reply],
            metrics={"completion_tokens": body["usage"]["completion_tokens"]},
        )


class AnswerGrader(Grader):
    """Rewards a conversation whose last number is the label with 1, any other with 0."""

    async def grade(self, ctx: GraderContext) -> None:
        """Compare, and set the reward."""
        messages: Any = ctx.sample.messages if ctx.sample is not None else []
        answer = self.answer(messages[-1]) if messages else None
        ctx.set_reward(1.0 if answer == ctx.label else 0.0)

    def answer(self, message: dict[str, Any]) -> str | None:
        """Return the answer that *message* gives, ``None`` if it gives none."""
        return last_number(message["content"])


class CallGrader(AnswerGrader):
    """Rewards a conversation that ends in a tool call with the label with 1, any other with 0."""

    def answer(self, message: dict[str, Any]) -> str | None:
        """Return the number of the call; text does not count, whatever it says."""
        return answer_of(message)


@asynccontextmanager
async def _shared_http_client(_: RolloutServer) -> AsyncGenerator[None, None]:
    """Open one HTTP client for the server's life; rollouts find it in a context variable."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=4.0)
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(_CHAT_TIMEOUT_SEC, pool=None),
        limits=limits,
        verify=tls_context("http:"),  # the demo's endpoint speaks nothing else
        trust_env=False,
    ) as http:
        _http.set(http)
        yield


def create_demo_server(
    *,
    max_concurrent: int,
    api_key: str,
    model: str = MODEL_NAME,
    by_tool: bool = False,
    options: dict[str, Any] | None = None,
) -> RolloutServer:
    """Build the demo's rollout server.

    Args:
        max_concurrent: How many rollouts it runs at a time.
        api_key: The key that its callers must present.
        model: The model that its workflow asks for.
        by_tool: Whether the model answers by a tool call.
        options: Further fields of each request to the model.
    """
    config = AskConfig(
        name="ask-model",
        concurrency=ConcurrencyConfig(max_concurrent=max_concurrent),
        model=model,
        by_tool=by_tool,
        options=options or {},
    )
    backend = LocalBackend(
        workflow=AskModel,
        workflow_config=config,
        grader=CallGrader if by_tool else AnswerGrader,
        artifact_root=False,
    )
    return create_rollout_server(
        backend=backend,
        lifespan=_shared_http_client,
        configure_logging=False,
        api_key=api_key,
        watchdog_sec=None,  # nothing here blocks, and a busy machine is no news
    )
