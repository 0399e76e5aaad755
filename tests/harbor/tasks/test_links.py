"""Nothing leads out of a task, and nothing in it can hang whoever reads it."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.backend.harbor.errors import UnfitTaskError
from rollout.backend.harbor.tasks.links import check_tree, copy_tree


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "task"
    (folder / "tests" / "data").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "tests" / "test.sh").write_text("test")
    (folder / "tests" / "data" / "x").write_text("x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    return folder


def refused(task, why):
    with pytest.raises(UnfitTaskError, match=why):
        check_tree(task)


def test_links_within_are_fine(task):
    (task / "tests" / "a").symlink_to("data/x")
    (task / "environment" / "b").symlink_to("../tests/a")
    (task / "environment" / "data").symlink_to("../tests/data")
    (task / "environment" / "deep").symlink_to("data/../data/x")
    check_tree(task)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("/etc/passwd", "absolute link"),
        ("{task}/tests/test.sh", "absolute link"),
        ("../../outside/secret", "out of the task"),
        ("../../outside", "out of the task"),
        ("../..", "out of the task"),
        ("../../task/tests/test.sh", "out of the task"),
        ("data/../../../outside/secret", "out of the task"),
        ("nowhere", "leads nowhere"),
        ("link", "leads nowhere"),
        ("test.sh/x", "leads nowhere"),
        ("test.sh/.", "leads nowhere"),
    ],
)
def test_a_link_that_leads_elsewhere(task, target, why):
    (task / "tests" / "link").symlink_to(target.format(task=task))
    refused(task, f"tests/link is .*{why}")


def test_chains(task):
    (task / "tests" / "a").symlink_to("b")
    (task / "tests" / "b").symlink_to("data/c")
    (task / "tests" / "data" / "c").symlink_to("../../../outside/secret")
    refused(task, "out of the task")


def test_a_way_out_by_another_link(task):
    # By its text it stays inside; by way of the folder that it goes through it does not.
    (task / "environment" / "inner").mkdir()
    (task / "tests" / "deep").symlink_to("../environment/inner")
    (task / "environment" / "up").symlink_to("../tests/deep/../../../outside/secret")
    refused(task, "out of the task")


def test_loops_of_links(task):
    (task / "tests" / "a").symlink_to("b")
    (task / "tests" / "b").symlink_to("a")
    refused(task, "leads nowhere")


@pytest.mark.parametrize("target", [".", "..", "../tests", "../environment/../tests"])
def test_a_walk_without_end(task, target):
    (task / "tests" / "again").symlink_to(target)
    refused(task, "no end")


def test_a_walk_without_end_by_two_links(task):
    (task / "tests" / "to-env").symlink_to("../environment")
    (task / "environment" / "to-tests").symlink_to("../tests")
    refused(task, "no end")


def test_many_ways_to_one_folder_are_fine_and_fast(task):
    # Walked naively, those are 2 ** 40 ways.
    here = task / "environment"
    for level in range(40):
        (task / f"d{level}").mkdir()
    for level in range(39):
        for name in ("a", "b"):
            (task / f"d{level}" / name).symlink_to(f"../d{level + 1}")
    (here / "start").symlink_to("../d0")
    check_tree(task)


def test_special_files(task):
    os.mkfifo(task / "tests" / "fifo")
    refused(task, "tests/fifo is neither a file, a folder nor a link")


def test_links_to_special_files(task):
    os.mkfifo(task / "tests" / "fifo")
    (task / "environment" / "x").symlink_to("../tests/fifo")
    refused(task, "neither")


def test_sockets(task, monkeypatch):
    monkeypatch.chdir(task)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        refused(task, "socket is neither")


def test_devices(task):
    try:
        os.mknod(task / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no right to make a device")
    refused(task, "null is neither")


def test_the_folder_itself_may_be_behind_a_link(task, tmp_path):
    (task / "tests" / "a").symlink_to("data/x")
    (tmp_path / "alias").symlink_to("task")
    check_tree(tmp_path / "alias")


def test_folders_without_end(task):
    deep = task / "tests" / "/".join(["d"] * 98)
    deep.mkdir(parents=True)
    check_tree(task)
    (deep / "d" / "d").mkdir(parents=True)
    refused(task, "more than 100 deep")


NAMES = st.sampled_from(["a", "b", "c"])
PARTS = st.lists(st.sampled_from(["..", ".", "a", "b", "c", "task"]), min_size=1, max_size=5)


@given(
    folders=st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=4),
    files=st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=3),
    links=st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), PARTS), max_size=4),
)
def test_whatever_passes_is_safe_to_walk_and_to_copy(folders, files, links):
    with tempfile.TemporaryDirectory() as made_here:
        top = os.path.realpath(made_here)
        root = Path(top) / "task"
        root.mkdir()
        (Path(top) / "a").mkdir()
        (Path(top) / "a" / "b").write_text("secret")
        made = 0
        for parts, kind in [
            *((each, None) for each in folders),
            *((each, "") for each in files),
            *((each, "/".join(target)) for each, target in links),
        ]:
            place = root.joinpath(*parts)
            # Nothing is made by way of a link, which might lead out.
            if os.path.lexists(place) or Path(os.path.realpath(place.parent)) != place.parent:
                continue
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
            except OSError:  # a file in the way, or links that lead in a circle
                continue
            if kind is None:
                place.mkdir()
            elif not kind:
                place.write_text("x")
            else:
                place.symlink_to(kind)
                made += 1
        try:
            check_tree(root)
        except UnfitTaskError:
            assert made  # nothing but a link can be wrong here
            return
        copy_tree(root, Path(top) / "copy")
        for start in (root, Path(top) / "copy"):
            for seen, (folder, inner, names) in enumerate(os.walk(start, followlinks=True)):
                assert seen < 1000
                for name in [*inner, *names]:
                    assert Path(os.path.realpath(Path(folder) / name)).is_relative_to(start)
                    assert (Path(folder) / name).exists()


# --- copies ---------------------------------------------------------------------------------------


def test_a_copy_keeps_links_permissions_and_times(task, tmp_path):
    (task / "tests" / "a").symlink_to("data/x")
    (task / "tests" / "test.sh").chmod(0o750)
    (task / "environment").chmod(0o555)
    os.utime(task / "tests" / "test.sh", (1, 2))
    copy = tmp_path / "copy"
    copy_tree(task, copy)
    assert str((copy / "tests" / "a").readlink()) == "data/x"
    assert (copy / "tests" / "a").read_text() == "x"
    script = (copy / "tests" / "test.sh").stat()
    assert stat.S_IMODE(script.st_mode) == 0o750
    assert script.st_mtime == 2
    # Whoever owns the copy can remove it.
    assert stat.S_IMODE((copy / "environment").stat().st_mode) == 0o755
    (task / "environment").chmod(0o755)


def test_a_file_may_be_left_out_at_the_top_only(task, tmp_path):
    (task / "instruction.md").write_text("old")
    (task / "tests" / "instruction.md").write_text("another")
    copy_tree(task, tmp_path / "copy", without="instruction.md")
    assert not (tmp_path / "copy" / "instruction.md").exists()
    assert (tmp_path / "copy" / "tests" / "instruction.md").read_text() == "another"


def test_what_becomes_a_fifo_after_the_check_does_not_hang_a_copy(task, tmp_path):
    check_tree(task)
    os.mkfifo(task / "tests" / "fifo")
    with pytest.raises(UnfitTaskError, match="no longer a file"):
        copy_tree(task, tmp_path / "copy")


def test_a_copy_does_not_overwrite(task, tmp_path):
    (tmp_path / "copy").mkdir()
    with pytest.raises(FileExistsError):
        copy_tree(task, tmp_path / "copy")
