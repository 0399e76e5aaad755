"""``rollout clean``: old rollouts go, everything else stays."""

from __future__ import annotations

import os
import time

import pytest

DAY = 86_400


@pytest.fixture
def root(tmp_path):
    """A folder with rollouts of several ages, and with what is none."""
    root = tmp_path / "rollouts"
    now = time.time()
    for name, days, files in (
        ("old", 8, ["diagnostics.json", "trajectory.json", "artifacts/deep/file"]),
        ("cut\nshort", 9, ["artifacts/file"]),
        ("young", 6, ["diagnostics.json"]),
        ("written-to", 1, ["artifacts/deep/file", "diagnostics.json"]),
        ("mine", 99, ["artifacts/file", "notes.txt"]),
    ):
        for file in files:
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 600_000)
        for path in (root / name, *(root / name).rglob("*")):
            recent = name != "written-to" or path.name == "file"
            age = days if recent else 99
            os.utime(path, (now - age * DAY,) * 2)
    (root / "link").symlink_to(root / "old")
    return root


def kept(root):
    return sorted(path.name for path in root.iterdir())


EVERYTHING = ["cut\nshort", "link", "mine", "old", "written-to", "young"]


def test_a_dry_run_names_what_would_go(cli, root):
    result = cli("clean", str(root), "--older-than", "7d", "--dry-run")
    assert result.stdout.splitlines() == [
        f"{root}/cut short",
        f"{root}/old",
        f"would remove 2 rollout(s), 2.4 MB, below {root}",
    ]
    assert kept(root) == EVERYTHING


def test_old_rollouts_go_from_where_they_are_kept(cli, root):
    result = cli("clean", "--older-than", "1w", ROLLOUT_ARTIFACT_ROOT=str(root))
    assert result.stdout == f"removed 2 rollout(s), 2.4 MB, below {root}\n"
    assert kept(root) == ["link", "mine", "written-to", "young"]


def test_a_folder_without_rollouts_keeps_what_looks_like_one(cli, tmp_path):
    project = tmp_path / "projects/mine/artifacts"
    project.mkdir(parents=True)
    os.utime(project.parent, (0, 0))
    os.utime(project, (0, 0))
    result = cli("clean", str(tmp_path / "projects"), "--older-than", "7d")
    assert result.stdout.startswith("removed 0 rollout(s)")
    assert project.exists()


def test_nothing_there(cli, tmp_path):
    result = cli("clean", str(tmp_path / "missing"), "--older-than", "12h")
    assert result.stdout == f"removed 0 rollout(s), 0.0 MB, below {tmp_path / 'missing'}\n"


@pytest.mark.parametrize("age", ["7", "d", "-1d", "1y", "1e3d", ""])
def test_ages_that_are_none(cli, root, age):
    assert "--older-than" in cli.fails(2, "clean", str(root), "--older-than", age)
    assert kept(root) == EVERYTHING


def test_without_a_folder_it_asks_for_one(cli):
    line = cli.fails(2, "clean", "--older-than", "7d", ROLLOUT_ARTIFACT_ROOT="")
    assert "name the FOLDER" in line
