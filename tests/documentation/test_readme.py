"""README works as it stands there, in its order, against what it tells the reader to start."""

from __future__ import annotations

import re
import shlex
from contextlib import AsyncExitStack
from importlib.util import find_spec
from uuid import uuid4

import pytest
from documentation.blocks import README, ROOT, defined_by, find
from documentation.serving import (
    CHAT_URL_IN_TEXT,
    SERVER_URL_IN_TEXT,
    placed,
    rollout_command,
    rollout_serve,
    run_python,
)

from rollout import RolloutInitRequest
from rollout.client import RolloutClient
from rollout.types import RolloutStatus

QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]


def command(start: str, server_url: str, chat_url: str) -> list[str]:
    """The words of README's command that begins with *start*, with the addresses of this test."""
    line = re.search(rf"^\$ ({start}.*)$", (ROOT / README).read_text("utf-8"), re.MULTILINE)
    placed_line = line[1].replace(SERVER_URL_IN_TEXT, server_url)
    return shlex.split(placed_line.replace(CHAT_URL_IN_TEXT, chat_url))


async def test_readme_from_its_server_to_its_harness(tmp_path, capsys):
    file = tmp_path / "my_server.py"
    file.write_text(find(README, "class Solve").code, "utf-8")
    async with AsyncExitStack() as started:
        chat_url = await started.enter_async_context(rollout_command("demo", "--serve-chat"))
        url = await started.enter_async_context(rollout_serve(file))

        words = command("rollout run", url, chat_url)
        printed = await run_python("-m", "rollout.cli", *words[1:])
        assert re.search(r"^reward +1.0$", printed, re.MULTILINE)

        printed = await run_python("-c", placed(find(README, "trio.run(main)"), url, chat_url))
        assert printed == "success 1.0\n"

        client = await started.enter_async_context(RolloutClient(url=url))
        track_rollout = defined_by(find(README, "async def track_rollout"))["track_rollout"]
        result = await track_rollout(client, chat_url)
        assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
        phases = capsys.readouterr().out.split()
        assert phases == sorted(phases, key=list(RolloutStatus).index)
        assert phases[-1] in {"grading", "success"}

        mean_reward = defined_by(find(README, "async def mean_reward"))["mean_reward"]
        requests = [
            RolloutInitRequest(
                rollout_id=str(uuid4()),
                initial_messages=QUESTION,
                chat_completions_url=chat_url,
                label=label,
            )
            for label in ("42", "41")
        ]
        assert await mean_reward(client, requests) == 0.5

        example = command("rollout serve examples/", url, chat_url)[2]
        url = await started.enter_async_context(rollout_serve(ROOT / example.partition(":")[0]))
        words = command("python examples/run_client.py", url, chat_url)
        *answers, summary = (await run_python(str(ROOT / words[1]), *words[2:])).splitlines()
        assert len(answers) == 6
        assert all(re.search(r"reward [01]\.0$", answer) for answer in answers)
        assert summary.endswith("over 6 rollouts")


@pytest.mark.skipif(find_spec("openai") is None, reason="the block takes the OpenAI SDK, an extra")
async def test_the_agent_that_is_there_already(tmp_path):
    file = tmp_path / "my_server.py"
    serves = (
        "from rollout import LocalBackend\n"
        "from rollout.server import create_rollout_server\n"
        "app = create_rollout_server(backend=LocalBackend(workflow=Ask))\n"
    )
    file.write_text(find(README, "class Ask").code + serves, "utf-8")
    async with (
        rollout_command("demo", "--serve-chat") as chat_url,
        rollout_serve(file) as url,
        RolloutClient(url=url) as client,
    ):
        result = await client.run_rollout(QUESTION, chat_url, "a", grade=False)
    assert result.sample.messages[-1]["content"] == "6 * 7 = 42"
