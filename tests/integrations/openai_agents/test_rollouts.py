"""The OpenAI Agents SDK in rollouts."""

from __future__ import annotations

import pytest

pytest.importorskip("agents", reason='needs pip install "trio-rollout[openai-agents]"')

import agents
from integrations.framework_ends import *  # noqa: F403
from integrations.framework_samples import *  # noqa: F403
from integrations.frameworks import KEY, QUESTION, Kit, run, serving, trajectory, workflow  # noqa: F401
from integrations.scripted import call, say, scripted_endpoint
from pydantic import BaseModel

from rollout import AgentWorkflow, RolloutContext
from rollout.integrations import openai_agents
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.types import RolloutStatus


def make_agent(model, tools):
    # By default the model is told that the tool failed, without a word about how.
    tools = [agents.function_tool(tool, failure_error_function=None) for tool in tools]
    return agents.Agent(name="solver", model=model, tools=tools)


def piece(event):
    delta = event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    return event.data.delta if delta else None


def tokens(result):
    usage = result.context_wrapper.usage
    return usage.input_tokens, usage.output_tokens


@pytest.fixture
def kit():
    return Kit(
        adapter=openai_agents,
        agent=make_agent,
        output=lambda result: result.final_output,
        text=lambda item: item["content"][0]["text"],
        tokens=tokens,
        piece=piece,
        tool_errors_end_runs=True,
    )


async def test_a_session_is_the_sample():
    class Talk(AgentWorkflow):
        async def run(self, ctx):
            agent = make_agent(openai_agents.rollout_model("policy"), ())
            session = agents.SQLiteSession("talk")
            await openai_agents.run_agent(agent, "first?", session=session)
            await openai_agents.run_agent(agent, "second?", session=session)
            session.close()

    async with scripted_endpoint(say("one"), say("two")) as endpoint, serving(Talk) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert len(endpoint.requests[1].body["messages"]) == 3
    assert [each["role"] for each in result.sample.messages] == ["user", "assistant"] * 2
    assert "other_runs" not in result.sample.extra_fields


async def test_too_many_turns_leave_a_sample():
    def again() -> str:
        """Go on."""
        return "on"

    async with scripted_endpoint(call("again")) as endpoint, open_asyncio_bridge():
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as context:
            agent = make_agent(openai_agents.rollout_model("policy"), [again])
            with pytest.raises(agents.MaxTurnsExceeded):
                await openai_agents.run_agent(agent, [QUESTION], max_turns=2)
            sample = await context.get_sample()
    kinds = [each.get("type", "message") for each in sample.messages]
    assert kinds == ["message", *["function_call", "function_call_output"] * 2]
    document = trajectory(sample)
    assert document["final_metrics"]["total_completion_tokens"] == 2


class Sum(BaseModel):
    total: int


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wrong", ["tool", "output"])
async def test_a_reply_that_the_sdk_makes_nothing_of_is_in_the_sample(wrong, streamed):
    """It is what the model is to learn from."""
    step = call("no_such_tool", left=6) if wrong == "tool" else say('{"total": "x')
    async with scripted_endpoint(step) as endpoint, open_asyncio_bridge():
        with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY) as context:
            model = openai_agents.rollout_model("policy")
            agent = agents.Agent(
                name="a", model=model, output_type=Sum if wrong == "output" else None
            )
            with pytest.raises(agents.ModelBehaviorError):
                if streamed:
                    async with openai_agents.stream_agent(agent, [QUESTION]) as events:
                        async for _ in events:
                            pass
                else:
                    await openai_agents.run_agent(agent, [QUESTION])
            sample = await context.get_sample()
    first, last = sample.messages
    assert first == QUESTION
    assert (last.get("name") or last["content"]) in {"no_such_tool", '{"total": "x'}
    assert "other_calls" not in sample.extra_fields
    assert trajectory(sample)["steps"][-1]["metrics"]["completion_tokens"] > 0


async def test_a_handoff_is_one_history():
    class HandOff(AgentWorkflow):
        async def run(self, ctx):
            model = openai_agents.rollout_model("policy")
            second = agents.Agent(name="second", instructions="Be second.", model=model)
            first = agents.Agent(
                name="first", instructions="Be first.", model=model, handoffs=[second]
            )
            result = await openai_agents.run_agent(first, ctx.prompt)
            assert result.last_agent is second

    steps = (call("transfer_to_second"), say("It is 13"))
    async with scripted_endpoint(*steps) as endpoint, serving(HandOff) as client:
        result = await run(client, endpoint)
    assert result.status is RolloutStatus.SUCCESS, result.err_message
    assert endpoint.requests[1].body["messages"][0]["content"] == "Be second."
    assert "other_calls" not in result.sample.extra_fields


async def test_traces_are_sent_to_nobody_but_ones_own_processor():
    from agents.tracing import get_trace_provider
    from agents.tracing.processors import default_processor

    ended = []

    class Mine(agents.TracingProcessor):
        def on_trace_start(self, trace):
            pass

        def on_trace_end(self, trace):
            ended.append(trace.name)

        def on_span_start(self, span):
            pass

        def on_span_end(self, span):
            pass

        def shutdown(self):
            pass

        def force_flush(self):
            pass

    openai_agents._sdk.cache_clear()
    agents.set_trace_processors([default_processor(), Mine()])
    try:
        async with scripted_endpoint(say("It is 13")) as endpoint, open_asyncio_bridge():
            with RolloutContext(chat_completions_url=endpoint.url, api_key=KEY):
                agent = make_agent(openai_agents.rollout_model("policy"), ())
                await openai_agents.run_agent(agent, "Hello?")
        assert ended == ["Agent workflow"]
        processors = get_trace_provider()._multi_processor._processors
        assert [type(each) for each in processors] == [Mine]
    finally:
        agents.set_trace_processors([])
