"""What the tests of `HarborBackend` share."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
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

    def __init__(self, url, client, backend):
        self.url = url
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

    async def post(self, rollout_id="r", **request):
        """Ask for the admission of a rollout once."""
        async with httpx.AsyncClient(base_url=self.url) as http:
            return await http.post("/rollout", json=self._request(rollout_id, request))


def assert_kept_only(trials):
    """A workspace that stays holds the trial's folder, and nothing else."""
    for workspace in trials.iterdir() if trials.exists() else ():
        assert [path.name for path in workspace.iterdir()] == ["trials"]


def children():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found |= set((task / "children").read_text().split())
    return found


def mounts(root):
    """The mounts below a folder, or of one in it; others come and go on a machine."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(root) in line]


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


class Chat:
    """A chat endpoint that answers with the given texts in order, the last one for ever.

    Attributes:
        url: Its base URL.
        asked: The requests, as `(authorization, body)`.
    """

    def __init__(self, *texts):
        self.asked = []
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                chat.asked.append((self.headers["authorization"], body))
                text = texts[min(len(chat.asked), len(texts)) - 1]
                answer = json.dumps(_completion(body["model"], text)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _completion(model, text):
    message = {"role": "assistant", "content": text}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def terminus(*keystrokes, complete=False):
    """A reply of a model to `terminus-2`."""
    commands = [{"keystrokes": f"{keys}\n", "duration": 0.3} for keys in keystrokes]
    return json.dumps(
        {"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete}
    )
