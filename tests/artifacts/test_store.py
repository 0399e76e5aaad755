"""The store: folders below one root, and nothing that it meets fails a rollout."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import trio
import trio.testing
from support import local_backend

from rollout import artifacts
from rollout._files import folders as folder_module
from rollout.artifacts import ArtifactStore
from rollout.errors import BackendConfigurationError


@pytest.fixture(params=["descriptors", "paths"])
def root(request, tmp_path, monkeypatch):
    if request.param == "paths":
        monkeypatch.setattr(folder_module, "_DESCRIPTORS", False)
    elif not folder_module._DESCRIPTORS:
        pytest.skip("this platform has no descriptors of folders")
    return tmp_path / "root"


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="rollout")
    return lambda: [record.getMessage() for record in caplog.records]


# --- where it is ------------------------------------------------------------------------------


def test_roots(tmp_path, monkeypatch):
    assert ArtifactStore().root is None  # the test run sets the variable to nothing
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path))
    assert ArtifactStore().root == tmp_path
    assert ArtifactStore(False).root is None
    assert ArtifactStore(tmp_path / "x").root == tmp_path / "x"
    monkeypatch.delenv("ROLLOUT_ARTIFACT_ROOT")
    default = ArtifactStore().root
    assert default.is_absolute()
    assert default.parts[-2:] == ("trio-rollout", "rollouts")


@pytest.mark.skipif(os.name != "posix", reason="home folders are found otherwise")
def test_without_a_home_folder_there_is_one_warning(monkeypatch, warnings):
    for name in ("ROLLOUT_ARTIFACT_ROOT", "HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError, for any uid
    assert local_backend().artifacts.root is None
    assert len(warnings()) == 1
    assert "no home folder; name a folder with ROLLOUT_ARTIFACT_ROOT" in warnings()[0]


def test_a_relative_root_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ArtifactStore("kept")
    monkeypatch.chdir("/")
    assert store.root == tmp_path / "kept"
    assert ArtifactStore("~/kept").root == Path.home() / "kept"


@pytest.mark.parametrize("root", [True, 7, "", "  ", b"x", object()])
def test_roots_that_cannot_be(root):
    with pytest.raises(BackendConfigurationError, match="artifact_root"):
        ArtifactStore(root)


# --- folders ----------------------------------------------------------------------------------


def test_makes_the_folder_and_leaves_nothing_in_it(root):
    store = ArtifactStore(root)
    folder = store.artifacts_dir("r1")
    assert folder == root / "r1" / "artifacts"
    assert list(folder.iterdir()) == []
    (folder / "kept").write_text("x")
    assert store.artifacts_dir("r1") == folder
    assert (folder / "kept").read_text() == "x"
    assert sorted(path.name for path in root.iterdir()) == ["r1"]


def test_every_id_stays_below_the_root(root):
    store = ArtifactStore(root)
    for rollout_id in ("...", ".hidden", "x" * 5000, "con", "a\nb", "é", "-", "~"):
        folder = store.artifacts_dir(rollout_id)
        assert folder.parent.parent == root
        assert folder.resolve().parent.parent == root.resolve()
    assert len(list(root.iterdir())) == 8


async def test_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ArtifactStore(False)
    assert not store.keeps
    assert store.artifacts_dir("r1") is None
    await store.save("r1", lambda: pytest.fail("nobody asks for it"))
    assert list(tmp_path.iterdir()) == []


def put_link(path, elsewhere):
    path.symlink_to(elsewhere, target_is_directory=True)


def put_dangling_link(path, elsewhere):
    path.symlink_to(elsewhere / "nowhere")


def put_file(path, elsewhere):
    path.write_text("file")


def put_fifo(path, elsewhere):
    os.mkfifo(path)


strange = pytest.mark.parametrize("put", [put_link, put_dangling_link, put_file, put_fifo])


@strange
async def test_a_link_or_a_special_file_is_not_taken_for_a_rollouts_folder(
    root, tmp_path, put, warnings
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root.mkdir()
    store = ArtifactStore(root)
    for rollout_id in ("r1", "r2"):
        put(root / rollout_id, elsewhere)
        assert store.artifacts_dir(rollout_id) is None
        await store.save(rollout_id, lambda: {"trajectory.json": b"{}"})
    assert list(elsewhere.iterdir()) == []
    assert len(warnings()) == 1
    assert "a link or a file" in warnings()[0]
    assert store.artifacts_dir("r3") == root / "r3" / "artifacts"


@strange
def test_a_link_or_a_special_file_is_not_taken_for_an_artifacts_folder(
    root, tmp_path, put, warnings
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / "r1").mkdir(parents=True)
    put(root / "r1" / "artifacts", elsewhere)
    assert ArtifactStore(root).artifacts_dir("r1") is None
    assert list(elsewhere.iterdir()) == []
    assert len(warnings()) == 1


def test_the_root_itself_may_be_a_link(root, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    root.symlink_to(disk)
    assert ArtifactStore(root).artifacts_dir("r1") == root / "r1" / "artifacts"
    assert (disk / "r1" / "artifacts").is_dir()


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_a_root_that_cannot_be_made(root, below, warnings):
    root.write_text("a file")
    store = ArtifactStore(root / below)
    for rollout_id in ("r1", "r2", "r3"):
        assert store.artifacts_dir(rollout_id) is None
    assert len(warnings()) == 1
    assert str(root) in warnings()[0]


def test_a_root_with_a_name_that_no_file_has(warnings):
    assert ArtifactStore("/tmp/\0").artifacts_dir("r1") is None
    assert len(warnings()) == 1


def test_storage_that_takes_no_file(root, monkeypatch, warnings):
    store = ArtifactStore(root)
    assert store.artifacts_dir("r0") is not None
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_):
        raise full

    monkeypatch.setattr(folder_module.os, "write", refuse)
    assert store.artifacts_dir("r1") is None
    assert store.artifacts_dir("r2") is None
    full = OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert store.artifacts_dir("r3") is None
    assert [line.rpartition(": ")[2].partition(" (")[0] for line in warnings()] == [
        "No space left on device",
        "Read-only file system",
    ]


def test_the_users_own_folder_is_private(root, monkeypatch):
    monkeypatch.delenv("ROLLOUT_ARTIFACT_ROOT")
    monkeypatch.setattr(artifacts.platformdirs, "user_data_path", lambda *_, **__: root)
    store = ArtifactStore()
    assert store.artifacts_dir("r1") == root / "rollouts" / "r1" / "artifacts"
    if os.name == "posix":
        assert (root / "rollouts").stat().st_mode & 0o077 == 0


# --- saving -----------------------------------------------------------------------------------


async def test_saves_files_as_a_whole(root):
    store = ArtifactStore(root)
    await store.save("r1", lambda: {"a.json": b"1", "b.json": b"2"})
    await store.save("r1", lambda: {"a.json": b"3", "b.json": None, "c.json": None})
    assert {path.name: path.read_bytes() for path in (root / "r1").iterdir()} == {"a.json": b"3"}


async def test_a_link_in_the_place_of_a_file_is_replaced(root, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (root / "r1").mkdir(parents=True)
    (root / "r1" / "a.json").symlink_to(victim)
    await ArtifactStore(root).save("r1", lambda: {"a.json": b"1"})
    assert victim.read_text() == "mine"
    assert (root / "r1" / "a.json").read_bytes() == b"1"
    assert not (root / "r1" / "a.json").is_symlink()


async def test_one_file_that_cannot_be_written_does_not_keep_others_away(root, warnings):
    (root / "r1" / "a.json").mkdir(parents=True)
    store = ArtifactStore(root)
    await store.save("r1", lambda: {"a.json": b"1", "b.json": b"2"})
    assert (root / "r1" / "b.json").read_bytes() == b"2"
    assert sorted(path.name for path in (root / "r1").iterdir()) == ["a.json", "b.json"]
    assert len(warnings()) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("secret"), SystemExit("secret")], ids=repr)
async def test_contents_that_cannot_be_made(root, warnings, error):
    def build():
        raise error

    await ArtifactStore(root).save("r1", build)
    assert len(warnings()) == 1
    assert type(error).__name__ in warnings()[0]
    assert "secret" not in warnings()[0]


async def test_no_thread_to_be_had(root, monkeypatch, warnings):
    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", refuse)
    store = ArtifactStore(root)
    for rollout_id in ("r1", "r2"):
        await store.save(rollout_id, lambda: {"a": b""})
    assert len(warnings()) == 1
    assert not root.exists()


async def test_saving_goes_on_when_it_is_cancelled(root):
    with trio.CancelScope() as scope:
        scope.cancel()
        await ArtifactStore(root).save("r1", lambda: {"a.json": b"1"})
    assert (root / "r1" / "a.json").read_bytes() == b"1"


# --- storage that hangs -----------------------------------------------------------------------


async def until_free(store):
    while store._pool.busy:
        await trio.lowlevel.checkpoint()


async def test_storage_that_hangs_is_left_alone_until_it_answers(
    tmp_path, doors, monkeypatch, warnings
):
    monkeypatch.setattr(artifacts, "LONGEST_WAIT_SEC", 0.05)
    store = ArtifactStore(tmp_path)
    await store.save("r1", lambda: {"a": b"1"})
    for rollout_id in ("r2", "r3"):
        assert store.artifacts_dir(rollout_id) is None
        assert await trio.to_thread.run_sync(store.artifacts_dir, rollout_id) is None
    await store.save("r2", lambda: pytest.fail("nobody asks for it"))
    assert list(tmp_path.iterdir()) == []
    assert len(warnings()) == 1
    monkeypatch.setattr(artifacts, "LONGEST_WAIT_SEC", 60)
    doors.open.release(2)
    await until_free(store)
    assert store.artifacts_dir("r4") == tmp_path / "r4" / "artifacts"
    await store.save("r4", lambda: {"a": b"4"})
    assert (tmp_path / "r4" / "a").read_bytes() == b"4"


class Doors:
    """Lets the threads that save go on one by one."""

    def __init__(self, monkeypatch):
        self.open = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        original = ArtifactStore._save

        def save(*args):
            self.entered.release()
            assert self.open.acquire(timeout=60)
            return original(*args)

        monkeypatch.setattr(ArtifactStore, "_save", save)
        monkeypatch.setattr(artifacts, "_MOST_THREADS", 1)


@pytest.fixture
def doors(monkeypatch):
    made = Doors(monkeypatch)
    yield made
    made.open.release(100)


async def until_there(path):
    while not path.exists():
        await trio.to_thread.run_sync(time.sleep, 0)  # lets the other threads go on


async def test_storage_that_has_much_to_do_does_not_hang(tmp_path, doors, mock_clock, warnings):
    store = ArtifactStore(tmp_path)
    ids = [f"r{number}" for number in range(5)]
    async with trio.open_nursery() as nursery:
        for rollout_id in ids:
            nursery.start_soon(store.save, rollout_id, lambda: {"a": b"1"})
            await trio.testing.wait_all_tasks_blocked()  # they go in this order
        for rollout_id in ids:
            await trio.to_thread.run_sync(doors.entered.acquire)
            mock_clock.jump(artifacts.LONGEST_WAIT_SEC * 0.9)
            doors.open.release()
            await until_there(tmp_path / rollout_id / "a")
    assert warnings() == []
    assert store.artifacts_dir("r9") is not None


async def test_who_is_cancelled_waits_for_a_bounded_time_whatever_gets_on(
    tmp_path, doors, mock_clock, warnings
):
    store = ArtifactStore(tmp_path)

    async def save_cancelled():
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.save("r2", lambda: {"a": b"2"})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.save, "r1", lambda: {"a": b"1"})
        await trio.to_thread.run_sync(doors.entered.acquire)
        nursery.start_soon(save_cancelled)
        await trio.testing.wait_all_tasks_blocked()
        doors.open.release()
        await trio.to_thread.run_sync(doors.entered.acquire)  # that of r2, which takes long
        mock_clock.jump(artifacts.LONGEST_WAIT_SEC)
    assert (tmp_path / "r1" / "a").read_bytes() == b"1"
    assert len(warnings()) == 1
    assert "did not answer" in warnings()[0]
    doors.open.release()
    await until_there(tmp_path / "r2" / "a")


async def test_one_that_is_stuck_does_not_hold_up_the_others(
    tmp_path, mock_clock, monkeypatch, warnings
):
    monkeypatch.setattr(artifacts, "_MOST_THREADS", 2)
    store = ArtifactStore(tmp_path)
    entered, release = threading.Event(), threading.Event()

    def stuck():
        entered.set()
        assert release.wait(60)
        return {"a": b"1"}

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.save, "r1", stuck)
        await trio.to_thread.run_sync(entered.wait)
        for rollout_id in ("r2", "r3"):
            nursery.start_soon(store.save, rollout_id, lambda: {"a": b"2"})
        await trio.testing.wait_all_tasks_blocked()
        assert list(tmp_path.iterdir()) == []
        mock_clock.jump(artifacts._PATIENCE_SEC)
        for rollout_id in ("r2", "r3"):
            await until_there(tmp_path / rollout_id / "a")
        assert not (tmp_path / "r1").exists()
        release.set()
    assert (tmp_path / "r1" / "a").exists()
    assert warnings() == []


def test_each_run_has_a_time_of_its_own(tmp_path, doors, warnings):
    store = ArtifactStore(tmp_path)
    clocks = [trio.testing.MockClock(), trio.testing.MockClock()]
    clocks[0].jump(1_000_000)

    async def save_and_leave():
        doors.open.release()
        await store.save("r1", lambda: {"a": b"1"})  # gets on, at a time that is far ahead

    async def hang():
        doors.entered.acquire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.save, "r3", lambda: {"a": b"3"})
            await trio.to_thread.run_sync(doors.entered.acquire)
            clocks[1].jump(artifacts.LONGEST_WAIT_SEC)
        assert store.artifacts_dir("r4") is None

    trio.run(save_and_leave, clock=clocks[0])
    trio.run(hang, clock=clocks[1])
    assert len(warnings()) == 1
    assert "did not answer" in warnings()[0]


async def test_what_nobody_waits_for_is_not_begun(tmp_path, doors, mock_clock):
    store = ArtifactStore(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.save, "r1", lambda: {"a": b"1"})
        await trio.to_thread.run_sync(doors.entered.acquire)
        nursery.start_soon(store.save, "r2", lambda: pytest.fail("nobody asks for it"))
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):  # the patience, then the rest
            mock_clock.jump(artifacts.LONGEST_WAIT_SEC)
            await trio.testing.wait_all_tasks_blocked()
    doors.open.release(2)
    await until_free(store)
    await store.save("r3", lambda: {"a": b"3"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r1", "r3"]


# --- many at once -----------------------------------------------------------------------------


async def test_many_threads_make_folders_at_once(root, warnings):
    store = ArtifactStore(root)
    folders = {}

    async def make(rollout_id):
        folders[rollout_id] = await trio.to_thread.run_sync(store.artifacts_dir, rollout_id)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(make, f"r{number}")
    assert folders == {f"r{number}": root / f"r{number}" / "artifacts" for number in range(20)}
    assert all(folder.is_dir() for folder in folders.values())
    assert warnings() == []


async def test_a_root_that_is_moved_away_is_made_anew(root, warnings):
    store = ArtifactStore(root)
    for number in range(3):
        await store.save(f"r{number}", lambda: {"a": b"1"})
        assert store.artifacts_dir(f"r{number}") is not None
        root.rename(root.with_name(f"moved{number}"))
    assert not root.exists()
    moved = sorted(root.parent.glob("moved*/*"))
    assert [path.name for path in moved] == ["r0", "r1", "r2"]
    assert warnings() == []


async def test_storage_that_stops_taking_files_is_noticed_by_all_that_ask_then(
    root, monkeypatch, warnings
):
    store = ArtifactStore(root)

    def refuse(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    assert None not in [store.artifacts_dir(f"before{number}") for number in range(20)]
    monkeypatch.setattr(folder_module.os, "write", refuse)
    names = [*(f"after{number}" for number in range(20)), "before0"]
    folders = []

    async def make(rollout_id):
        folders.append(await trio.to_thread.run_sync(store.artifacts_dir, rollout_id))

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(make, name)
    assert folders == [None] * len(names)
    assert len(warnings()) == 1


# --- time -------------------------------------------------------------------------------------


async def test_nothing_is_kept_while_time_jumps(tmp_path, autojump_clock, monkeypatch):
    def no_threads(*_, **__):
        pytest.fail("a thread was started")

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", no_threads)
    store = ArtifactStore(tmp_path)
    assert not store.keeps
    await store.save("r1", lambda: {"a": b""})
    assert list(tmp_path.iterdir()) == []


async def test_a_mock_clock_that_stands_still_does_no_harm(tmp_path, mock_clock):
    assert ArtifactStore(tmp_path).artifacts_dir("r1") == tmp_path / "r1" / "artifacts"
