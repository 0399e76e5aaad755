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
from quart import request
from quart_trio import QuartTrio

from rollout.demo.arithmetic import ScriptedModel, last_number

SERVER_URL_IN_TEXT = "http://127.0.0.1:8000"
CHAT_URL_IN_TEXT = "http://127.0.0.1:9000/v1"


def chat_app(keys: list[str]) -> QuartTrio:
    """An OpenAI-compatible endpoint that does sums; it notes the keys that it is shown."""
    app = QuartTrio("chat")
    model = ScriptedModel(error_rate=0)

    @app.post("/v1/chat/completions")
    async def complete() -> dict[str, Any]:
        keys.append(request.headers.get("Authorization", ""))
        body = await request.get_json()
        answer = last_number(model.answer(body["messages"][-1]["content"]))
        return {"choices": [{"message": {"role": "assistant", "content": answer}}]}

    return app


@asynccontextmanager
async def chat_endpoint(app: QuartTrio) -> AsyncGenerator[str, None]:
    """Serve a chat endpoint on a free port for the length of the block; yields its URL."""
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
    command = [sys.executable, "-m", "rollout.cli", "serve", f"{file}:app", "--bind=127.0.0.1:0"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(trio.run_process, command, stdout=subprocess.PIPE, env={**os.environ, **env})
        )
        line = b""
        while not line.endswith(b"\n"):
            received = await process.stdout.receive_some()
            assert received, "rollout serve ended early"
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
