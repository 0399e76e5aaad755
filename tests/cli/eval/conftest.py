"""Fixtures: a server with several slots, small datasets, and runs that have ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from cli.eval.files import Files
from cli.harness import Cli, serving

APPS = """
import os
import socket

from rollout import AgentWorkflow
from support import local_backend, make_app


class Dies(AgentWorkflow):
    async def run(self, ctx):
        if "row 2" in ctx.prompt[0]["content"]:
            os._exit(7)
        return ctx.prompt


class Blocking(AgentWorkflow):
    async def run(self, ctx):
        with socket.create_connection(("127.0.0.1", int(os.environ["EVAL_TEST_PORT"]))) as test:
            test.recv(1)  # until the test is over


app = make_app(local_backend(max_concurrent=8))
dies = make_app(local_backend(Dies))
blocking = make_app(local_backend(Blocking), watchdog_sec=None)
"""


@pytest.fixture(scope="session")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the test applications."""
    path = tmp_path_factory.mktemp("eval-apps") / "eval_apps.py"
    path.write_text(APPS)
    return path


@pytest.fixture(scope="session")
def server(apps: Path) -> Iterator[str]:
    """The URL of a server."""
    with serving(apps.parent, f"{apps}:app", "--bind", "127.0.0.1:0") as (_, url):
        yield url


class _Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def chat() -> Iterator[str]:
    """The URL of a model that is there."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Model) as serving_model:
        thread = Thread(target=serving_model.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{serving_model.server_port}/v1"
        serving_model.shutdown()
        thread.join()


@pytest.fixture
def files(tmp_path: Path, server: str, chat: str) -> Files:
    return Files(tmp_path, server, chat)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a command whose output is a terminal, which it is from now on."""
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    for name in ("NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory, server: str, chat: str) -> Path:
    """The folder of a run of five rows, n = 2: two pass, two do not, and one fails."""
    files = Files(tmp_path_factory.mktemp("ended"), server, chat)
    rows = [{}, {"answer": "41"}, {"raise": "\x1b[31mboom"}, {}, {"answer": "41"}]
    done = Cli()("eval", "run", str(files.config(files.rows(*rows), n=2)))
    assert done.exit_code == 0, done.output
    return files.output


@pytest.fixture
def finished(ended: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(ended, tmp_path / "finished")


@pytest.fixture
def unfinished(ended: Path, tmp_path: Path) -> Path:
    """The same run, killed after six of its ten attempts."""
    folder = shutil.copytree(ended, tmp_path / "unfinished")
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 11
    (folder / "events.jsonl").write_bytes(b"".join(lines[:7]))
    for name in ("metrics.json", "index.jsonl", "report.html"):
        (folder / name).unlink()
    return folder
