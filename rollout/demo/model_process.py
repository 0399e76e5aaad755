"""The process in which a real model serves its OpenAI-compatible endpoint.

Run as a script, by its path: it needs the standard library and `xllamacpp` alone, so it starts
quickly. Settings come as one JSON object on the first line of stdin (a key among the arguments
would show in process lists). Once the endpoint listens, one line on stdout says where. The
process ends with its stdin, and so with whoever holds that open, however that one ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Any

__all__ = ["main"]

_STDOUT, _STDERR = 1, 2
_QUIET = 1
"""Log level of the library: warnings and errors, to stderr."""


def main() -> None:
    """Serve until stdin ends."""
    # Ctrl-C in a terminal reaches the whole group of processes; who started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with os.fdopen(os.dup(_STDOUT), "w") as announcement:
        # Nobody reads stdout after the announcement, so what the library prints goes elsewhere.
        os.dup2(_STDERR, _STDOUT)
        _check_address(settings["host"], settings["port"])
        server = _serve(settings)
        announcement.write(f"listening on {server.listening_address}\n")
    threading.Event().wait()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)  # there is nothing to tidy up, and a generation would hold up an ordinary exit


def _check_address(host: str, port: int) -> None:
    """End with the reason where nothing can listen; the library itself gives none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        sys.exit(f"cannot listen on {host}:{port}: {error.strerror or error}")


def _serve(settings: dict[str, Any]) -> Any:
    xllamacpp = importlib.import_module("xllamacpp")  # an extra, needed by this process alone
    params = xllamacpp.CommonParams()
    params.model.path = settings["weights"]
    params.model_alias = {settings["name"]}
    params.hostnames = [settings["host"]]
    params.port = settings["port"]
    params.api_keys = [settings["api_key"]] if settings["api_key"] else []
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["slots"] * settings["tokens_per_slot"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # sleep, others need the processors
    params.cache_ram_mib = 0  # by default it keeps prompts that it has seen, up to gigabytes
    params.warmup = False
    params.verbosity = _QUIET
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
