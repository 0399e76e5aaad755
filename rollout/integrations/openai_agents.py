"""The OpenAI Agents SDK inside of a rollout, over the bridge; needs the extra ``openai-agents``.

The model of an agent is the policy of the rollout that runs here, and what the agent says becomes
the rollout's sample::

    class Solve(AgentWorkflow):
        async def run(self, ctx):
            agent = Agent(name="solver", tools=[add], model=rollout_model("policy"))
            await run_agent(agent, ctx.prompt, max_turns=8)

The server has to open a bridge in its lifespan; see the page about frameworks. The SDK's own
tracing, which sends every run to OpenAI, is taken out when this is first used; processors that you
have added stay.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from rollout.integrations.asyncio_bridge import get_bridge
from rollout.integrations.asyncio_client import rollout_client
from rollout.integrations.frameworks.adapters import (
    AgentStream,
    Framework,
    stream_run,
    trio_tool,
)
from rollout.integrations.frameworks.source import FrameworkSource, framework_source
from rollout.integrations.recording.responses import items_as_messages, text_of

__all__ = ["AgentStream", "rollout_model", "run_agent", "stream_agent", "trio_tool"]

_FRAMEWORK = Framework(
    module="agents",
    distribution="openai-agents",
    extra="openai-agents",
    versions=("0.24", "1"),
    openai=("3", "4"),
)

_COUNTS = (
    "input_tokens",
    "input_tokens_details",
    "output_tokens",
    "output_tokens_details",
    "total_tokens",
)


@cache
def _sdk() -> Any:
    sdk = _FRAMEWORK.load()
    _stop_export(sdk)
    return sdk


def _stop_export(sdk: Any) -> None:
    """Take out the processor that sends traces to OpenAI."""
    tracing = _FRAMEWORK.load(".tracing")
    provider = tracing.get_trace_provider()
    present = getattr(getattr(provider, "_multi_processor", None), "_processors", None)
    if present is None:  # the user's own provider, or one that can no longer be told apart
        if type(provider).__module__.startswith("agents."):
            sdk.set_tracing_disabled(True)
        return
    default = _FRAMEWORK.load(".tracing.processors").default_processor()
    sdk.set_trace_processors([each for each in present if each is not default])


def rollout_model(
    model: str,
    *,
    record: bool = True,
    timeout_sec: float | None = 600.0,
    max_retries: int = 2,
    streamed: bool = True,
    model_options: Mapping[str, Any] | None = None,
    **client_options: Any,
) -> Any:
    """Return a model of the SDK that is the policy of the rollout that runs here.

    It speaks chat completions. Make one per rollout, on either side of the bridge; it costs about
    a millisecond, since the connections are shared by all rollouts of the bridge.

    Args:
        model: The model's name.
        record: Whether its calls are recorded; ``False`` for a judge.
        timeout_sec: How long to wait for each part of an answer, in seconds; ``None`` for as
            long as it takes.
        max_retries: How often a request is tried again after 408, 409, 429, 5xx and lost
            connections.
        streamed: Whether `run_agent`, too, asks for streams, and puts each answer together;
            ``False`` for an endpoint that does not stream.
        model_options: Further arguments of ``agents.OpenAIChatCompletionsModel``.
        client_options: Further arguments of ``openai.AsyncOpenAI``.

    Raises:
        IntegrationError: No rollout is running here, or the SDK is missing or of a wrong version.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    sdk = _sdk()
    client = rollout_client(
        record=record, timeout_sec=timeout_sec, max_retries=max_retries, **client_options
    )
    kind = _streamed_model(sdk) if streamed else sdk.OpenAIChatCompletionsModel
    return kind(model=model, openai_client=client, **(model_options or {}))


@cache
def _streamed_model(sdk: Any) -> Any:
    """Return the class of models that get their whole answers as streams."""

    class StreamedChatCompletionsModel(sdk.OpenAIChatCompletionsModel):  # type: ignore[misc]
        async def get_response(self, *args: Any, **options: Any) -> Any:
            answer: Any = None
            async for event in self.stream_response(*args, **options):
                if event.type == "response.completed":
                    answer = event.response
            usage = answer.usage  # None if the endpoint does not count
            request_id = answer._request_id  # noqa: SLF001 - there is nothing public with it
            counts = {name: getattr(usage, name) for name in _COUNTS} if usage else {}
            return sdk.ModelResponse(
                output=answer.output,
                usage=sdk.Usage(requests=1, **counts),
                response_id=None,
                request_id=request_id,
            )

    return StreamedChatCompletionsModel


async def run_agent(
    agent: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    session: Any = None,
    record: bool = True,
    **options: Any,
) -> Any:
    """Run an agent on the bridge, and return what ``Runner.run`` returns.

    Its messages, as items, become the sample, also where the run ends with an exception of the
    SDK that knows it, such as ``MaxTurnsExceeded``. With a session it is all that the session has.

    A cancellation ends the run: the call that is under way is dropped, and asynchronous tools are
    cancelled and waited for.

    Args:
        agent: The agent.
        prompt: A text, chat messages, or items.
        session: A session of the SDK.
        record: Whether the history becomes the sample; ``False`` for a judge.
        options: Further arguments of ``Runner.run``, such as ``max_turns``.

    Raises:
        BridgeError: No bridge is open; its message says where to open one.
        IntegrationError: No rollout is running here, or the SDK is missing or of a wrong version.
        SampleSourceError: The rollout has a sample source of another kind.
        BaseException: The error of the run; an error of a tool (with
            ``failure_error_function=None``) out of the ``UserError`` around it.
    """
    sdk, source = _sdk(), framework_source(record=record)
    run = partial(sdk.Runner.run, agent, as_items(prompt), session=session, **options)
    return await get_bridge().run(_run, sdk, source, run, session)


