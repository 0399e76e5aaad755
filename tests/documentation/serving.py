"""Servers, endpoints and programs that the pages talk of."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hypercorn.trio
import trio
from documentation.blocks import (
    Block,
)
from hypercorn.config import Config

from rollout.demo.arithmetic import ScriptedModel
from rollout.demo.chat import create_chat_app

SERVER_URL_IN_TEXT = "http://127.0.0.1:8000"
CHAT_URL_IN_TEXT = "http://127.0.0.1:9000/v1"


@asynccontextmanager
async def chat_endpoint(api_key: str | None = None, **model: Any) -> AsyncGenerator[str, None]:
    """The demo's chat endpoint, which makes no mistakes, on a free port; yields its URL."""
    app = create_chat_app(ScriptedModel(**{"error_rate": 0, "think_sec": 0, **model}), api_key)
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(
            partial(hypercorn.trio.serve, app, config, shutdown_trigger=trio.sleep_forever)
        )
        yield f"{urls[0]}/v1"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def rollout_serve(file: Path, **env: str) -> AsyncGenerator[str, None]:
    """``rollout serve`` on a free port, until the end of the block, and then SIGTERM."""
    async with rollout_command("serve", f"{file}:app", **env) as url:
        yield url


@asynccontextmanager
async def rollout_command(*arguments: str, **env: str) -> AsyncGenerator[str, None]:
    """A command that serves, on a free port; yields the URL that it prints."""
    command = [sys.executable, "-m", "rollout.cli", *arguments, "--bind=127.0.0.1:0"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(trio.run_process, command, stdout=subprocess.PIPE, env={**os.environ, **env})
        )
        line = b""
        while not line.endswith(b"\n"):
            received = await process.stdout.receive_some()
            assert received, f"rollout {arguments[0]} ended early"
            line += received
        try:
            yield re.search(r"http://\S+", line.decode())[0]
        finally:
            process.send_signal(signal.SIGTERM)
    # run_process has raised if the exit code was not 0.


async def run_python(*arguments: str, **env: str) -> str:
    """What a Python program prints; it must succeed and be silent otherwise."""
    done = await trio.run_process(
        [sys.executable, "-W", "error", *arguments],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        env={**os.environ, **env},
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    return done.stdout.decode()


def placed(block: Block, server_url: str, chat_url: str) -> str:
    """The code of a client example, with the addresses of this test in it."""
    for written in (SERVER_URL_IN_TEXT, CHAT_URL_IN_TEXT):
        assert written in block.code
    return block.code.replace(SERVER_URL_IN_TEXT, server_url).replace(CHAT_URL_IN_TEXT, chat_url)
