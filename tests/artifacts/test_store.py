"""The store: folders below one root, and nothing that it meets fails a rollout."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing
from artifacts.writing import hanging, until, until_sent, writer_pid
from support import local_backend

from rollout import artifacts
from rollout._files import folders as folder_module
from rollout._files import writer
from rollout._files.rollouts import RolloutFolders
from rollout.artifacts import ArtifactStore
from rollout.errors import BackendConfigurationError

posix = pytest.mark.skipif(os.name != "posix", reason="processes are stopped by signals")


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


def test_saves_files_as_a_whole(root):
    folders = RolloutFolders(root)
    assert folders.save("r1", {"a.json": b"1", "b.json": b"2"}) == []
    assert folders.save("r1", {"a.json": b"3", "b.json": None, "c.json": None}) == []
    assert {path.name: path.read_bytes() for path in (root / "r1").iterdir()} == {"a.json": b"3"}
    if os.name == "posix":
        assert (root / "r1").stat().st_mode & 0o077 == 0
        assert (root / "r1" / "a.json").stat().st_mode & 0o077 == 0


def test_a_link_in_the_place_of_a_file_is_replaced(root, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (root / "r1").mkdir(parents=True)
    (root / "r1" / "a.json").symlink_to(victim)
    assert RolloutFolders(root).save("r1", {"a.json": b"1"}) == []
    assert victim.read_text() == "mine"
    assert (root / "r1" / "a.json").read_bytes() == b"1"
    assert not (root / "r1" / "a.json").is_symlink()


def test_one_file_that_cannot_be_written_does_not_keep_others_away(root):
    (root / "r1" / "a.json").mkdir(parents=True)
    assert len(RolloutFolders(root).save("r1", {"a.json": b"1", "b.json": b"2"})) == 1
    assert (root / "r1" / "b.json").read_bytes() == b"2"
    assert sorted(path.name for path in (root / "r1").iterdir()) == ["a.json", "b.json"]


@strange
def test_nothing_is_saved_where_a_link_or_a_special_file_is(root, tmp_path, put):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root.mkdir()
    put(root / "r1", elsewhere)
    assert RolloutFolders(root).save("r1", {"a.json": b"1"}) == [
        "a link or a file is in the place of a folder"
    ]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("error", [ZeroDivisionError("secret"), SystemExit("secret")], ids=repr)
@pytest.mark.parametrize("in_thread", [False, True])
async def test_contents_that_cannot_be_made(tmp_path, warnings, error, in_thread):
    def build():
        raise error

    await ArtifactStore(tmp_path).save("r1", build, in_thread=in_thread)
    assert len(warnings()) == 1
    assert type(error).__name__ in warnings()[0]
    assert "secret" not in warnings()[0]


async def test_saving_goes_on_when_it_is_cancelled(tmp_path):
    with trio.CancelScope() as scope:
        scope.cancel()
        await ArtifactStore(tmp_path).save("r1", lambda: {"a.json": b"1"})
    assert (tmp_path / "r1" / "a.json").read_bytes() == b"1"


async def test_problems_are_said_once_each(tmp_path, warnings):
    (tmp_path / "r1" / "a").mkdir(parents=True)
    (tmp_path / "r2").write_text("a file")
    store = ArtifactStore(tmp_path)
    for rollout_id in ("r1", "r2", "r1", "r2", "r3"):
        await store.save(rollout_id, lambda: {"a": b"1", "b": b"2"})
    assert [line.split()[1] for line in warnings()] == ["r1:", "r2:"]
    assert "a link or a file" in warnings()[1]
    assert (tmp_path / "r1" / "b").read_bytes() == (tmp_path / "r3" / "b").read_bytes() == b"2"


async def test_large_files_and_strange_ids(tmp_path, warnings):
    store = ArtifactStore(tmp_path)
    contents = {"small": b"", "large": os.urandom(1 << 20)}
    async with trio.open_nursery() as nursery:
        for rollout_id in ("r1", "a/b", "\ud800", "n\nl\t"):
            nursery.start_soon(store.save, rollout_id, lambda: contents)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 4
    for folder in folders:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    assert warnings() == []


# --- the process that writes --------------------------------------------------------------------


async def test_no_process_to_be_had(tmp_path, monkeypatch, warnings):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    store = ArtifactStore(tmp_path / "root")
    for rollout_id in ("r1", "r2"):
        await store.save(rollout_id, lambda: {"a": b""})
    assert len(warnings()) == 1
    assert "the process that writes them failed: No such file" in warnings()[0]


@posix
def test_it_ends_with_the_run_and_another_run_has_its_own(tmp_path):
    store = ArtifactStore(tmp_path)
    pids = [trio.run(writer_pid, store) for _ in range(2)]
    assert pids[0] != pids[1]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@posix
async def test_signals_for_all_processes_leave_it_alone(tmp_path):
    store = ArtifactStore(tmp_path)
    pid = await writer_pid(store)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    await store.save("r1", lambda: {"a": b"1"})
    assert store._writer.pid == pid


@posix
async def test_what_it_had_not_answered_when_it_died_goes_to_another_one(tmp_path, warnings):
    store = ArtifactStore(tmp_path)
    pid = await writer_pid(store)
    os.kill(pid, signal.SIGSTOP)
    async with trio.open_nursery() as nursery:
        for rollout_id in ("r1", "r2"):
            nursery.start_soon(store.save, rollout_id, lambda: {"a": b"1"})
        await until_sent(store, 2)
        os.kill(pid, signal.SIGKILL)
    for rollout_id in ("r1", "r2"):
        assert (tmp_path / rollout_id / "a").read_bytes() == b"1"
    assert store._writer.pid != pid
    os.kill(store._writer.pid, signal.SIGKILL)  # while it has nothing to do
    await store.save("r3", lambda: {"a": b"3"})
    assert (tmp_path / "r3" / "a").read_bytes() == b"3"
    assert warnings() == []


async def test_files_that_it_always_dies_of(tmp_path, monkeypatch, warnings):
    monkeypatch.setattr(writer, "_BOOT", "import sys; sys.stdin.buffer.read(1)")
    store = ArtifactStore(tmp_path)
    for rollout_id in ("r1", "r2"):
        await store.save(rollout_id, lambda: {"a": b"1"})
    assert len(warnings()) == 1
    assert "the process that writes them died" in warnings()[0]


KILLED = """\
import os, signal, sys, trio
from rollout.artifacts import ArtifactStore

