"""Where the processor time of one of our processes goes: samples of its stack, by layer.

A timer of processor time interrupts the process every few milliseconds. The innermost frame on the
stack that belongs to a layer says whose time it was; what the standard library and generated
methods do counts for their caller. Each sample weighs as much as the main thread has worked since
the one before, so that the time of other threads stays out of it and is a layer of its own.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from comparison.job import Job
from comparison.pairs import Launcher, Pair

_SEC = 0.001

THREADS = "worker threads"
_OTHER = "other"

_LAYERS = (
    # The first that fits a part of the file's path.
    ("/comparison/", "workflow, grader and callers of the benchmark"),
    ("/rollout/server/connections", "connections"),
    ("/rollout/server/asgi", "requests and routes"),
    ("/rollout/server/app", "requests and routes"),
    ("/rollout/server/feed", "result feed"),
    ("/rollout/client/feed", "result feed"),
    ("/rollout/server/results", "results"),
    ("/rollout/server/", "admission and registry"),
    ("/rollout/rules/", "admission and registry"),
    ("/rollout/artifacts", "files and trajectory"),
    ("/rollout/trajectory/", "files and trajectory"),
    ("/rollout/_files/", "files and trajectory"),
    ("/rollout/backend/saving", "files and trajectory"),
    ("/rollout/backend/", "executions"),
    ("/rollout/workflow", "executions"),
    ("/rollout/grader", "executions"),
    ("/rollout/context", "executions"),
    ("/rollout/codec", "JSON and types"),
    ("/rollout/_json/", "JSON and types"),
    ("/rollout/types/", "JSON and types"),
    ("/cattrs/", "JSON and types"),
    ("/rollout/client/", "client"),
    ("/rollout/", "the rest of rollout"),
    ("/h11/", "h11"),
    ("/httpx/", "httpx and httpcore"),
    ("/httpcore/", "httpx and httpcore"),
    ("/anyio/", "httpx and httpcore"),
    ("/quart", "Quart and Werkzeug"),
    ("/werkzeug/", "Quart and Werkzeug"),
    ("/trio/_socket", "sockets"),
    ("/trio/_highlevel_socket", "sockets"),
    ("/trio/_core/_io_epoll", "sockets"),
    ("/trio/_core/_io_kqueue", "sockets"),
    ("/trio/", "trio: tasks and cancel scopes"),
    ("/outcome/", "trio: tasks and cancel scopes"),
)


@contextmanager
def sampled(path: Path) -> Generator[None, None, None]:
    """Sample the block, in the main thread; write seconds by layer as JSON at its end."""
    weights: Counter[str] = Counter()
    begun = time.process_time(), time.thread_time()
    last = begun[1]

    def sample(_: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.thread_time()
        weights[_layer_of(frame)] += now - last
        last = now

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, _SEC, _SEC)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        worked = time.process_time() - begun[0], time.thread_time() - begun[1]
        weights[THREADS] = max(0.0, worked[0] - worked[1])
        path.write_text(json.dumps(weights))


_known: dict[str, str | None] = {}


def _layer_of(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _known:
            _known[name] = next((layer for part, layer in _LAYERS if part in name), None)
        layer = _known[name]
        if layer is not None:
            return layer
        frame = frame.f_back
    return _OTHER


async def by_layer(launcher: Launcher, pair: Pair, who: str, job: Job) -> dict[str, float]:
    """Run a job; return the processor time of our server or our client by layer.

    In seconds for each rollout. The samples say in which proportion the measured time is split.

    Raises:
        ChildError: A process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.json"
        options = ("--layers", str(path))
        report = await launcher.run_once(pair, who, options, job)
        weights: dict[str, float] = json.loads(path.read_text())
    each = report[f"{who}_cpu_sec"] / report["finished"]
    total = sum(weights.values())
    return {layer: each * weight / total for layer, weight in weights.items()}
