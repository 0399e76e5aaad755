"""Strands Agents in rollouts."""

from __future__ import annotations

import pytest

pytest.importorskip("strands", reason='needs pip install "trio-rollout[strands]"')

import strands
from integrations.framework_ends import *  # noqa: F403
from integrations.framework_samples import *  # noqa: F403
from integrations.frameworks import KEY, Kit, run, serving, trajectory, words, workflow  # noqa: F401
from integrations.scripted import say, scripted_endpoint
from strands.agent.conversation_manager import SlidingWindowConversationManager

from rollout import AgentWorkflow, RolloutContext
from rollout.integrations import strands as adapter
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import RolloutStatus


def make_agent(model, tools, **options):
    tools = [strands.tool(tool) for tool in tools]
    return strands.Agent(model=model, tools=tools, callback_handler=None, **options)


def tokens(result):
    usage = result.metrics.accumulated_usage
    return usage["inputTokens"], usage["outputTokens"]


@pytest.fixture
def kit():
    return Kit(
        adapter=adapter,
        agent=make_agent,
        output=lambda result: str(result).strip(),
        text=lambda message: message["content"][0]["text"],
        tokens=tokens,
        piece=lambda event: event.get("data"),
        tool_errors_end_runs=False,
    )


async def test_an_agent_goes_on_with_its_conversation():
    class Talk(AgentWorkflow):
        async def run(self, ctx):
            agent = make_agent(adapter.rollout_model("policy"), ())
            await adapter.run_agent(agent, "first?")
            await adapter.run_agent(agent, "second?")

    async with scripted_endpoint(say("one"), say("two")) as endpoint, serving(Talk) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert [each["role"] for each in result.sample.messages] == ["user", "assistant"] * 2
    assert "other_runs" not in result.sample.extra_fields


async def test_what_the_conversation_manager_drops_stays_in_the_sample():
    async with (
        scripted_endpoint(say("one"), say("two"), say("three")) as endpoint,
        open_asyncio_bridge(),
    ):
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as context:
            agent = make_agent(
                adapter.rollout_model("policy"),
                (),
                system_prompt="Be brief.",
                conversation_manager=SlidingWindowConversationManager(window_size=2),
            )
            await adapter.run_agent(agent, "first?")
            for question in ("second?", "third?"):
                await adapter.run_agent(agent, question)
            sample = await context.get_sample()
    assert len(agent.messages) == 2
    assert [each["content"][0]["text"] for each in sample.messages] == [
        "first?",
        "one",
        "second?",
        "two",
        "third?",
        "three",
    ]
    assert "other_runs" not in sample.extra_fields
    assert [step["source"] for step in trajectory(sample)["steps"]] == [
        "system",
        *["user", "agent"] * 3,
    ]


async def test_a_new_conversation_of_the_same_agent():
    async with scripted_endpoint(say("one"), say("two")) as endpoint, open_asyncio_bridge():
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as context:
            agent = make_agent(adapter.rollout_model("policy"), ())
            await adapter.run_agent(agent, "first?")
            agent.messages.clear()
            await adapter.run_agent(agent, "second?")
            sample = await context.get_sample()
    assert [each["content"][0]["text"] for each in sample.messages] == ["second?", "two"]
    assert len(sample.extra_fields["other_runs"]) == 1


async def test_system_messages_join_the_system_prompt():
    async with scripted_endpoint(say("one")) as endpoint, open_asyncio_bridge():
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY):
            agent = make_agent(adapter.rollout_model("policy"), (), system_prompt="Be brief.")
            prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "?"}]
            await adapter.run_agent(agent, prompt)
            await adapter.run_agent(agent, prompt)
    for request in endpoint.requests:
        assert words(request.body["messages"][0]["content"]) == "Be brief.\n\nBe kind."
