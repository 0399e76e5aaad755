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

import base64
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from rollout.errors import InvalidFieldError
from rollout.integrations.asyncio_bridge import get_bridge
from rollout.integrations.asyncio_client import rollout_client
from rollout.integrations.frameworks.adapters import (
    AgentStream,
    Framework,
    stream_run,
    trio_tool,
)
from rollout.integrations.frameworks.source import FrameworkSource, framework_source
from rollout.integrations.recording.responses import text_of

__all__ = ["AgentStream", "rollout_model", "run_agent", "stream_agent", "trio_tool"]

_FRAMEWORK = Framework(
    module="pydantic_ai",
    distribution="pydantic-ai-slim",
    extra="pydantic-ai",
    versions=("2.68", "3"),
    openai=("3", "4"),
)

_USAGE = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "cache_read_tokens": "cached_tokens",
}
_URLS = {"image-url": "image_url", "audio-url": "audio_url"}


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
        streamed: Whether `run_agent`, too, asks for streams, and puts each answer together;
            ``False`` for an endpoint that does not stream.
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
    client = rollout_client(
        record=record, timeout_sec=timeout_sec, max_retries=max_retries, **client_options
    )
    provider = providers.OpenAIProvider(openai_client=client)
    kind = _streamed_model(models) if streamed else models.OpenAIChatModel
    return kind(model, provider=provider, **(model_options or {}))


@cache
def _streamed_model(models: Any) -> Any:
    """Return the class of models that get their whole answers as streams."""

    class StreamedChatModel(models.OpenAIChatModel):  # type: ignore[misc]
        async def request(self, *args: Any, **more: Any) -> Any:
            async with self.request_stream(*args, **more) as stream:
                async for _ in stream:
                    pass
                return stream.get()

    return StreamedChatModel


async def run_agent(
    agent: Any,
    prompt: str | Sequence[Any] | None = None,
    *,
    record: bool = True,
    **options: Any,
) -> Any:
    """Run an agent on the bridge, and return what ``agent.run`` returns.

    Its messages, as PydanticAI dumps them in JSON, become the sample, also where the run fails.

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
        BaseException: The error of the run, intact.
    """
    sdk, source = _FRAMEWORK.load(), framework_source(record=record)
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
    sdk, source = _FRAMEWORK.load(), framework_source(record=record)
    start = partial(agent.run_stream_events, **_arguments(sdk, prompt, options))
    async with stream_run(partial(_events, sdk, source, start), buffer_size=buffer_size) as stream:
        yield stream


