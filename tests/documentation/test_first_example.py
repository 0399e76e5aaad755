"""The example server and the example client work together."""

from __future__ import annotations

import sys
from typing import Any

import trio
from documentation.blocks import (
    ROOT,
)
from documentation.serving import (
    chat_endpoint,
    rollout_serve,
    run_python,
)
from support import (
    CHAT_URL,
    local_backend,
    make_app,
    served,
)

from rollout import AgentWorkflow


async def test_the_examples_work_together():
    examples = ROOT / "examples"
    keys = {"ROLLOUT_SERVER_API_KEY": "a-key-of-the-server", "ROLLOUT_LLM_API_KEY": "a-key"}
    async with (
        chat_endpoint(keys["ROLLOUT_LLM_API_KEY"]) as chat_url,
        rollout_serve(examples / "arithmetic_server.py", **keys) as url,
    ):
        printed = await run_python(str(examples / "run_client.py"), url, chat_url, **keys)
    *rewards, summary = printed.splitlines()
    assert [line.split("?")[1].strip() for line in rewards] == ["reward 1.0"] * 6
    assert summary == "mean reward 1.00 over 6 rollouts"


async def test_the_example_client_says_what_went_wrong():
    class Fails(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            await trio.lowlevel.checkpoint()
            raise RuntimeError("boom")

    client = str(ROOT / "examples/run_client.py")
    async with served(make_app(local_backend(Fails))) as url:
        done = await trio.run_process(
            [sys.executable, client, url, CHAT_URL], capture_stdout=True, check=False
        )
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert [line.split("?")[1].strip() for line in lines] == ["failure: boom (agent_error)"] * 6