async def _run(sdk: Any, source: FrameworkSource | None, run: Any, session: Any) -> Any:
    try:
        result = await run()
    except sdk.AgentsException as error:
        if source is not None and error.run_data is not None:
            await _take(sdk, source, error.run_data, session, failed=True)
        failed = _of_tool(sdk, error)
        if failed is None:
            raise
    else:
        if source is not None:
            await _take(sdk, source, result, session)
        return result
    # Not inside of the handler: it is the cause of what it would then be the context of.
    raise failed


def _of_tool(sdk: Any, error: BaseException) -> Exception | None:
    """Return the error of a tool without the SDK's wrapper."""
    cause = error.__cause__
    wrapped = isinstance(error, sdk.UserError) and str(error).startswith("Error running tool")
    return cause if wrapped and isinstance(cause, Exception) else None


async def _take(
    sdk: Any, source: FrameworkSource, run: Any, session: Any, *, failed: bool = False
) -> None:
    """Keep the history of a run, or that of an exception's ``run_data``."""
    if session is not None:
        items = await session.get_items()
    elif hasattr(run, "to_input_list"):
        items = run.to_input_list()
    else:
        items = [
            *sdk.ItemHelpers.input_to_new_input_list(run.input),
            *(
                each.to_input_item()
                for each in run.new_items
                if not isinstance(each, sdk.ToolApprovalItem)
            ),
        ]
    # The SDK drops a reply that it cannot use: invalid JSON where JSON was asked for, an unknown
    # tool. It belongs to the history all the same.
    source.take_history(items, items_as_messages(items), from_chat=as_items if failed else None)


@asynccontextmanager
async def stream_agent(
    agent: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    session: Any = None,
    record: bool = True,
    buffer_size: int = 16,
    **options: Any,
) -> AsyncGenerator[AgentStream[Any], None]:
    """Run an agent on the bridge and iterate over its events as they come.

    For example::

        async with stream_agent(agent, ctx.prompt) as events:
            async for event in events:
                ...
        print(events.result.final_output)

    Leaving the block ends the run; what it has said until then becomes the sample.

    Args:
        agent: The agent.
        prompt: A text, chat messages, or items.
        session: A session of the SDK.
        record: Whether the history becomes the sample.
        buffer_size: How many events the run may be ahead.
        options: Further arguments of ``Runner.run_streamed``.

    Raises:
        BaseException: As `run_agent`; what the run raised comes behind its last event.
    """
    sdk, source = _sdk(), framework_source(record=record)
    start = partial(sdk.Runner.run_streamed, agent, as_items(prompt), session=session, **options)
    events = partial(_events, sdk, source, start, session)
    async with stream_run(events, buffer_size=buffer_size) as stream:
        yield stream


async def _events(
    sdk: Any, source: FrameworkSource | None, start: Any, session: Any, stream: AgentStream[Any]
) -> AsyncGenerator[Any, None]:
    result = start()
    try:
        async for event in result.stream_events():
            yield event
        stream.result = result
        return
    except sdk.UserError as error:
        failed = _of_tool(sdk, error)
        if failed is None:
            raise
    finally:
        if not result.is_complete:
            result.cancel()
        # The run is a task of its own; the connection of its call is closed once that has ended.
        if result.run_loop_task is not None:
            await asyncio.wait([result.run_loop_task])
        if source is not None:
            await _take(sdk, source, result, session, failed=stream.result is None)
    raise failed


def as_items(prompt: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Turn a prompt into items; items and plain messages pass as they are."""
    if isinstance(prompt, str):
        return prompt
    items: list[dict[str, Any]] = []
    for message in prompt:
        role = message.get("role")
        if role == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message.get("tool_call_id"),
                    "output": _output(message.get("content")),
                }
            )
        elif role == "assistant" and ("tool_calls" in message or "type" not in message):
            items += _reply(message)
        elif role is not None and "type" not in message:
            items.append({"role": role, "content": _content(message.get("content"))})
        else:
            items.append(dict(message))
    return items


def _reply(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    content = message.get("content")
    if content:
        items.append({"role": "assistant", "content": _output(content)})
    elif message.get("refusal"):
        refusal = {"type": "refusal", "refusal": message["refusal"]}
        items.append({"type": "message", "role": "assistant", "content": [refusal]})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        items.append(
            {
                "type": "function_call",
                "call_id": call.get("id"),
                "name": function.get("name"),
                "arguments": function.get("arguments"),
            }
        )
    return items


def _content(content: Any) -> Any:
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return {"type": "input_text", "text": part.get("text", "")}
    if kind == "image_url":
        image = part.get("image_url")
        image = image if isinstance(image, dict) else {"url": image}
        return {
            "type": "input_image",
            "image_url": image.get("url"),
            "detail": image.get("detail") or "auto",
        }
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "input_file", **part["file"]}
    return part


def _output(content: Any) -> str:
    text = text_of(content)
    return json.dumps(content) if text is None else text
