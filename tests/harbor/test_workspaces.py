"""The folders of trials: claimed while they are in use, swept after a crash, few of them kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rollout._files import claims
from rollout._files.claims import MARK, Claim, abandoned, sweep_claimed
from rollout.backend.harbor.workspaces import (
    NAMES,
    make_workspace,
    prune_kept,
    remove_workspace,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs locks and descriptors")

DIES = """
import os, pathlib, sys
from rollout.backend.harbor.workspaces import make_workspace
workspace = make_workspace(pathlib.Path(sys.argv[1]), sys.argv[2])
(workspace / "trials" / sys.argv[2]).mkdir(parents=True)
(workspace / "payload").write_text("sk-secret")
os.kill(os.getpid(), 9)
"""


def swept(root):
    return [folder.name for folder in sweep_claimed(root, NAMES)]


def name(number):
    return f"rollout-{number:010x}"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "trials"


def kept(root, number, *, age=0):
    """A folder of a trial that failed, as it stays."""
    workspace = make_workspace(root, name(number))
    trial = workspace / "trials" / name(number)
    trial.mkdir(parents=True)
    (trial / "result.json").write_text("{}")
    (workspace / "task").mkdir()
    assert remove_workspace("r", workspace, keep=trial)
    os.utime(workspace, (1e9 - age, 1e9 - age))
    return workspace


def left_by_a_killed_server(root, number):
    done = subprocess.run([sys.executable, "-c", DIES, root, name(number)], check=False)
    assert done.returncode == -9
    assert (root / name(number) / "payload").is_file()


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_what_a_killed_server_left_goes_at_the_next_start(root, caplog):
    left_by_a_killed_server(root, 1)
    assert swept(root) == [name(1)]
    assert names(root) == []
    assert name(1) in caplog.text


def test_what_is_in_use_stays(root):
    workspace = make_workspace(root, name(1))
    assert workspace.stat().st_mode & 0o777 == 0o700
    assert swept(root) == []
    assert prune_kept(root, 1) == []
    assert names(root) == [name(1)]
    assert remove_workspace("r", workspace)
    assert names(root) == []


def test_what_is_kept_stays_and_has_no_mark(root):
    workspace = kept(root, 1)
    assert names(workspace) == ["trials"]
    assert swept(root) == []
    assert names(root) == [name(1)]


def test_what_could_not_be_removed_goes_at_the_next_start(root, monkeypatch):
    workspace = make_workspace(root, name(1))
    trial = workspace / "trials" / name(1)
    trial.mkdir(parents=True)
    (workspace / "task").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("rollout.backend.harbor.workspaces.remove_tree", lambda path: ["busy"])
        assert not remove_workspace("r", workspace, keep=trial)
    assert (workspace / MARK).is_file()
    assert swept(root) == [name(1)]


def test_a_folder_of_somebody_else_is_none_of_ours(root):
    for each in ("notes", "rollout-2026", f"{name(1)}.bak"):
        (root / each / "trials").mkdir(parents=True)
        Claim(root / each).release()
    (root / name(2) / "trials" / name(2)).mkdir(parents=True)
    (root / name(2) / "mine").write_text("x")
    (root / name(3)).symlink_to(root / "notes")
    before = names(root)
    assert swept(root) == []
    assert prune_kept(root, 1) == []
    assert names(root) == before


def test_the_oldest_that_were_kept_go_first(root):
    for number, age in enumerate((30, 10, 40, 20)):
        kept(root, number, age=age)
    running = make_workspace(root, name(9))
    os.utime(running, (0, 0))
    assert sorted(prune_kept(root, 2)) == [name(0), name(2)]
    assert names(root) == [name(1), name(3), name(9)]
    assert prune_kept(root, None) == []
    assert remove_workspace("r", running)


@pytest.mark.parametrize("mark", ["link", "foreign", "none"])
def test_a_mark_that_is_none_of_ours_is_none(root, mark, monkeypatch):
    folder = root / name(1)
    folder.mkdir(parents=True)
    if mark == "link":
        (root / "lock").write_text("")
        (folder / MARK).symlink_to(root / "lock")
    elif mark == "foreign":
        Claim(folder).release()
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with abandoned(folder) as is_abandoned:
        assert not is_abandoned
    assert swept(root) == []


def test_without_locks_nothing_is_taken_for_abandoned(root, monkeypatch):
    monkeypatch.setattr(claims, "fcntl", None)
    workspace = make_workspace(root, name(1))
    assert swept(root) == []
    assert remove_workspace("r", workspace)


def test_a_folder_that_cannot_be_claimed_is_not_made(root, monkeypatch):
    (root / name(2)).mkdir(parents=True)
    with pytest.raises(FileExistsError):
        make_workspace(root, name(2))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollout.backend.harbor.workspaces.Claim", full)
    with pytest.raises(OSError, match="No space left"):
        make_workspace(root, name(1))
    assert names(root) == [name(2)]


def test_the_folders_of_killed_processes_go(tmp_path):
    dead, alive, kept_one = (tmp_path / f"rollout-sandbox-{each}" for each in ("a", "b", "c"))
    for folder in (dead, alive, kept_one):
        (folder / "root").mkdir(parents=True)
    Claim(dead).release()
    claim = Claim(alive)
    (tmp_path / "rollout-sandbox-link").symlink_to(dead)
    assert sweep_claimed(tmp_path, "rollout-sandbox-.*") == [dead]
    assert sorted(path.name[-1] for path in tmp_path.iterdir() if path.is_dir()) == ["b", "c"]
    claim.release()
