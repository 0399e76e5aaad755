"""Strands Agents inside of a rollout, over the bridge; needs the extra ``strands``.

The model of an agent is the policy of the rollout that runs here, and what the agent says becomes
the rollout's sample::

    class Solve(AgentWorkflow):
        async def run(self, ctx):
            agent = Agent(model=rollout_model("policy"), tools=[add], callback_handler=None)
            await run_agent(agent, ctx.prompt)

The server has to open a bridge in its lifespan; see the page about frameworks. An agent keeps its
conversation, so make one for each rollout.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from rollout.codec import MAX_JSON_DEPTH
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

__all__ = ["AgentStream", "rollout_model", "run_agent", "stream_agent", "trio_tool"]

_FRAMEWORK = Framework(
    module="strands",
    distribution="strands-agents",
    extra="strands",
    versions=("1.62", "2"),
    openai=("1.68", "3"),
)

_DATA_URL = "data:image/"
_USAGE = {
    "inputTokens": "prompt_tokens",
    "outputTokens": "completion_tokens",
    "totalTokens": "total_tokens",
    "cacheReadInputTokens": "cached_tokens",
}


def rollout_model(
    model: str,
    *,
    record: bool = True,
    timeout_sec: float | None = 600.0,
    max_retries: int = 2,
    model_options: Mapping[str, Any] | None = None,
    **client_options: Any,
) -> Any:
    """Return a model of Strands that is the policy of the rollout that runs here.

    It speaks chat completions. Make one per rollout, on either side of the bridge; it costs about
    a millisecond, since the connections are shared by all rollouts of the bridge.

    Args:
        model: The model's name.
        record: Whether its calls are recorded; ``False`` for a judge.
        timeout_sec: How long to wait for each part of an answer, in seconds; ``None`` for as
            long as it takes.
        max_retries: How often a request is tried again after 408, 409, 429, 5xx and lost
            connections. An agent waits seconds and tries again itself after that, on 429 alone.
        model_options: Further configuration of ``strands.models.openai.OpenAIModel``, such as
            ``params``.
        client_options: Further arguments of ``openai.AsyncOpenAI``.

    Raises:
        IntegrationError: No rollout is running here, or Strands is missing or of a wrong version.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    models = _FRAMEWORK.load(".models.openai")
    client = rollout_client(
        record=record, timeout_sec=timeout_sec, max_retries=max_retries, **client_options
    )
    return models.OpenAIModel(client=client, model_id=model, **(model_options or {}))


async def run_agent(
    agent: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    record: bool = True,
    **options: Any,
) -> Any:
    """Run an agent on the bridge, and return what ``agent.invoke_async`` returns.

    The messages of the agent, in blocks of content, become the sample, also where the run fails;
    messages that its conversation manager has dropped meanwhile are in it. A system message of
    the prompt is added to the agent's system prompt.

    A cancellation ends the run: the call that is under way is dropped, and asynchronous tools are
    cancelled and waited for.

    Args:
        agent: The agent.
        prompt: A text, chat messages, or messages of Strands.
        record: Whether the history becomes the sample; ``False`` for a judge.
        options: Further arguments of ``agent.invoke_async``, such as ``limits``.

    Raises:
        BridgeError: No bridge is open; its message says where to open one.
        IntegrationError: No rollout is running here, or Strands is missing or of a wrong version.
        SampleSourceError: The rollout has a sample source of another kind.
        InvalidFieldError: A part of the prompt has no counterpart in Strands.
        BaseException: The error of the run, out of the ``EventLoopException`` around it.
    """
    sdk, source = _FRAMEWORK.load(), framework_source(record=record)
    run = partial(agent.invoke_async, _prepared(agent, prompt), **options)
    return await get_bridge().run(_run, sdk, source, agent, run)


async def _run(sdk: Any, source: FrameworkSource | None, agent: Any, run: Any) -> Any:
    history = _History.of(sdk, agent)
    try:
        return await run()
    except sdk.types.exceptions.EventLoopException as error:
        failed = error.original_exception
    finally:
        history.hand_over(source)
    # Not inside of the handler: it is the cause of what it would then be the context of.
    raise failed


