"""An agent with a shell. It is packed into the sandbox and runs there."""

from __future__ import annotations

import re
import subprocess

import trio

from rollout import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext
from rollout.integrations.chat import chat

# A workflow is handed the rollout's messages; the task's instruction is for Harbor's own agents.
SYSTEM = (
    "You work in a Linux shell. Reply with one command in a block that begins with ```bash, "
    "and you are shown what it prints. Write the answer to the user's question, and nothing "
    "else, to /app/answer.txt. Reply without a block once you are done."
)
COMMAND = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LONGEST_OUTPUT = 10_000


class ShellConfig(AgentWorkflowConfig):
    """What can be set about the agent."""

    model: str = "policy"
    max_turns: int = 20
    command_timeout_sec: float = 60.0


class UseShell(AgentWorkflow[ShellConfig]):
    """Asks the model for a command, runs it, shows the output, and so on."""

    async def run(self, ctx: AgentWorkflowContext[ShellConfig]) -> None:
        """Return nothing: the sample is the conversation that `chat` has recorded."""
        assert ctx.config is not None
        messages = [{"role": "system", "content": SYSTEM}, *ctx.prompt]
        for _ in range(ctx.config.max_turns):
            reply = await chat(messages, model=ctx.config.model)
            found = COMMAND.search(reply.text)
            if found is None:
                return
            output = await run_command(found[1], ctx.config.command_timeout_sec)
            messages += [reply.message, {"role": "user", "content": output}]
        raise RuntimeError(f"not done after {ctx.config.max_turns} turns")


async def run_command(command: str, timeout_sec: float) -> str:
    """Run a command with bash in the current folder; return what it printed, and how it ended."""
    with trio.move_on_after(timeout_sec):
        done = await trio.run_process(
            ["bash", "-c", command],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        text = done.stdout.decode(errors="replace")[-LONGEST_OUTPUT:]
        return f"{text}\n(exit code {done.returncode})"
    return f"(killed after {timeout_sec:g} s)"
