"""A rollout server with a gateway, an endpoint, and an agent that is a function."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from attrs import define
from integrations.scripted import Endpoint, scripted_endpoint
from support import Compare, fresh_id, local_backend, make_app, served

from rollout import AgentWorkflow, RolloutContext, get_rollout_context
from rollout.client import RolloutClient
from rollout.gateway import ModelGateway

KEY = "sk-the-key-of-the-endpoint"
QUESTION = {"role": "user", "content": "What is 6 + 7?"}

Agent = Callable[[RolloutContext], Awaitable[Any] | Any]


@define
class Rig:
    """What a test works with."""

    client: RolloutClient
    endpoint: Endpoint
    url: str

    async def run(self, **options: Any) -> Any:
        """Run one rollout to its end."""
        options = {"chat_completions_url": self.endpoint.url, "llm_api_key": KEY, **options}
        options.setdefault("grade", "label" in options)
        with trio.fail_after(60):
            return await self.client.run_rollout(
                initial_messages=[QUESTION], rollout_id=fresh_id("gateway"), **options
            )


@asynccontextmanager
async def rig(
    agent: Agent, *steps: Any, gateway: ModelGateway | None = None, **options: Any
) -> AsyncGenerator[Rig, None]:
    """Serve rollouts of an agent: an async function, or a plain one that runs in a thread."""
    backend = local_backend(workflow_of(agent), Compare)
    app = make_app(backend, gateway=gateway or ModelGateway(), **options)
    async with (
        scripted_endpoint(*steps) as endpoint,
        served(app) as url,
        RolloutClient(url=url, api_key=options.get("api_key")) as client,
    ):
        yield Rig(client, endpoint, url)


def workflow_of(agent: Agent) -> type[AgentWorkflow[Any]]:
    """A workflow that hands an agent the context of its rollout, and nothing else."""
    import inspect

    if inspect.iscoroutinefunction(agent):

        class Asynchronous(AgentWorkflow[Any]):
            async def run(self, ctx: Any) -> Any:
                context = get_rollout_context()
                assert context is not None
                return await agent(context)

        return Asynchronous

    class Threaded(AgentWorkflow[Any]):
        def run(self, ctx: Any) -> Any:
            context = get_rollout_context()
            assert context is not None
            return agent(context)

    return Threaded


@asynccontextmanager
async def calling(context: RolloutContext) -> AsyncGenerator[httpx.AsyncClient, None]:
    """An HTTP client of an agent that nobody wrote for this library."""
    headers = {"Authorization": f"Bearer {context.api_key}"}
    url = context.chat_completions_url.removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=url, headers=headers, trust_env=False, timeout=30
    ) as http:
        yield http


async def post(context: RolloutContext, path: str = "/v1/chat/completions", **body: Any) -> Any:
    """Send one request; chat by default."""
    body = {"model": "gpt-4o", "messages": [QUESTION], **body}
    async with calling(context) as http:
        return await http.post(path, json=body)
