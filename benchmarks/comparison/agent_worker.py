"""The application of a pool's workers, whose agents are those of ``model_calls.py``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import model_calls

root = tempfile.TemporaryDirectory(prefix="rollout-bench-", dir=model_calls.IN_MEMORY)
app = model_calls.serve_agents(
    model_calls.local_backend(model_calls.Agent, model_calls.Async, root.name)
)
