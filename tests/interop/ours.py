"""This package on the same JSON options as `interop.official`.

``python -m interop.ours serve OPTIONS`` prints its URL and serves until a signal. When the
shutdown starts it opens the gate ``shutdown``, and no other.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import trio
from interop.script import LEASE_SEC, WAIT_SEC, Gates, answer, compare

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    ExecutionBackend,
    Grader,
    LocalBackend,
)
from rollout.server import RolloutServer, create_rollout_server, serve
from rollout.server.shutdown import ShutdownBudget


def new_gates() -> Gates:
    """Make gates for this side."""
    return Gates(trio.Event, partial(trio.CancelScope, shield=True))


def build_backend(options: dict[str, Any], gates: Gates) -> LocalBackend:
    """Make the backend of a server out of JSON options."""

    class Scripted(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            return await answer(ctx, gates)

    class Comparing(Grader):
        async def grade(self, ctx: Any) -> None:
            await compare(ctx, gates)

    return LocalBackend(
        workflow=Scripted,
        workflow_config=AgentWorkflowConfig(
            name="scripted",
            concurrency=ConcurrencyConfig(max_concurrent=options.get("max_concurrent", 4)),
        ),
        grader=Comparing if options.get("grader", True) else None,
        max_queue_depth=options.get("max_queue_depth"),
    )


def build_app(
    options: dict[str, Any], gates: Gates, backend: ExecutionBackend | None = None
) -> RolloutServer:
    """Make a server application out of JSON options, around another backend if there is one."""
    times = {"result_wait_timeout_sec": WAIT_SEC, "polling_lease_timeout_sec": LEASE_SEC}
    return create_rollout_server(
        backend=backend or build_backend(options, gates),
        configure_logging=False,
        **{**times, **options.get("server", {})},
    )


async def main(options: dict[str, Any]) -> None:
    """Serve one server until a signal."""
    gates = new_gates()
    app = build_app(options, gates)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(
            partial(
                serve,
                app,
                bind=f"127.0.0.1:{options.get('port', 0)}",
                shutdown=ShutdownBudget(**options.get("shutdown", {})),
            )
        )
        sys.stdout.write(urls[0] + "\n")
        sys.stdout.flush()
        await app.shutdown_requested.wait()
        gates.release("shutdown")


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[2]))
