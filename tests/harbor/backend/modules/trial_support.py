"""What the tests of `HarborBackend` share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import trio

KEY = "sk-distinctive/4711+of=the-rollout"
NAMESPACE = "rollout.backend.harbor.namespace:NamespaceEnvironment"
TESTS = """\
#!/bin/bash
mkdir -p /logs/verifier
[ "$(cat /app/answer.txt 2>/dev/null)" = "${ROLLOUT_LABEL:-42}" ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""


class Signal:
    """A pipe that a sandbox says something through: `mount` it, `say` it, await `heard`."""

    inside = "/signal/pipe"

    def __init__(self, path):
        os.mkfifo(path)
        self.path = path
        self.say = f"echo here > {self.inside}"

    @property
    def mount(self):
        return {"type": "bind", "source": str(self.path), "target": self.inside}

    async def heard(self):
        with trio.fail_after(120):
            said = await trio.to_thread.run_sync(self.path.read_text, abandon_on_cancel=True)
        assert said.strip() == "here"


class Rollouts:
    """Sends rollouts to one server."""

    def __init__(self, client, backend):
        self.client = client
        self.backend = backend

    def _request(self, rollout_id, request):
        return {
            "initial_messages": [{"role": "user", "content": "What is 6 * 7?"}],
            "chat_completions_url": "http://127.0.0.1:9/v1",
            "llm_api_key": KEY,
            "rollout_id": rollout_id,
        } | request

    async def run(self, rollout_id="r", **request):
        return await self.client.run_rollout(**self._request(rollout_id, request))

    async def start(self, rollout_id="r", **request):
        return await self.client.run_rollout_async(**self._request(rollout_id, request))


def assert_kept_only(trials):
    """A workspace that stays holds the trial's folder, and nothing else."""
    for workspace in trials.iterdir() if trials.exists() else ():
        assert [path.name for path in workspace.iterdir()] == ["trials"]


def children():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


def mounts():
    return Path("/proc/self/mountinfo").read_text()


def bridges():
    return {thread.ident for thread in threading.enumerate() if thread.name == "harbor"}


def files_with(root, text):
    """Which files below a folder hold a text, in their names or within."""
    data = text.encode()
    return [
        str(path)
        for path in root.rglob("*")
        if text in path.name
        or (path.is_symlink() and text in str(path.readlink()))
        or (not path.is_symlink() and path.is_file() and data in path.read_bytes())
    ]
