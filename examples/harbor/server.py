"""Rollouts in sandboxes: each is a trial of the Harbor task in `task/`.

Start it with::

    rollout serve examples/harbor/server.py:app

and run one rollout, against a model that speaks the OpenAI protocol::

    rollout run http://127.0.0.1:8000 --chat-url http://127.0.0.1:9000/v1 \
        --message "Compute 6 * 7." --label 42

The task is a template: the rollout's message becomes its instruction, and its tests compare
`/app/answer.txt` with the rollout's label. `SANDBOX_AGENT=oracle` runs the task's own solution
instead of a model, which shows that everything is in place. `SANDBOX=docker` uses Docker.
"""

from __future__ import annotations

import os
from pathlib import Path

from shell_agent import ShellConfig, UseShell

from rollout import ConcurrencyConfig
from rollout.backend.harbor import HarborBackend, python_paths
from rollout.server import create_rollout_server

NAMESPACE = {"namespace": {"read_only_paths": python_paths()}}
"""Linux namespaces of this machine, in which the Python of this server can be seen."""

sandbox = os.environ.get("SANDBOX", "namespace")
agent = os.environ.get("SANDBOX_AGENT", "workflow")

backend = HarborBackend(
    agent=UseShell if agent == "workflow" else agent,
    agent_config=ShellConfig(
        name="shell",
        model=os.environ.get("ROLLOUT_MODEL", "policy"),
        concurrency=ConcurrencyConfig(max_concurrent=4),
    ),
    model=os.environ.get("ROLLOUT_MODEL", "policy"),  # for an agent of Harbor's own
    tasks_dir=Path(__file__).parent / "task",
    environment=NAMESPACE if sandbox == "namespace" else sandbox,
    max_queue_depth=100,
)
app = create_rollout_server(
    backend=backend,
    # Serves only if the task's environment can be started.
    lifespan=backend.prewarm_lifespan("healthcheck"),
    api_key=os.environ.get("ROLLOUT_SERVER_API_KEY"),
)
