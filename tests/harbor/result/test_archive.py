"""What a trial left goes to the rollout's artifact folder; everything else goes away."""

import errno
import json
import logging
import os
import stat
from pathlib import Path

import pytest
from support import nest

from rollout._files.trees import put_tree, remove_tree, tame_tree
from rollout.artifacts import ArtifactStore
from rollout.backend.harbor.plan import ResolvedTask, TrialPlan
from rollout.backend.harbor.result.settle import archive_trial
from rollout.backend.harbor.workspaces import remove_workspace
from rollout.context import RolloutContext
from rollout.types import ExecutionRequest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs descriptors of folders")


@pytest.fixture
def plan(tmp_path):
    plan = TrialPlan(
        request=ExecutionRequest(id="r", prompt=[{"role": "user", "content": "do it"}]),
        context=RolloutContext(),
        workspace=tmp_path / "work" / "r-1",
        name="r-1",
        task=ResolvedTask(name="task", source={}),
    )
    files = {
        "artifacts/manifest.json": "[]",
        "artifacts/out/a.txt": "a",
        "agent/log.txt": "agent",
        "verifier/reward.txt": "1",
        "result.json": "{}",
        "trial.log": "log",
    }
    for name, text in files.items():
        path = plan.trial_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (plan.workspace / "task").mkdir()
    (plan.workspace / "task" / "task.toml").write_text("")
    return plan


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "kept")