class _History:
    """Keeps every message of an agent, whatever its conversation manager drops."""

    def __init__(self) -> None:
        self._messages: list[Any] = []

    @classmethod
    def of(cls, sdk: Any, agent: Any) -> _History:
        """Return the history of an agent that is about to run."""
        found = _histories.get(agent)
        if found is None:
            found = _histories[agent] = cls()
            agent.hooks.add_callback(sdk.hooks.MessageAddedEvent, found.on_message)
        found.catch_up(agent.messages)
        return found

    def on_message(self, event: Any) -> None:
        """Keep a message that the agent has added."""
        self._messages.append(event.message)

    def catch_up(self, messages: Sequence[Any]) -> None:
        """Keep messages that are there without the agent having added them."""
        known = {id(each) for each in self._messages}
        if not any(id(each) in known for each in messages):
            self._messages = list(messages)  # another conversation
        else:
            self._messages += [each for each in messages if id(each) not in known]

    def hand_over(self, source: FrameworkSource | None) -> None:
        """Deliver it as it stands."""
        if source is not None:
            messages = plain(self._messages)
            source.take_history(messages, as_chat(messages))


_histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()


def _prepared(agent: Any, prompt: str | Sequence[Mapping[str, Any]]) -> Any:
    system, messages = as_blocks(prompt)
    before = agent.system_prompt
    if system is not None and not (before or "").endswith(system):
        agent.system_prompt = f"{before}\n\n{system}" if before else system
    return messages


@asynccontextmanager
async def stream_agent(
    agent: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    record: bool = True,
    buffer_size: int = 16,
    **options: Any,
) -> AsyncGenerator[AgentStream[dict[str, Any]], None]:
    """Run an agent on the bridge and iterate over its events as they come.

    For example::

        async with stream_agent(agent, ctx.prompt) as events:
            async for event in events:
                print(event.get("data", ""), end="")
        print(events.result.stop_reason)

    Leaving the block ends the run; what it has said until then becomes the sample.

    Args:
        agent: The agent.
        prompt: A text, chat messages, or messages of Strands.
        record: Whether the history becomes the sample.
        buffer_size: How many events the run may be ahead.
        options: Further arguments of ``agent.stream_async``.

    Raises:
        BaseException: As `run_agent`; what the run raised comes behind its last event.
    """
    sdk, source = _FRAMEWORK.load(), framework_source(record=record)
    start = partial(agent.stream_async, _prepared(agent, prompt), **options)
    events = partial(_events, sdk, source, agent, start)
    async with stream_run(events, buffer_size=buffer_size) as stream:
        yield stream


async def _events(
    sdk: Any,
    source: FrameworkSource | None,
    agent: Any,
    start: Callable[[], AsyncGenerator[dict[str, Any], None]],
    stream: AgentStream[dict[str, Any]],
) -> AsyncGenerator[dict[str, Any], None]:
    history = _History.of(sdk, agent)
    events = start()
    try:
        async for event in events:
            if "result" in event:
                stream.result = event["result"]
            yield event
        return
    except sdk.types.exceptions.EventLoopException as error:
        failed = error.original_exception
    finally:
        await events.aclose()
        history.hand_over(source)
    raise failed


def as_blocks(
    prompt: str | Sequence[Mapping[str, Any]],
) -> tuple[str | None, str | list[dict[str, Any]]]:
    """Return the system text of a prompt, and the rest of it in the form of Strands.

    Raises:
        InvalidFieldError: A part of a message has no counterpart there.
    """
    if isinstance(prompt, str):
        return None, prompt
    system: list[str] = []
    messages: list[dict[str, Any]] = []
    for message in prompt:
        role, content = message.get("role"), message.get("content")
        if role in {"system", "developer"}:
            system += [block["text"] for block in _blocks(content)]
        elif role == "tool":
            result = {
                "toolUseId": message.get("tool_call_id"),
                "status": "success",
                "content": _blocks(content),
            }
            _add(messages, "user", [{"toolResult": result}])
        elif role is None:  # blocks alone are a message of the user
            _add(messages, "user", [dict(message)])
        else:
            calls = [_tool_use(call) for call in message.get("tool_calls") or ()]
            _add(messages, str(role), [*_blocks(content), *calls])
    return "\n\n".join(system) or None, messages


