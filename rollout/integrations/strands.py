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

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from rollout.integrations._framework_run import AgentStream, Framework, rollout_openai, trio_tool
from rollout.integrations._framework_source import FrameworkSource, source_of, the_rollout
from rollout.integrations._strands_messages import as_blocks, as_chat, plain
from rollout.integrations.asyncio_bridge import get_bridge

__all__ = ["AgentStream", "rollout_model", "run_agent", "stream_agent", "trio_tool"]

_FRAMEWORK = Framework(
    module="strands",
    distribution="strands-agents",
    extra="strands",
    versions=("1.62", "2"),
    openai=("1.68", "3"),
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
    client = rollout_openai(
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

    What the agent has said, in blocks of content, becomes the sample, also where the run fails;
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
        BaseException: What the run raised, out of the ``EventLoopException`` around it.
    """
    sdk, source = _sdk(), source_of(the_rollout()) if record else None
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
        """Take a message that the agent has added."""
        self._messages.append(event.message)

    def catch_up(self, messages: Sequence[Any]) -> None:
        """Take over what is there without the agent having added it."""
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
    sdk, source = _sdk(), source_of(the_rollout()) if record else None
    stream: AgentStream[dict[str, Any]] = AgentStream()
    start = partial(agent.stream_async, _prepared(agent, prompt), **options)
    events = partial(_events, sdk, source, agent, stream, start)
    async with get_bridge().iterate(events, buffer_size=buffer_size) as items:
        yield stream.attach(items)


async def _events(
    sdk: Any,
    source: FrameworkSource | None,
    agent: Any,
    stream: AgentStream[dict[str, Any]],
    start: Callable[[], AsyncGenerator[dict[str, Any], None]],
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