async def _events(
    sdk: Any, source: FrameworkSource | None, start: Any, stream: AgentStream[Any]
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


def as_history(sdk: Any, prompt: Any) -> tuple[Any, list[Any] | None]:
    """Return the user's prompt, as ``agent.run`` takes it, and the history before it.

    Args:
        sdk: The module ``pydantic_ai``.
        prompt: A text, contents of a user's message, or chat messages.

    Raises:
        InvalidFieldError: A part of a message has no counterpart there.
    """
    if isinstance(prompt, str) or not all(isinstance(each, Mapping) for each in prompt):
        return prompt, None
    messages = list(prompt)
    asked: Any = None
    if messages and messages[-1].get("role") == "user":
        asked = _content(sdk, messages.pop().get("content"))
    history: list[Any] = []
    names: dict[Any, Any] = {}
    for message in messages:
        response = message.get("role") == "assistant"
        kind = sdk.ModelResponse if response else sdk.ModelRequest
        parts = _response(sdk, message, names) if response else [_request(sdk, message, names)]
        if history and isinstance(history[-1], kind):
            history[-1] = kind(parts=[*history[-1].parts, *parts])
        else:
            history.append(kind(parts=parts))
    return asked, history or None


def _request(sdk: Any, message: Mapping[str, Any], names: Mapping[Any, Any]) -> Any:
    role, content = message.get("role"), message.get("content")
    if role in {"system", "developer"}:
        return sdk.SystemPromptPart(content=_text(content))
    if role == "user":
        return sdk.UserPromptPart(content=_content(sdk, content))
    if role == "tool":
        call_id = message.get("tool_call_id")
        return sdk.ToolReturnPart(
            tool_name=names.get(call_id, message.get("name") or "unknown"),
            content=_text(content),
            tool_call_id=call_id,
        )
    raise InvalidFieldError("prompt", f"has a message of role {role}, which PydanticAI has not")


def _response(sdk: Any, message: Mapping[str, Any], names: dict[Any, Any]) -> list[Any]:
    parts: list[Any] = []
    if message.get("reasoning_content"):
        parts.append(sdk.ThinkingPart(content=message["reasoning_content"]))
    if message.get("content"):
        parts.append(sdk.TextPart(content=_text(message["content"])))
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        names[call["id"]] = name
        parts.append(sdk.ToolCallPart(tool_name=name, args=arguments, tool_call_id=call["id"]))
    return parts


def _content(sdk: Any, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_user_part(sdk, part) for part in content]


def _user_part(sdk: Any, part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "text":
        return part["text"]
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if part.get("type") != "image_url" or not isinstance(url, str):
        raise InvalidFieldError(
            "prompt",
            f"has a part of type {part.get('type')} that PydanticAI has no content for; pass its "
            "own contents instead",
        )
    if url.startswith("data:"):
        head, _, data = url.partition(",")
        media_type = head.removeprefix("data:").partition(";")[0]
        return sdk.BinaryContent(data=base64.b64decode(data), media_type=media_type)
    return sdk.ImageUrl(url=url)


def _text(content: Any) -> str:
    text = "" if content is None else text_of(content)
    return json.dumps(content) if text is None else text


def as_chat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn dumped messages of PydanticAI into chat messages.

    A part that chat does not know is kept as a part of the content, its ``part_kind`` as ``type``.
    """
    chat: list[dict[str, Any]] = []
    instructions = None
    for message in messages:
        if message.get("kind") == "response":
            chat.append(_reply(message))
            continue
        if message.get("instructions") not in (None, instructions):
            instructions = message["instructions"]
            chat.append({"role": "system", "content": instructions})
        chat += [_asked(part) for part in message["parts"]]
    return chat


def _asked(part: Mapping[str, Any]) -> dict[str, Any]:
    kind, content = part.get("part_kind"), part.get("content")
    if kind == "system-prompt":
        message: dict[str, Any] = {"role": "system", "content": content}
    elif kind == "user-prompt":
        message = {"role": "user", "content": _chat_content(content)}
    elif kind == "tool-return" or (kind == "retry-prompt" and part.get("tool_name")):
        message = {
            "role": "tool",
            "tool_call_id": part.get("tool_call_id"),
            "name": part.get("tool_name"),
            "content": content if isinstance(content, str) else json.dumps(content),
        }
        if part.get("outcome") not in (None, "success"):
            message["outcome"] = part["outcome"]
        if part.get("metadata") is not None:
            message["metadata"] = part["metadata"]
    elif kind in {"retry-feedback", "retry-prompt"} and isinstance(content, str):
        message = {"role": "user", "content": content}
    else:
        message = {"role": "user", "content": [{"type": kind, **part}]}
    return message


def _chat_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_chat_part(part) for part in content]


def _chat_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("kind")
    if kind in _URLS:
        name = _URLS[kind]
        rest = {k: v for k, v in part.items() if k not in {"kind", "url"} and v is not None}
        return {"type": name, name: {"url": part["url"]}, **rest}
    return {"type": kind, **part}


def _reply(message: Mapping[str, Any]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for part in message["parts"]:
        kind = part.get("part_kind")
        if kind == "text":
            texts.append(part["content"])
        elif kind == "thinking" and part.get("content"):
            thoughts.append(part["content"])
        elif kind == "tool-call":
            calls.append(_call(part))
        else:
            others.append({"type": kind, **part})
    content: Any = "".join(texts)
    if others:
        content = [*({"type": "text", "text": text} for text in texts), *others]
    reply: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    if calls:
        reply["tool_calls"] = calls
    if thoughts:
        reply["reasoning_content"] = "\n\n".join(thoughts)
    known = {
        "timestamp": message.get("timestamp"),
        "model": message.get("model_name"),
        "usage": _usage(message.get("usage")),
        "finish_reason": message.get("finish_reason"),
        "response_id": message.get("provider_response_id"),
    }
    return reply | {name: value for name, value in known.items() if value}


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    given = part.get("args")
    arguments = given if isinstance(given, str) else json.dumps({} if given is None else given)
    function = {"name": part.get("tool_name"), "arguments": arguments}
    return {"id": part.get("tool_call_id"), "type": "function", "function": function}


def _usage(usage: Any) -> dict[str, Any]:
    if not isinstance(usage, Mapping):
        return {}
    return {_USAGE.get(str(name), str(name)): value for name, value in usage.items() if value}