def _add(messages: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    """Add blocks; in Strands, consecutive blocks of one role are one message."""
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"] += blocks
    else:
        messages.append({"role": role, "content": blocks})


def _blocks(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    parts = content if isinstance(content, list) else [content]
    return [_block(part) for part in parts]


def _block(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    kind = part.get("type")
    if kind is None:
        return dict(part)
    if kind == "text":
        return {"text": part["text"]}
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if kind == "image_url" and isinstance(url, str) and url.startswith(_DATA_URL):
        head, _, data = url.partition(",")
        form = head.removeprefix(_DATA_URL).partition(";")[0]
        return {"image": {"format": form, "source": {"bytes": base64.b64decode(data)}}}
    raise InvalidFieldError(
        "prompt", f"has a part of type {kind} that Strands has no block for; pass blocks instead"
    )


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given: Any = function["arguments"] or "{}"
    with suppress(ValueError, RecursionError):  # models sometimes write invalid JSON
        given = json.loads(given)
    return {"toolUse": {"toolUseId": call["id"], "name": function["name"], "input": given}}


def plain(value: Any, *, depth: int = MAX_JSON_DEPTH) -> Any:
    """Return a copy in JSON values; bytes become base64, as sessions of Strands keep them."""
    if not depth:
        return value  # the sample cuts it off there
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes_encoded__": True, "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {str(key): plain(each, depth=depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, depth=depth - 1) for each in value]
    return value


def as_chat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn messages of Strands, in JSON values, into chat messages.

    A block that chat does not know is kept as a part of the content, with its name as ``type``.
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        chat += [_result(each) for each in results]
        rest = [block for block in message["content"] if "toolResult" not in block]
        if rest or not results:
            chat.append(_message(message, rest))
    return chat


def _result(result: Mapping[str, Any]) -> dict[str, Any]:
    content = _parts(result.get("content") or [])
    message = {"role": "tool", "tool_call_id": result.get("toolUseId"), "content": content}
    if result.get("status") not in (None, "success"):
        message["status"] = result["status"]
    return message


def _message(message: Mapping[str, Any], blocks: list[Any]) -> dict[str, Any]:
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    said: list[Any] = []
    for block in blocks:
        if "toolUse" in block:
            calls.append(_call(block["toolUse"]))
        elif isinstance((thought := _thought(block)), str):
            thoughts.append(thought)
        else:
            said.append(block)
    content = _parts(said)
    chat: dict[str, Any] = {"role": message["role"], "content": content}
    if calls:
        chat["content"] = content or None
        chat["tool_calls"] = calls
    if thoughts:
        chat["reasoning_content"] = "\n\n".join(thoughts)
    usage = (message.get("metadata") or {}).get("usage")
    if message["role"] == "assistant" and isinstance(usage, dict):
        chat["usage"] = {_USAGE.get(name, name): count for name, count in usage.items()}
    return chat


def _thought(block: Mapping[str, Any]) -> str | None:
    """Return the text of a block of thoughts that holds nothing else."""
    inner = block.get("reasoningContent")
    text = inner.get("reasoningText") if isinstance(inner, dict) and len(inner) == 1 else None
    said = text.get("text") if isinstance(text, dict) and len(text) == 1 else None
    return said if isinstance(said, str) else None


def _call(use: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": use.get("name"), "arguments": json.dumps(use.get("input"))}
    return {"id": use.get("toolUseId"), "type": "function", "function": function}


def _parts(blocks: Sequence[Mapping[str, Any]]) -> Any:
    """Return blocks as content: their text if they are nothing else."""
    if all(block.keys() == {"text"} for block in blocks):
        return "".join(block["text"] for block in blocks)
    return [
        {"type": "text", "text": block["text"]}
        if block.keys() == {"text"}
        else {"type": next(iter(block), "empty"), **block}
        for block in blocks
    ]
