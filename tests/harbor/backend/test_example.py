"""The example of a server with sandboxes, served and asked as its own text says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio
from server_process import server_process
from trial_support import KEY, Chat, files_with

pytestmark = pytest.mark.harbor

SERVER = Path(__file__).parents[3] / "examples/harbor/server.py"
REPLIES = (
    "Let me see.\n```bash\necho $((6 * 7)) > /app/answer.txt; cat /app/answer.txt; exit 3\n```\n",
    "It is 42.",
)


def options(tmp_path, **more):
    return {
        "ROLLOUT_ARTIFACT_ROOT": str(tmp_path / "kept"),
        "KEY_OF_THE_POLICY": KEY,
        "PYTHONPATH": "",
        **more,
    }


async def test_the_agent_with_a_shell(tmp_path):
    with Chat(*REPLIES) as chat:
        async with server_process(SERVER, tmp_path, **options(tmp_path)) as (_, rollouts):
            result = await rollouts.run(
                initial_messages=[{"role": "user", "content": "Compute 6 * 7."}],
                chat_completions_url=chat.url,
                label="42",
            )
    assert result.err_message is None
    assert result.sample.reward == 1.0
    roles = [message["role"] for message in result.sample.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    asked = result.sample.messages[1]["content"]
    assert asked == "Compute 6 * 7."
    assert result.sample.messages[3]["content"] == "42\n\n(exit code 3)"
    assert [key for key, _ in chat.asked] == [f"Bearer {KEY}"] * 2
    assert files_with(tmp_path, KEY) == []


async def test_its_oracle_by_the_command_line(tmp_path):
    environ = options(tmp_path, SANDBOX_AGENT="oracle")
    async with server_process(SERVER, tmp_path, **environ) as (_, rollouts):
        done = await trio.run_process(
            [
                *(sys.executable, "-m", "rollout.cli", "run", rollouts.url),
                *("--chat-url", "http://127.0.0.1:9000/v1"),
                *("--message", "Compute 6 * 7.", "--label", "42"),
            ],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, done.stdout.decode()
    assert "1.0" in done.stdout.decode()
