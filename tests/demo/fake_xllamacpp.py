"""Stands in for the library of the real model: the same face, scripted answers.

``FAKE_MODEL`` in the environment says what it does: ``answer``, ``stall``, ``die``, ``starting``
(it never gets ready) or ``broken`` (it does not start). ``FAKE_MODEL_PID`` names a file for its id.
"""

import http.server
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

MODE = os.environ.get("FAKE_MODEL", "answer")


class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(
            model=SimpleNamespace(path=""),
            cpuparams=SimpleNamespace(),
            cpuparams_batch=SimpleNamespace(),
        )


class Server:
    def __init__(self, params):
        sys.stdout.write("llama: " + "chatter " * 20_000 + "\n")  # more than a pipe holds
        sys.stdout.flush()
        if pid := os.environ.get("FAKE_MODEL_PID"):
            Path(pid).write_text(str(os.getpid()))
        if MODE == "broken":
            sys.stderr.write("llama: cannot read the weights\n")
            raise RuntimeError(f"failed to load {params.model.path}")
        handler = type("Handler", (Handler,), {"params": params})
        self._server = http.server.ThreadingHTTPServer((params.hostnames[0], params.port), handler)
        self.listening_address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked_for_health = 0

    def log_message(self, *args):
        pass

    def do_GET(self):
        type(self).asked_for_health += 1
        if MODE == "starting" or type(self).asked_for_health == 1:
            self.reply(503, {"error": {"message": "loading"}})
        else:
            self.reply(200, {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {self.params.api_keys[0]}":
            self.reply(401, {"error": {"message": "wrong key"}})
            return
        if MODE == "die":
            sys.stderr.write("llama: out of memory\n")
            sys.stderr.flush()
            os._exit(11)
        if MODE == "stall":
            self.rfile.read(1)
            return
        # Right for an even seed, text that was cut off for one that 5 divides, else wrong.
        left, right = map(int, re.findall(r"\d+", body["messages"][-1]["content"]))
        seed = body["seed"]
        number = left + right + seed % 2
        text = json.dumps({"tool": "answer", "number": number})
        if seed % 5 == 0:
            text = text[:-2]
        assert body["response_format"]["type"] == "json_schema"
        assert body["model"] in self.params.model_alias
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 50, "completion_tokens": 13, "total_tokens": 63}
        self.reply(200, {"choices": [{"index": 0, "message": message}], "usage": usage})

    def reply(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
