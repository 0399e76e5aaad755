"""Repositories of tasks on this machine, and Harbor's caches in a folder of the test."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

if shutil.which("git") is None:
    collect_ignore = ["test_bridge.py", "test_fetch.py"]


@pytest.fixture(autouse=True)
def caches(request, monkeypatch, tmp_path):
    """Keep what is downloaded out of the home of whoever runs the tests."""
    if request.node.get_closest_marker("harbor") is None:
        return None
    import tempfile

    import harbor.models.task.id as ids

    folder = tmp_path / "cache"
    monkeypatch.setattr(ids, "TASK_CACHE_DIR", folder / "tasks")
    monkeypatch.setattr(ids, "PACKAGE_CACHE_DIR", folder / "packages")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return folder


@pytest.fixture
def git(monkeypatch, tmp_path):
    """Run git, away from anybody's configuration."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "t")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "t@example.com")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def run(folder, *args):
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    return run


@pytest.fixture
def repository(tmp_path, git):
    """A repository with a task, served as a partial clone asks for it."""
    folder = tmp_path / "repository"
    task = folder / "tasks" / "add"
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "task.toml").write_text('[environment]\nnetwork_mode = "no-network"\n')
    (task / "instruction.md").write_text("First.")
    (task / "tests" / "test.sh").write_text("#!/bin/bash\n")
    (task / "tests" / "test.sh").chmod(0o755)
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    git(folder, "config", "uploadpack.allowFilter", "true")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder
