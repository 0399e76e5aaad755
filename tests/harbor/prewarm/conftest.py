"""Tasks to prewarm, and a backend that runs them in namespaces."""

from __future__ import annotations

import pytest


@pytest.fixture
def tasks(tmp_path):
    """Makes tasks below one folder: `tasks(name, healthcheck=..., compose=...)`."""
    folder = tmp_path / "tasks"

    def make(name, *, healthcheck=None, compose=False):
        task = folder / name
        for part in ("environment", "tests"):
            (task / part).mkdir(parents=True)
        health = (
            ""
            if healthcheck is None
            else f'[environment.healthcheck]\ncommand = "{healthcheck}"\ninterval_sec = 0.05\n'
            "timeout_sec = 20.0\nstart_period_sec = 0.0\nstart_interval_sec = 0.05\nretries = 1\n"
        )
        (task / "task.toml").write_text(f'version = "1.0"\n[environment]\n{health}')
        (task / "instruction.md").write_text("Do nothing.\n")
        (task / "environment" / "marker").write_text(name)
        (task / "tests" / "test.sh").write_text("#!/bin/bash\nexit 1\n")
        if compose:
            (task / "environment" / "docker-compose.yaml").write_text("services: {}\n")
        return task

    make.folder = folder
    return make


@pytest.fixture
def backend(tasks, tmp_path):
    """Makes a backend over the tasks."""
    from rollout.backend.harbor.backend import HarborBackend

    def make(**options):
        settings = {
            "agent": "oracle",
            "tasks_dir": tasks.folder,
            "task_mode": "dataset",
            "environment": "namespace",
            "artifact_root": tmp_path / "kept",
            "trials_dir": tmp_path / "trials",
        }
        return HarborBackend(**(settings | options))

    return make
