"""What a reader of the pages has made by then."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from documentation.blocks import defined_by, find
from support import Compare, Script


@pytest.fixture
def readers_own_modules(monkeypatch):
    """What a reader has by then: a package, the file of the first steps, a key."""
    agent = ModuleType("my_package.agent")
    agent.Solve, agent.Exact = Script, Compare
    server = ModuleType("my_server")
    defined = defined_by(find("docs/first-steps.md", "class Solve"))
    vars(server).update({**defined, "__name__": "my_server"})
    for module in (ModuleType("my_package"), agent, server):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("ROLLOUT_SERVER_API_KEY", "a-key-of-the-server")
    monkeypatch.setenv("ROLLOUT_WORKER_API_KEY", "a-key-of-the-workers")
    monkeypatch.setenv("ROLLOUT_WORKERS", "http://node1:8000\nhttp://node2:8000")
