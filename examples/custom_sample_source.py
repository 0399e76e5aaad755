"""An agent that keeps its history in a form of its own, and a sample source that converts it.

Start it with::

    rollout serve examples/custom_sample_source.py:app

The workflow registers the source before it starts, so that the backend finds the sample there.
"""

from __future__ import annotations

import os

import trio
from attrs import define, field

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    LocalBackend,
    RolloutSample,
    SampleSource,
    get_rollout_context,
)
from rollout.integrations.chat import chat, share_connections
from rollout.server import create_rollout_server


@define
class Entry:
    """One line of the agent's log."""

    speaker: str
    text: str
    at_sec: float


@define
class Transcript(SampleSource):
    """The log of one agent: what the agent writes, and what the backend reads.

    Attributes:
        entries: What was said so far.
        started: When it began, on trio's clock.
    """

    entries: list[Entry] = field(factory=list)
    started: float = field(factory=trio.current_time)

    def write(self, speaker: str, text: str) -> None:
        """Add a line."""
        self.entries.append(Entry(speaker, text, trio.current_time() - self.started))

    def history(self) -> list[dict[str, str]]:
        """Return the log as chat messages."""
        roles = {"human": "user", "agent": "assistant"}
        return [{"role": roles[entry.speaker], "content": entry.text} for entry in self.entries]

    async def get_sample(self) -> RolloutSample:
        """Return the sample as it stands."""
        await trio.lowlevel.checkpoint()
        seconds = [round(entry.at_sec, 3) for entry in self.entries]
        return RolloutSample(
            messages=self.history(),
            metrics={"turns": sum(entry.speaker == "agent" for entry in self.entries)},
            extra_fields={"said_after_sec": seconds},
        )


class ThinkTwice(AgentWorkflow[AgentWorkflowConfig]):
    """Answers, then is asked to look again."""

    async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> None:
        """Return nothing: the sample comes from the registered source."""
        rollout = get_rollout_context()
        assert rollout is not None, "a server runs each workflow inside a rollout"
        transcript = Transcript()
        rollout.set_sample_source(transcript)
        for text in (ctx.prompt[-1]["content"], "Look again: are you sure?"):
            transcript.write("human", text)
            # Not recorded: a rollout has one sample source, and that is the transcript.
            reply = await chat(
                transcript.history(),
                model=os.environ.get("ROLLOUT_MODEL", "policy"),
                record=False,
            )
            transcript.write("agent", reply.text)


app = create_rollout_server(backend=LocalBackend(workflow=ThinkTwice), lifespan=share_connections)