def tree(folder):
    """The files below a folder, but for the manifest of a trial's own, see `test_evidence`."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
        if path.name != "manifest.json" or path.parent.name == "artifacts"
    }


KEPT = {
    "artifacts/manifest.json": "[]",
    "artifacts/out/a.txt": "a",
    "harbor/agent/log.txt": "agent",
    "harbor/verifier/reward.txt": "1",
    "harbor/result.json": "{}",
    "harbor/trial.log": "log",
}


def test_a_trial_moves(plan, store):
    report = archive_trial(plan, store, keep=False)
    assert report == {"folders": ["artifacts", "harbor"]}
    assert tree(store.root / "r") == KEPT
    assert not plan.trial_dir.exists()


def test_a_trial_that_stays_is_copied(plan, store):
    before = tree(plan.trial_dir)
    archive_trial(plan, store, keep=True)
    assert tree(store.root / "r") == KEPT
    assert tree(plan.trial_dir) == before


def test_a_store_that_keeps_nothing(plan):
    assert archive_trial(plan, ArtifactStore(False), keep=False) == {}
    assert plan.trial_dir.exists()


def test_what_an_earlier_rollout_of_that_id_left_is_replaced(plan, store):
    (store.root / "r" / "harbor" / "agent").mkdir(parents=True)
    (store.root / "r" / "harbor" / "exception.txt").write_text("old")
    (store.root / "r" / "artifacts").mkdir()
    (store.root / "r" / "trajectory.json").write_text("stays")
    archive_trial(plan, store, keep=False)
    assert tree(store.root / "r") == {**KEPT, "trajectory.json": "stays"}
    assert sorted(path.name for path in (store.root / "r").iterdir()) == [
        "artifacts",
        "harbor",
        "trajectory.json",
    ]


def test_over_file_systems(plan, store, monkeypatch):
    rename = os.rename

    def elsewhere(source, target, **where):
        if target.endswith(".new"):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target, **where)

    monkeypatch.setattr(os, "rename", elsewhere)
    (plan.trial_dir / "artifacts" / "run").write_text("x")
    (plan.trial_dir / "artifacts" / "run").chmod(0o751)
    (plan.trial_dir / "artifacts" / "link").symlink_to("run")
    assert archive_trial(plan, store, keep=False)["folders"] == ["artifacts", "harbor"]
    assert tree(store.root / "r") == {**KEPT, "artifacts/run": "x"}
    assert stat.S_IMODE((store.root / "r" / "artifacts" / "run").stat().st_mode) == 0o751
    assert (store.root / "r" / "artifacts" / "link").readlink() == Path("run")
    assert not plan.trial_dir.exists()


def test_links_that_would_lead_out_of_their_folder_are_left_out(plan, store):
    (plan.trial_dir / "artifacts" / "in").symlink_to("out/a.txt")
    (plan.trial_dir / "artifacts" / "to-agent").symlink_to("../agent/log.txt")
    report = archive_trial(plan, store, keep=False)
    kept = store.root / "r" / "artifacts"
    assert (kept / "in").is_symlink()
    assert not os.path.lexists(kept / "to-agent")
    assert report["dropped"] == ["to-agent: it is a link that leads out"]


def test_a_link_in_the_place_of_the_rollouts_folder_is_not_followed(plan, store, tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    store.root.mkdir()
    (store.root / "r").symlink_to(tmp_path / "elsewhere")
    report = archive_trial(plan, store, keep=False)
    assert "folders" not in report
    assert "link" in report["problem"]
    assert "cannot be kept" in caplog.text
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_in_the_place_of_a_folder_in_it_is_replaced(plan, store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (store.root / "r").mkdir(parents=True)
    (store.root / "r" / "harbor").symlink_to(tmp_path / "elsewhere")
    archive_trial(plan, store, keep=False)
    assert tree(store.root / "r") == KEPT
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_links_in_the_place_of_the_sources_are_not_followed(plan, store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    remove_tree(plan.trial_dir / "artifacts")
    (plan.trial_dir / "artifacts").symlink_to(tmp_path / "elsewhere")
    assert archive_trial(plan, store, keep=False)["folders"] == ["harbor"]
    assert not os.path.lexists(store.root / "r" / "harbor" / "artifacts")
    assert (tmp_path / "elsewhere" / "secret").read_text() == "x"


def test_a_folder_that_cannot_be_put_there_leaves_what_was(plan, store, monkeypatch):
    (store.root / "r" / "harbor").mkdir(parents=True)
    (store.root / "r" / "harbor" / "old").write_text("old")

    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rollout._files.trees.shutil.copyfileobj", no_room)
    report = archive_trial(plan, store, keep=True)
    assert report["problem"] == "No space left on device"
    assert tree(store.root / "r") == {"harbor/old": "old"}
    assert [path.name for path in (store.root / "r").iterdir()] == ["harbor"]


# --- removing ---------------------------------------------------------------------------------


def test_a_workspace_goes(plan):
    (plan.workspace / "task" / "task.toml").chmod(0o000)
    (plan.workspace / "task").chmod(0o000)
    (plan.workspace / "trials").chmod(0o555)
    assert remove_workspace("r", plan.workspace)
    assert not plan.workspace.exists()
    assert plan.workspace.parent.exists()
    assert remove_workspace("r", plan.workspace)


def test_the_trials_folder_may_stay(plan):
    (plan.workspace / "trials" / "other").mkdir()
    before = tree(plan.trial_dir)
    assert remove_workspace("r", plan.workspace, keep=plan.trial_dir)
    assert tree(plan.workspace) == {f"trials/r-1/{name}": text for name, text in before.items()}
    assert [path.name for path in plan.workspace.iterdir()] == ["trials"]


def test_what_cannot_be_removed_is_logged_once(plan, monkeypatch, caplog):
    def busy(*_, **__):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "unlink", busy)
    with caplog.at_level(logging.WARNING):
        assert not remove_workspace("r", plan.workspace)
    assert len(caplog.records) == 1
    assert "Device or resource busy" in caplog.text


def test_removing_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    (tmp_path / "itself").symlink_to(outside)
    assert remove_tree(folder) == []
    assert remove_tree(tmp_path / "itself") == []
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "file").read_text() == "x"


def test_removing_what_is_nested_deeper_than_any_path_may_be(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    os.close(nest(folder, "some-name", 500))
    assert remove_tree(folder) == []
    assert list(tmp_path.iterdir()) == []


def test_removing_as_another_user_than_root(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    folder = tmp_path / "work" / "folder"
    (folder / "locked" / "in").mkdir(parents=True)
    (folder / "locked" / "in" / "file").write_text("x")
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)
    for path in (folder.parent, *folder.parent.rglob("*")):
        os.chown(path, 65534, 65534)
    (folder / "locked" / "in").chmod(0o000)
    (folder / "locked").chmod(0o500)
    os.seteuid(65534)
    try:
        removed = remove_tree(folder) == []
    finally:
        os.seteuid(0)
    assert removed
    assert not folder.exists()


def test_taming_tells_what_it_removes(tmp_path):
    (tmp_path / "deep" / ("x" * 200)).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    told = []
    assert tame_tree(tmp_path, lambda *what: told.append(what))
    assert told == [("pipe", "it is a special file")]


def test_a_platform_without_descriptors_of_folders(tmp_path):
    from rollout._files.folders import Folder

    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="platform"):
        put_tree(tmp_path / "a", Folder(tmp_path, None), "b", move=True)


def test_a_store_of_nothing_takes_nothing_in(tmp_path):
    with pytest.raises(OSError, match="nothing is kept"):
        ArtifactStore(False).take_in("r", "artifacts", tmp_path, move=True)


def test_ids_that_cannot_be_folders(plan, store):
    store.take_in("CON", "harbor", plan.trial_dir, move=False)
    store.take_in(".hidden", "harbor", plan.trial_dir, move=False)
    names = sorted(path.name for path in store.root.iterdir())
    assert all("~" in name for name in names)
    assert json.loads((store.root / names[0] / "harbor" / "result.json").read_text()) == {}
