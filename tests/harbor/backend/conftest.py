"""Rollout servers with a `HarborBackend`, whose trials run in namespaces."""

from __future__ import annotations

import sys
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import trio
from support import make_app, served

from rollout import AgentWorkflowConfig, ConcurrencyConfig
from rollout.client import RolloutClient

HERE = Path(__file__).parent
if str(HERE / "modules") not in sys.path:
    sys.path.insert(0, str(HERE / "modules"))

from trial_support import (  # noqa: E402 - background_tasks this file
    KEY,
    NAMESPACE,
    TESTS,
    Rollouts,
    Signal,
    assert_kept_only,
    bridges,
    children,
    files_with,
    mounts,
)


def pytest_collection_modifyitems(items):
    """Dependencies of Harbor warn of themselves."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:Items? .* on TypedDict:UserWarning"))


@pytest.fixture
def make_task(tmp_path):
    """Makes Harbor tasks below one folder; `tests=None` makes one without."""

    def make(
        name="answer",
        *,
        solution="echo 42 > /app/answer.txt",
        tests=TESTS,
        agent_sec=120.0,
        verifier_sec=120.0,
        environment="",
        instruction="{{ prompt }}\n",
    ):
        folder = make.folder / name
        for part in ("environment", "solution", *(["tests"] if tests else [])):
            (folder / part).mkdir(parents=True)
        (folder / "task.toml").write_text(
            f'version = "1.0"\n[verifier]\ntimeout_sec = {verifier_sec}\n'
            f"[agent]\ntimeout_sec = {agent_sec}\n[environment]\n{environment}"
        )
        (folder / "instruction.md").write_text(instruction)
        (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
        if tests:
            (folder / "tests" / "test.sh").write_text(tests)
        return folder

    make.folder = tmp_path / "tasks"
    return make


@pytest.fixture
def version():
    """The version of Harbor."""
    return tuple(int(part) for part in metadata.version("harbor").split(".")[:2])


@pytest.fixture
def pipe(tmp_path):
    return Signal(tmp_path / "signal")


@pytest.fixture
def make_backend(make_task, tmp_path):
    """Makes backends: `make_backend(max_concurrent=1, kind="...", mounts=[...], **options)`."""
    from rollout.backend.harbor import HarborBackend

    def make(*, max_concurrent=4, kind=NAMESPACE, mounts=None, **options):
        settings = {
            "agent": "oracle",
            "agent_config": AgentWorkflowConfig(
                name="tested", concurrency=ConcurrencyConfig(max_concurrent=max_concurrent)
            ),
            "tasks_dir": make_task.folder / "answer",
            "environment": {"import_path": kind, "mounts": mounts, "shares_host_network": True},
            "artifact_root": tmp_path / "kept",
            "trials_dir": tmp_path / "trials",
            "cancel_grace_sec": 20.0,
        }
        return HarborBackend(**(settings | options))

    return make


@pytest.fixture
def serving():
    """Serves a backend on loopback: ``async with serving(backend) as rollouts``."""

    @asynccontextmanager
    async def serve(backend, **options):
        app = make_app(backend, **options)
        async with served(app) as url, RolloutClient(url=url) as client:
            yield Rollouts(url, client, backend)

    return serve


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No process, no mount, no thread, and no folder but those that were kept on purpose."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = children(), bridges()
    yield
    assert children() <= before[0]
    assert mounts(tmp_path) == []
    assert bridges() <= before[1]
    assert [path for path in folder.iterdir() if path.name.startswith("rollout-sandbox")] == []
    assert_kept_only(tmp_path / "trials")


@pytest.fixture
def no_key_is_left(tmp_path):
    yield
    assert files_with(tmp_path, KEY) == []


@pytest.fixture
def reached(monkeypatch):
    """An event that an environment of the test sets where it goes wrong."""
    import trial_variants

    event = trio.Event()

    def arrange(backend):
        monkeypatch.setattr(
            trial_variants, "reached", partial(backend.bridge.call_trio_soon, event.set)
        )
        return event

    return arrange
