"""A rollout server: an agent whose commands run in a sandbox, and a grader that checks in another.

Sandboxes are Linux namespaces: no Docker, no image. ``rollout doctor`` says whether they work here.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import trio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    Grader,
    GraderContext,
    LocalBackend,
)
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.integrations.chat import chat, share_connections
from rollout.sandbox import CommandResult, Sandbox
from rollout.server import RolloutServer, create_rollout_server

COMMANDS = re.compile(r"```(?:ba)?sh\n(.*?)```", re.DOTALL)
COMMAND_SEC = 30


class Shell(Protocol):
    """Runs commands; a test gives another one."""

    async def __call__(self, script: str, **env: str) -> CommandResult: ...


@asynccontextmanager
async def open_shell() -> AsyncGenerator[Shell, None]:
    """Start a sandbox without a network, and yield what runs commands in it."""
    sandbox = Sandbox(network=False)
    async with open_asyncio_bridge() as bridge:

        async def run(script: str, **env: str) -> CommandResult:
            argv = ["bash", "-c", script]
            return await bridge.run(partial(sandbox.run, argv, env=env, timeout_sec=COMMAND_SEC))

        await bridge.run(sandbox.start)
        try:
            yield run
        finally:
            with trio.CancelScope(shield=True):
                await bridge.run(sandbox.stop)


class ShellConfig(AgentWorkflowConfig):
    """What can be set about the agent."""

    model: str = "policy"
    max_turns: int = 16


class UseShell(AgentWorkflow[ShellConfig]):
    """Runs the shell blocks of the model's replies, until a reply has none."""

    async def run(self, ctx: AgentWorkflowContext[ShellConfig]) -> list[dict[str, Any]]:
        """Return the conversation."""
        assert ctx.config is not None
        messages = list(ctx.prompt)
        async with open_shell() as shell:
            for _ in range(ctx.config.max_turns):
                reply = await chat(messages, model=ctx.config.model)
                messages.append(reply.message)
                scripts = COMMANDS.findall(reply.text)
                if not scripts:
                    return messages
                for script in scripts:
                    done = await shell(script)
                    said = f"exit code {done.return_code}\n{done.stdout}{done.stderr}"
                    messages.append({"role": "user", "content": said})
        raise RuntimeError(f"no answer after {ctx.config.max_turns} turns")


class Check(Grader):
    """Runs the check of the row's metadata, with the last number of the answer as ``$ANSWER``."""

    async def grade(self, ctx: GraderContext) -> None:
        """Set the reward to 1 if the check succeeds, else to 0."""
        assert ctx.sample is not None
        assert ctx.metadata is not None
        numbers = re.findall(r"-?\d+", str(ctx.sample.messages[-1]["content"]))
        async with open_shell() as shell:
            done = await shell(ctx.metadata["check"], ANSWER=numbers[-1] if numbers else "")
        ctx.set_reward(1.0 if done.return_code == 0 else 0.0)


def create_app() -> RolloutServer:
    """Make the application; a test makes its own."""
    return create_rollout_server(
        backend=LocalBackend(
            workflow=UseShell,
            workflow_config=ShellConfig(
                name="sandbox", model=os.environ.get("ROLLOUT_MODEL", "policy")
            ),
            grader=Check,
        ),
        lifespan=share_connections,
    )


app = create_app()
