"""A stand-in for an OpenSandbox server, and for the daemon in each of its sandboxes.

It speaks as much of both protocols as the SDK needs: sandboxes and endpoints under ``/v1``;
folders, files and a stream of events for each command from the daemon. Commands really run, on
this machine, in a temporary folder that plays the sandbox's root: the absolute paths that Harbor
uses are written anew in each command. A daemon is reached directly at a path of its own, or
through ``/v1/sandboxes/<id>/proxy/<port>`` with the API key.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlsplit

ROOTS = "logs|tests|solution|app"
DAEMON_PORT = 44772


def now():
    return datetime.now(UTC).isoformat()


class Sandbox:
    def __init__(self, name, folder, request):
        self.id = name
        self.root = folder
        self.request = request
        self.metadata = request.get("metadata", {})
        self.killed = False
        self.commands = []
        (folder / "app").mkdir(parents=True)

    def info(self):
        return {
            "id": self.id,
            "status": {"state": "Running"},
            "createdAt": now(),
            "entrypoint": self.request.get("entrypoint") or ["sleep"],
            "metadata": self.metadata,
        }

    def inside(self, path):
        place = Path(os.path.normpath(self.root / path.lstrip("/")))
        assert place.is_relative_to(self.root), path
        return place

    def mapped(self, text):
        return re.sub(rf"(?<![\w./~-])/({ROOTS})\b", rf"{self.root}/\1", text)

    def run(self, request):
        """Run a command; return what it said and its exit code, -1 if it took too long."""
        command = request["command"]
        self.commands.append(command)
        folder = self.inside(request.get("cwd") or "/app")
        folder.mkdir(parents=True, exist_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(self.root)}
        env |= {name: self.mapped(value) for name, value in (request.get("envs") or {}).items()}
        process = subprocess.Popen(
            ["bash", "-c", self.mapped(command)],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        timeout = request.get("timeout")
        try:
            out, err = process.communicate(timeout=timeout and timeout / 1000)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return out, err, -1
        return out, err, process.returncode


class Lifecycle:
    """The server; use it as ``with running(folder) as server``.

    Attributes:
        domain: Where it listens, without a scheme.
        api_key: What a request to the server must bring along.
        sandboxes: Those that were made, also killed ones, by id.
        seen: Each request, as (method, path, headers).
        refusals: Answers to the next requests for a sandbox, as (status, body); used up.
        hold: An event that the creation of sandboxes waits for, after the sandbox is there.
    """

    def __init__(self, folder, api_key):
        self.folder = folder
        self.api_key = api_key
        self.sandboxes = {}
        self.seen = []
        self.refusals = []
        self.hold = None
        self.domain = ""
        self.lock = threading.Lock()

    def create(self, request):
        with self.lock:
            name = f"sandbox-{len(self.sandboxes) + 1}"
            sandbox = Sandbox(name, self.folder / name, request)
            self.sandboxes[name] = sandbox
        if self.hold is not None:
            assert self.hold.wait(60)
        return sandbox

    def find(self, metadata):
        wanted = metadata.items()
        return [each for each in self.sandboxes.values() if wanted <= each.metadata.items()]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Answers are small, and a delay of each would add up.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, status, value=None, data=None):
        data = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data) if status != 204 else 0))
        self.end_headers()
        if status != 204:
            self.wfile.write(data)

    def handle_one(self):
        server = self.server.lifecycle
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        server.seen.append((self.command, url.path, dict(self.headers)))
        data = self.body()
        direct = re.fullmatch(r"/daemon/([^/]+)(/.*)", url.path)
        if direct is not None:
            # The key belongs to the server; a sandbox must never see it.
            assert self.headers.get("OPEN-SANDBOX-API-KEY") is None
            return self.daemon(server.sandboxes[direct[1]], direct[2], data)
        if self.headers.get("OPEN-SANDBOX-API-KEY") != server.api_key:
            refusal = {"code": "INVALID_API_KEY", "message": "the key is not known here"}
            return self.answer(401, refusal)
        proxied = re.fullmatch(rf"/v1/sandboxes/([^/]+)/proxy/{DAEMON_PORT}(/.*)", url.path)
        if proxied is not None:
            assert self.headers.get("Transfer-Encoding") is None
            return self.daemon(server.sandboxes[proxied[1]], proxied[2], data)
        return self.lifecycle(server, url.path.removeprefix("/v1"), data)

    do_GET = do_POST = do_DELETE = handle_one  # noqa: N815 - as the base class calls them

    def lifecycle(self, server, path, data):
        parts = path.strip("/").split("/")
        if self.command == "POST" and parts == ["sandboxes"]:
            if server.refusals:
                status, body = server.refusals.pop(0)
                return self.answer(status, data=body)
            sandbox = server.create(json.loads(data))
            return self.answer(202, sandbox.info())
        if self.command == "GET" and parts == ["sandboxes"]:
            wanted = dict(parse_qsl(self.query.get("metadata", [""])[0]))
            items = [each.info() for each in server.find(wanted) if not each.killed]
            page = {"page": 1, "pageSize": 20, "totalItems": len(items), "totalPages": 1}
            return self.answer(200, {"items": items, "pagination": page | {"hasNextPage": False}})
        sandbox = server.sandboxes.get(parts[1])
        if sandbox is None or sandbox.killed:
            return self.answer(404, {"code": "SANDBOX_NOT_FOUND", "message": "no such sandbox"})
        if parts[2:3] == ["endpoints"]:
            through = self.query.get("use_server_proxy", ["false"])[0].lower() == "true"
            where = (
                f"/v1/sandboxes/{sandbox.id}/proxy/{parts[3]}"
                if through
                else f"/daemon/{sandbox.id}"
            )
            return self.answer(200, {"endpoint": f"{server.domain}{where}"})
        if self.command == "DELETE":
            sandbox.killed = True
            shutil.rmtree(sandbox.root)
            return self.answer(204)
        return self.answer(200, sandbox.info())

    def daemon(self, sandbox, path, data):
        if path == "/ping":
            return self.answer(200, data=b"")
        if path == "/directories":
            for name, wanted in json.loads(data).items():
                folder = sandbox.inside(name)
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(int(str(wanted.get("mode") or 755), 8))
            return self.answer(200, data=b"")
        if path == "/files/upload":
            self.upload(sandbox, data)
            return self.answer(200, data=b"")
        if path == "/files/download":
            file = sandbox.inside(self.query["path"][0])
            if not file.is_file():
                return self.answer(404, {"code": "FILE_NOT_FOUND", "message": "no such file"})
            return self.answer(200, data=file.read_bytes())
        if path == "/files/search":
            top = sandbox.inside(self.query["path"][0])
            return self.answer(200, [self.entry(sandbox, each) for each in sorted(top.rglob("*"))])
        assert path == "/command", path
        return self.stream(*sandbox.run(json.loads(data)))

    def entry(self, sandbox, path):
        kind = "directory" if path.is_dir() else "file"
        times = {"created_at": now(), "modified_at": now()}
        name = f"/{path.relative_to(sandbox.root)}"
        who = {"owner": "root", "group": "root", "mode": 755}
        return {"path": name, "size": path.lstat().st_size, "type": kind} | times | who

    def upload(self, sandbox, data):
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
        parts = data.split(b"--" + boundary)[1:-1]
        for about, content in zip(parts[::2], parts[1::2], strict=True):
            wanted = json.loads(about.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n"))
            file = sandbox.inside(wanted["path"])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n"))
            file.chmod(int(str(wanted.get("mode") or 644), 8))

    def stream(self, out, err, code):
        events = [{"type": "init", "text": "command-1"}]
        events += [
            {"type": name, "text": text.decode("utf-8", "replace")}
            for name, text in (("stdout", out), ("stderr", err))
            if text
        ]
        if code:
            error = {"ename": "CommandExecError", "evalue": str(code), "traceback": []}
            events.append({"type": "error", "error": error})
        else:
            events.append({"type": "execution_complete", "execution_time": 1})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event | {"timestamp": 1}).encode() + b"\n\n")
        self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = False
    # What a handler raises fails the test that made it.
    errors: list

    def handle_error(self, request, client_address):
        import sys

        error = sys.exc_info()[1]
        # A client that no longer waits for its answer is no fault of the server.
        if not isinstance(error, ConnectionError):
            self.errors.append(error)


@contextmanager
def running(folder, api_key="operator-key-1"):
    """Run a server; its sandboxes are below *folder*."""
    server = Server(("127.0.0.1", 0), Handler)
    server.errors = []
    server.lifecycle = lifecycle = Lifecycle(Path(os.path.realpath(folder)), api_key)
    lifecycle.domain = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield lifecycle
    finally:
        if lifecycle.hold is not None:
            lifecycle.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
        assert server.errors == []
