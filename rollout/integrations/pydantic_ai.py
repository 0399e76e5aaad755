"""PydanticAI inside of a rollout, over the bridge; needs the extra ``pydantic-ai``.

The model of a run is the policy of the rollout that runs here, and what the agent says becomes the
rollout's sample::

    class Solve(AgentWorkflow):
        async def run(self, ctx):
            agent = Agent(rollout_model("policy"), tools=[add])
            await run_agent(agent, ctx.prompt)

An agent that all rollouts share takes the model with each run: ``model=rollout_model("policy")``.
The server has to open a bridge in its lifespan; see the page about frameworks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from rollout.integrations._framework_run import AgentStream, Framework, rollout_openai, trio_tool
from rollout.integrations._framework_source import FrameworkSource, source_of, the_rollout
from rollout.integrations._pydantic_messages import as_chat, as_history
from rollout.integrations.asyncio_bridge import get_bridge

__all__ = ["AgentStream", "rollout_model", "run_agent", "stream_agent", "trio_tool"]

_FRAMEWORK = Framework(
    module="pydantic_ai",
    distribution="pydantic-ai-slim",
    extra="pydantic-ai",
    versions=("2.68", "3"),
    openai=("3", "4"),
)


@cache
def _sdk() -> Any:
    return _FRAMEWORK.load()


def rollout_model(
    model: str,
    *,
    record: bool = True,
    timeout_sec: float | None = 600.0,
    max_retries: int = 2,
    model_options: Mapping[str, Any] | None = None,
    **client_options: Any,
) -> Any:
    """Return a model of PydanticAI that is the policy of the rollout that runs here.

    It speaks chat completions. Make one per rollout, on either side of the bridge; it costs about
    a millisecond, since the connections are shared by all rollouts of the bridge.

    Args:
        model: The model's name.
        record: Whether its calls are recorded; ``False`` for a judge.
        timeout_sec: How long to wait for each part of an answer, in seconds; ``None`` for as
            long as it takes.
        max_retries: How often a request is tried again after 408, 409, 429, 5xx and lost
            connections.
        model_options: Further arguments of ``pydantic_ai.models.openai.OpenAIChatModel``, such as
            ``profile`` and ``settings``.
        client_options: Further arguments of ``openai.AsyncOpenAI``.

    Raises:
        IntegrationError: No rollout is running here, or PydanticAI is missing or of a wrong
            version.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    models = _FRAMEWORK.load(".models.openai")
    providers = _FRAMEWORK.load(".providers.openai")
    client = rollout_openai(
        record=record, timeout_sec=timeout_sec, max_retries=max_retries, **client_options
    )
    provider = providers.OpenAIProvider(openai_client=client)
    return models.OpenAIChatModel(model, provider=provider, **(model_options or {}))


async def run_agent(
    agent: Any,
    prompt: str | Sequence[Any] | None = None,
    *,
    record: bool = True,
    **options: Any,
) -> Any:
    """Run an agent on the bridge, and return what ``agent.run`` returns.

    What it said, as PydanticAI dumps it in JSON, becomes the sample, also where the run fails.

    A cancellation ends the run: the call that is under way is dropped, and asynchronous tools are
    cancelled and waited for.

    Args:
        agent: The agent.
        prompt: A text, contents of a user's message, or chat messages. Of the latter, what comes
            before the last one of the user is the run's history; an agent's ``system_prompt`` is
            left out of a run that has one, its ``instructions`` are not.
        record: Whether the history becomes the sample; ``False`` for a judge.
        options: Further arguments of ``agent.run``, such as ``deps`` and ``model``.

    Raises:
        BridgeError: No bridge is open; its message says where to open one.
        IntegrationError: No rollout is running here, or PydanticAI is missing or of a wrong
            version.
        SampleSourceError: The rollout has a sample source of another kind.
        InvalidFieldError: A part of the prompt has no counterpart in PydanticAI.
        BaseException: What the run raised, intact.
    """
    sdk, source = _sdk(), source_of(the_rollout()) if record else None
    run = partial(agent.run, **_arguments(sdk, prompt, options))
    return await get_bridge().run(_run, sdk, source, run)


def _arguments(sdk: Any, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
    asked, history = (None, None) if prompt is None else as_history(sdk, prompt)
    given = dict(options)
    if history is not None:
        given["message_history"] = [*(given.get("message_history") or ()), *history]
    return {"user_prompt": asked, **given}


async def _run(sdk: Any, source: FrameworkSource | None, run: Any) -> Any:
    result = None
    with sdk.capture_run_messages() as messages:
        try:
            result = await run()
        finally:
            _take(sdk, source, messages if result is None else result.all_messages())
    return result


def _take(sdk: Any, source: FrameworkSource | None, messages: Sequence[Any]) -> None:
    if source is not None and messages:
        dumped = sdk.ModelMessagesTypeAdapter.dump_python(list(messages), mode="json")
        source.take_history(dumped, as_chat(dumped))


@asynccontextmanager
async def stream_agent(
    agent: Any,
    prompt: str | Sequence[Any] | None = None,
    *,
    record: bool = True,
    buffer_size: int = 16,
    **options: Any,
) -> AsyncGenerator[AgentStream[Any], None]:
    """Run an agent on the bridge and iterate over its events as they come.

    For example::

        async with stream_agent(agent, ctx.prompt) as events:
            async for event in events:
                ...
        print(events.result.output)

    Leaving the block ends the run; what it has said until then becomes the sample.

    Args:
        agent: The agent.
        prompt: As `run_agent` takes it.
        record: Whether the history becomes the sample.
        buffer_size: How many events the run may be ahead.
        options: Further arguments of ``agent.run_stream_events``.

    Raises:
        BaseException: As `run_agent`; what the run raised comes behind its last event.
    """
    sdk, source = _sdk(), source_of(the_rollout()) if record else None
    stream: AgentStream[Any] = AgentStream()
    start = partial(agent.run_stream_events, **_arguments(sdk, prompt, options))
    events = partial(_events, sdk, source, stream, start)
    async with get_bridge().iterate(events, buffer_size=buffer_size) as items:
        yield stream.attach(items)


async def _events(
    sdk: Any, source: FrameworkSource | None, stream: AgentStream[Any], start: Any
) -> AsyncGenerator[Any, None]:
    # The whole iteration is one task, so the variable that this sets is reset where it was set.
    with sdk.capture_run_messages() as messages:
        try:
            async with start() as events:
                async for event in events:
                    if isinstance(event, sdk.AgentRunResultEvent):
                        stream.result = event.result
                    yield event
        finally:
            done = stream.result
            _take(sdk, source, messages if done is None else done.all_messages())
