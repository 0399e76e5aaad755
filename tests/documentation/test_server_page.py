"""The page on the server does what it says."""

from __future__ import annotations

import tomllib
from typing import Any

import trio
from documentation.blocks import (
    SERVER,
    defined_by,
    find,
)
from hypercorn.config import Config
from support import (
    CHAT_URL,
    in_process,
    make_app,
    prompt,
)

from rollout import AgentWorkflow, LocalBackend
from rollout.server import ShutdownBudget, create_rollout_server
from rollout.server.app import (
    DEFAULT_RESULT_WAIT_TIMEOUT_SEC,
)


async def test_a_lifespan_sets_context_variables_for_every_rollout(autojump_clock):
    page = defined_by(find(SERVER, "async def lifespan"))

    class UsesTheClient(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return [{"closed": page["http_client"].get().is_closed}]

    app = create_rollout_server(
        backend=LocalBackend(workflow=UsesTheClient),
        lifespan=page["lifespan"],
        configure_logging=False,
    )
    async with in_process(app) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "a", grade=False)
    assert result.sample.messages == [{"closed": False}]


async def test_the_server_page_serves_for_a_moment():
    serve_for_a_moment = defined_by(find(SERVER, "async def serve_for_a_moment"))[
        "serve_for_a_moment"
    ]
    health = await serve_for_a_moment(make_app())
    assert health["lifecycle"] == {"accepting_rollouts": True, "active_rollouts": 0}


def test_the_settings_for_another_server_leave_time_for_the_stages():
    settings = tomllib.loads(find(SERVER, "shutdown_timeout", "toml").code)
    assert settings["graceful_timeout"] > DEFAULT_RESULT_WAIT_TIMEOUT_SEC
    assert settings["shutdown_timeout"] > ShutdownBudget().total_sec
    assert hasattr(Config(), "graceful_timeout")
    assert hasattr(Config(), "shutdown_timeout")
