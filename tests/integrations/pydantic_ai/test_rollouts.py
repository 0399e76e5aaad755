"""PydanticAI in rollouts."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic_ai", reason='needs pip install "trio-rollout[pydantic-ai]"')

import pydantic_ai
from integrations.framework_ends import *  # noqa: F403
from integrations.framework_samples import *  # noqa: F403
from integrations.frameworks import KEY, QUESTION, Kit, run, serving, trajectory, workflow  # noqa: F401
from integrations.scripted import call, say, scripted_endpoint

from rollout import AgentWorkflow, RolloutContext
from rollout.integrations import pydantic_ai as adapter
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import RolloutStatus


def make_agent(model, tools, **options):
    return pydantic_ai.Agent(model, tools=list(tools), **options)


def piece(event):
    if isinstance(event, pydantic_ai.PartStartEvent):
        return event.part.content if isinstance(event.part, pydantic_ai.TextPart) else None
    if isinstance(event, pydantic_ai.PartDeltaEvent):
        return getattr(event.delta, "content_delta", None)
    return None


@pytest.fixture
def kit():
    return Kit(
        adapter=adapter,
        agent=make_agent,
        output=lambda result: result.output,
        text=lambda message: message["parts"][0]["content"],
        tokens=lambda result: (result.usage.input_tokens, result.usage.output_tokens),
        piece=piece,
        tool_errors_end_runs=True,
    )


async def test_an_agent_of_all_rollouts_with_a_model_of_each():
    agent = pydantic_ai.Agent(instructions="Be brief.", name="shared")

    class Talk(AgentWorkflow):
        async def run(self, ctx):
            model = adapter.rollout_model("policy")
            first = await adapter.run_agent(agent, "first?", model=model)
            await adapter.run_agent(
                agent, "second?", model=model, message_history=first.all_messages()
            )

    async with scripted_endpoint(say("one"), say("two")) as endpoint, serving(Talk) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert [each["kind"] for each in result.sample.messages] == ["request", "response"] * 2
    assert "other_runs" not in result.sample.extra_fields


async def test_structured_output_is_a_tool_call_that_has_an_answer():
    async with scripted_endpoint(call("final_result", value=13)) as endpoint:
        async with open_asyncio_bridge():
            with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as context:
                model = adapter.rollout_model("policy")
                agent = pydantic_ai.Agent(model, output_type=pydantic_ai.ToolOutput(make_value))
                result = await adapter.run_agent(agent, [QUESTION])
                sample = await context.get_sample()
    assert result.output == 13
    step = trajectory(sample)["steps"][-1]
    assert step["tool_calls"][0]["arguments"] == {"value": 13}
    assert step["observation"]["results"][0]["content"]


def make_value(value: int) -> int:
    """Give the value."""
    return value


async def test_a_run_that_fails_leaves_a_sample():
    def broken() -> str:
        """Fail."""
        raise LookupError("nothing there")

    async with scripted_endpoint(call("broken")) as endpoint, open_asyncio_bridge():
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as context:
            agent = make_agent(adapter.rollout_model("policy"), [broken])
            with pytest.raises(LookupError, match="nothing there"):
                await adapter.run_agent(agent, [QUESTION])
            sample = await context.get_sample()
    assert [each["kind"] for each in sample.messages][:2] == ["request", "response"]
    assert trajectory(sample)["final_metrics"]["total_completion_tokens"] == 1
