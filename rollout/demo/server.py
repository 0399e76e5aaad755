"""The rollout server of the demo: a workflow that asks a chat endpoint, and its grader."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import httpx

from rollout.backend import LocalBackend
from rollout.context import AgentWorkflowContext, GraderContext, get_rollout_context
from rollout.demo.arithmetic import MODEL_NAME, last_number
from rollout.errors import RolloutServerError
from rollout.grader import Grader
from rollout.server import RolloutServer, create_rollout_server
from rollout.types import AgentWorkflowConfig, AgentWorkflowOutput, ConcurrencyConfig
from rollout.workflow import AgentWorkflow

__all__ = ["AnswerGrader", "AskModel", "create_demo_server"]

_CHAT_TIMEOUT_SEC = 60.0
_http: ContextVar[httpx.AsyncClient] = ContextVar("demo_http_client")


class AskModel(AgentWorkflow[AgentWorkflowConfig]):
    """Sends the prompt to the rollout's chat endpoint and returns the conversation."""

    async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> AgentWorkflowOutput:
        """Ask once.

        Raises:
            httpx.HTTPError: The endpoint could not be reached, or refused.
        """
        rollout = get_rollout_context()
        if rollout is None:
            raise RolloutServerError("the demo's workflow runs inside of a rollout only")
        response = await _http.get().post(
            f"{rollout.chat_completions_url}/chat/completions",
            headers={"Authorization": f"Bearer {rollout.api_key}"},
            json={"model": MODEL_NAME, "messages": ctx.prompt},
        )
        response.raise_for_status()
        body = response.json()
        return AgentWorkflowOutput(
            messages=[*ctx.prompt, body["choices"][0]["message"]],
            metrics={"completion_tokens": body["usage"]["completion_tokens"]},
        )


class AnswerGrader(Grader):
    """Rewards a conversation whose last number is the label with 1, any other with 0."""

    async def grade(self, ctx: GraderContext) -> None:
        """Compare, and set the reward."""
        messages: Any = ctx.sample.messages if ctx.sample is not None else []
        answer = last_number(messages[-1]["content"]) if messages else None
        ctx.set_reward(1.0 if answer == ctx.label else 0.0)


@asynccontextmanager
async def _shared_http_client(_: RolloutServer) -> AsyncGenerator[None, None]:
    """Open one HTTP client for the server's life; rollouts find it in a context variable."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=4.0)
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(_CHAT_TIMEOUT_SEC, pool=None), limits=limits, trust_env=False
    ) as http:
        _http.set(http)
        yield


def create_demo_server(*, max_concurrent: int, api_key: str) -> RolloutServer:
    """Build the demo's rollout server.

    Args:
        max_concurrent: How many rollouts it runs at a time.
        api_key: The key that its callers must present.
    """
    config = AgentWorkflowConfig(
        name="ask-model", concurrency=ConcurrencyConfig(max_concurrent=max_concurrent)
    )
    backend = LocalBackend(
        workflow=AskModel, workflow_config=config, grader=AnswerGrader, artifact_root=False
    )
    return create_rollout_server(
        backend=backend,
        lifespan=_shared_http_client,
        configure_logging=False,
        api_key=api_key,
        watchdog_sec=None,  # nothing here blocks, and a busy machine is no news
    )