async def main():
    store = ArtifactStore(sys.argv[1])
    await store.save("r", lambda: {"a": b"1"})
    os.kill(os.getpid(), signal.SIGKILL)

trio.run(main)
"""


@posix
def test_it_ends_when_its_parent_is_killed(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stderr=subprocess.PIPE,  # the end of which comes when neither has it any longer
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr == b""
    assert (tmp_path / "r" / "a").read_bytes() == b"1"


# --- storage that hangs -----------------------------------------------------------------------


@posix
async def test_storage_that_hangs_is_left_alone_until_it_answers(tmp_path, mock_clock, warnings):
    store = ArtifactStore(tmp_path)
    pid = await writer_pid(store)
    with hanging(pid):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.save, "r1", lambda: {"a": b"1"})
            await until_sent(store)
            mock_clock.jump(artifacts.LONGEST_WAIT_SEC)
        for rollout_id in ("r2", "r3"):
            assert store.artifacts_dir(rollout_id) is None
            assert await trio.to_thread.run_sync(store.artifacts_dir, rollout_id) is None
        await store.save("r2", lambda: pytest.fail("nobody asks for it"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]
        assert len(warnings()) == 1
        assert "did not answer within 8 s" in warnings()[0]
    await until(lambda: not store._writer.hangs)
    assert (tmp_path / "r1" / "a").read_bytes() == b"1"
    assert store.artifacts_dir("r4") == tmp_path / "r4" / "artifacts"
    await store.save("r4", lambda: {"a": b"4"})
    assert (tmp_path / "r4" / "a").read_bytes() == b"4"
    assert store._writer.pid == pid


@posix
def test_a_process_that_hangs_to_the_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_END_SEC", 0.01)

    async def main():
        pid = await writer_pid(ArtifactStore(tmp_path))
        os.kill(pid, signal.SIGSTOP)
        return pid

    pid = trio.run(main)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class SlowStorage:
    """Instead of writing files, the process answers when it is told to."""

    def __init__(self, folder, monkeypatch):
        self.path = folder / "answers"
        os.mkfifo(self.path)
        monkeypatch.setattr(
            writer,
            "_BOOT",
            f"import os\nwith open({str(self.path)!r}, 'rb', 0) as told:\n"
            "    while told.read(1): os.write(1, b'\\n')",
        )
        # For both, so that no end of it waits for the other.
        self.descriptor = os.open(self.path, os.O_RDWR)

    def answer(self):
        os.write(self.descriptor, b"x")


@pytest.fixture
def slow(tmp_path, monkeypatch):
    made = SlowStorage(tmp_path, monkeypatch)
    yield made
    os.close(made.descriptor)


@posix
async def test_storage_that_has_much_to_do_does_not_hang(tmp_path, slow, mock_clock, warnings):
    store, saved = ArtifactStore(tmp_path), []

    async def save(rollout_id):
        await store.save(rollout_id, lambda: {"a": b"1"})
        saved.append(rollout_id)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(save, number)
        await until_sent(store, 5)
        for number in range(5):
            mock_clock.jump(artifacts.LONGEST_WAIT_SEC * 0.9)
            slow.answer()
            await until(lambda: len(saved) > number)  # noqa: B023 - called within the turn
        os.kill(store._writer.pid, signal.SIGKILL)
    assert warnings() == []
    assert store.artifacts_dir("r9") is not None


@posix
async def test_who_is_cancelled_waits_for_a_bounded_time_whatever_gets_on(
    tmp_path, slow, mock_clock, warnings
):
    store, saved = ArtifactStore(tmp_path), []

    async def save_cancelled():
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.save("r2", lambda: {"a": b"2"})

    async def save_one():
        await store.save("r1", lambda: {"a": b"1"})
        saved.append("r1")

    async with trio.open_nursery() as nursery:
        for count, save in enumerate((save_one, save_one, save_cancelled), 1):
            nursery.start_soon(save)
            await until_sent(store, count)
        await trio.testing.wait_all_tasks_blocked()  # the one that is cancelled has to know it
        for count in (1, 2):
            mock_clock.jump(artifacts.LONGEST_WAIT_SEC * 0.6)
            slow.answer()
            await until(lambda: len(saved) == count)  # noqa: B023 - called within the turn
        await until(warnings)
    assert len(warnings()) == 1
    assert "did not answer" in warnings()[0]
    os.kill(store._writer.pid, signal.SIGKILL)


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
    def refuse(*_, **__):
        pytest.fail("a process was started")

    monkeypatch.setattr(trio.lowlevel, "open_process", refuse)
    store = ArtifactStore(tmp_path)
    assert not store.keeps
    await store.save("r1", lambda: {"a": b""})
    assert list(tmp_path.iterdir()) == []


async def test_a_mock_clock_that_stands_still_does_no_harm(tmp_path, mock_clock):
    assert ArtifactStore(tmp_path).artifacts_dir("r1") == tmp_path / "r1" / "artifacts"
