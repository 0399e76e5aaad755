"""The OpenAI SDK for asyncio code behind a bridge: for frameworks that have no module here.

Many take a client of the OpenAI SDK, or are code around one. `rollout_client` makes one that is
bound to the rollout that runs here and that records what is said over it::

    async def on_asyncio(prompt):
        await some_framework(client=rollout_client(), messages=prompt)

    class Solve(AgentWorkflow):
        async def run(self, ctx):
            await get_bridge().run(on_asyncio, ctx.prompt)
            # The recorded conversation is the sample.

On trio, where the SDK runs as well, use `rollout.integrations.openai`.
"""

from __future__ import annotations

from typing import Any

from rollout.integrations.frameworks.adapters import trio_tool
from rollout.integrations.frameworks.source import FrameworkSource
from rollout.integrations.recording.recorder import MAIN, current_rollout, recorder_of
from rollout.integrations.transport.openai_client import load_sdk, make_client
from rollout.integrations.transport.recording import AsyncioTransport, Endpoint

__all__ = ["rollout_client", "trio_tool"]


def rollout_client(
    *,
    record: bool = True,
    timeout_sec: float | None = 600.0,
    max_retries: int = 2,
    **options: Any,
) -> Any:
    """Return an ``openai.AsyncOpenAI``, for asyncio, that is bound to the rollout that runs here.

    Make one wherever it is needed, on either side of the bridge: it costs about a millisecond,
    since the connections belong to the bridge and are closed with it. Use it in the bridge's loop
    alone. Nothing has to be closed.

    Args:
        record: Whether its chat completions are recorded. The recorded conversation is the
            sample, unless an adapter of a framework delivers a history of its own.
        timeout_sec: How long to wait for each part of an answer, in seconds; ``None`` for as
            long as it takes.
        max_retries: How often the SDK tries again after 408, 409, 429, 5xx and lost
            connections.
        options: Further arguments of ``openai.AsyncOpenAI``.

    Raises:
        IntegrationError: No rollout is running here, or the SDK is not installed.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    context = current_rollout()
    load_sdk()
    source = recorder_of(context, FrameworkSource) if record else None
    endpoint = Endpoint.of_rollout(context)
    transport = AsyncioTransport(endpoint, source, conversation=MAIN)
    return make_client(
        endpoint, transport, timeout_sec=timeout_sec, max_retries=max_retries, **options
    )
