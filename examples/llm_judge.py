"""A grader that asks a language model for its verdict, and takes nothing else for one.

Start it with::

    JUDGE_URL=http://127.0.0.1:9001/v1 rollout serve examples/llm_judge.py:app

The judge is an OpenAI-compatible endpoint of its own, so that the policy does not grade itself;
``JUDGE_API_KEY`` and ``JUDGE_MODEL`` say how to ask it.
"""

from __future__ import annotations

import json
import os
from typing import Literal

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    ConcurrencyConfig,
    Grader,
    GraderConfig,
    GraderContext,
    LocalBackend,
    RolloutContext,
)
from rollout.integrations.chat import chat, share_connections
from rollout.server import create_rollout_server

INSTRUCTION = """You compare an answer with a reference. Reply with one JSON object alone:
{"verdict": "correct" or "incorrect", "reason": "one sentence"}"""


class Ask(AgentWorkflow[AgentWorkflowConfig]):
    """Asks the policy once."""

    async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> None:
        """Return nothing: the sample is the conversation that `chat` has recorded."""
        await chat(ctx.prompt, model=os.environ.get("ROLLOUT_MODEL", "policy"))


class JudgeConfig(GraderConfig):
    """Where the judge is."""

    url: str
    model: str = "judge"


class Judge(Grader):
    """Rewards what the judge finds correct; a judge that gives no verdict is a failure."""

    async def grade(self, ctx: GraderContext) -> None:
        """Set the reward, and keep the reason with the sample.

        Raises:
            ValueError: The judge's reply is no verdict. The rollout fails with it: a reward
                that nobody gave would teach the policy something.
        """
        config = self.config
        assert isinstance(config, JudgeConfig)
        assert ctx.sample is not None
        case = {"reference": ctx.label, "answer": ctx.sample.messages[-1]["content"]}
        messages = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": json.dumps(case)},
        ]
        # Within this block the "policy" is the judge. Its call is no part of the sample.
        with RolloutContext(
            chat_completions_url=config.url, api_key=os.environ.get("JUDGE_API_KEY")
        ):
            reply = await chat(messages, model=config.model, record=False, temperature=0)
        verdict, reason = parse_verdict(reply.text)
        ctx.sample.extra_fields["judge_reason"] = reason
        ctx.set_reward(1.0 if verdict == "correct" else 0.0)


def parse_verdict(text: str) -> tuple[Literal["correct", "incorrect"], str]:
    """Read the judge's reply.

    Raises:
        ValueError: It is anything but a verdict.
    """
    try:
        reply = json.loads(text)
    except ValueError:
        raise ValueError(f"the judge's reply is no JSON: {text[:200]!r}") from None
    match reply:
        case {"verdict": "correct" | "incorrect" as verdict, "reason": str() as reason}:
            return verdict, reason
    raise ValueError(f"the judge's reply is no verdict: {text[:200]!r}")


app = create_rollout_server(
    backend=LocalBackend(
        workflow=Ask,
        grader=Judge,
        grader_config=JudgeConfig(
            name="judge",
            url=os.environ.get("JUDGE_URL", "http://127.0.0.1:9001/v1"),
            model=os.environ.get("JUDGE_MODEL", "judge"),
            concurrency=ConcurrencyConfig(max_concurrent=8),
        ),
    ),
    lifespan=share_connections,
)
