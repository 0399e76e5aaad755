"""An unmodified command-line agent in a sandbox: mini-swe-agent behind a model gateway.

Install it beside this library, start the server, and run one rollout::

    pip install "trio-rollout[harbor]" mini-swe-agent
    rollout serve examples/harbor/command_line_agent.py:app
    rollout run http://127.0.0.1:8000 --chat-url http://127.0.0.1:9000/v1 \
        --message "Write 42 into /app/answer.txt." --label 42

The agent knows nothing of this library. It gets the gateway's address and a token for its rollout,
and what it says through them is the sample and the trajectory; the endpoint's key stays in the
server. Its sandbox needs no network, since it is shown the Python that the agent is installed for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rollout.backend.harbor import HarborBackend, python_paths
from rollout.gateway import ModelGateway
from rollout.server import create_rollout_server

backend = HarborBackend(
    agent="mini-swe-agent",
    agent_options={"skip_install": True},
    model=os.environ.get("ROLLOUT_MODEL", "policy"),
    tasks_dir=Path(__file__).parent / "task",
    environment={
        "type": "namespace",
        "kwargs": {"read_only_paths": python_paths()},
        "env": {
            "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no list of prices is fetched
        },
    },
)
app = create_rollout_server(
    backend=backend,
    gateway=ModelGateway(),
    api_key=os.environ.get("ROLLOUT_SERVER_API_KEY"),
)
