"""Archives from inside, whatever is in them."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sandbox import TransferError
from rollout.sandbox._extract import extract

FILE, LINK, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE


def archive(*members):
    """An archive of (kind, name, content or target of a link) or of `TarInfo`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            kind, name, content = member[:3]
            info = tarfile.TarInfo(name)
            info.type = kind
            info.mode = member[3] if len(member) > 3 else 0o644
            if kind == FILE:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                tar.addfile(info)
    packed.seek(0)
    return packed


def unpack(target, *members, max_bytes=10**6):
    return extracted(archive(*members), target, max_bytes=max_bytes)


def extracted(packed, target, *, max_bytes=10**6, max_file_bytes=1 << 31, stop=None):
    return extract(
        packed,
        target,
        max_bytes=max_bytes,
        max_file_bytes=max_file_bytes,
        stop=stop or threading.Event(),
    )


def tree(folder):
    return sorted(
        (str(path.relative_to(folder)), str(path.readlink()) if path.is_symlink() else None)
        for path in folder.rglob("*")
    )


def test_files_folders_and_links_within_come_out(tmp_path):
    target = tmp_path / "new" / "target"
    skipped = unpack(
        target,
        (FOLDER, ".", ""),
        (FOLDER, "./a", "", 0o500),
        (FILE, "./a/run", b"#!", 0o755),
        (FILE, "deep/er/file", b"x"),
        (LINK, "a/up", "../deep/er"),
    )
    assert skipped == []
    assert (target / "a/run").read_bytes() == b"#!"
    assert os.access(target / "a/run", os.X_OK)
    assert (target / "a").stat().st_mode & 0o777 == 0o700
    assert (target / "a/up/file").read_text() == "x"


def test_existing_files_are_replaced_and_others_kept(tmp_path):
    (tmp_path / "old").write_text("old")
    (tmp_path / "kept").write_text("kept")
    assert unpack(tmp_path, (FILE, "old", b"new")) == []
    assert (tmp_path / "old").read_text() == "new"
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    "members",
    [
        [(FILE, "../evil", b"x")],
        [(FILE, "/evil", b"x")],
        [(FILE, "a/../../evil", b"x")],
        [(LINK, "out", "/"), (FILE, "out/evil", b"x")],
        [(LINK, "out", ".."), (FILE, "out/evil", b"x")],
        [(LINK, "evil", "../secret")],
        [(LINK, "evil", "/etc/passwd")],
        [(LINK, "a/b", ".."), (LINK, "evil", "a/b/../secret")],
        [(LINK, "x", "y"), (LINK, "y", "../secret")],
        [(tarfile.LNKTYPE, "evil", "../secret")],
        [(tarfile.FIFOTYPE, "evil", "")],
        [(tarfile.CHRTYPE, "evil", "")],
        [(FILE, ".", b"x")],
        [(FILE, "/".join("d" * 300), b"x")],
    ],
)
def test_nothing_leads_out_of_the_folder(tmp_path, members):
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"
    unpack(target, *members)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "target"]
    assert (tmp_path / "secret").read_text() == "secret"
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target.resolve())
        assert path.is_symlink() or path.is_file() or path.is_dir()
    assert not os.path.lexists(target / "evil")


def test_what_is_left_out_is_named(tmp_path):
    (reason,) = unpack(tmp_path, (FILE, "../evil", b"x"))
    assert "../evil" in reason


def test_a_link_of_the_host_in_the_way_is_replaced_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("host")
    target = tmp_path / "target"
    target.mkdir()
    (target / "dir").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    assert unpack(target, (FILE, "dir/file", b"new"), (FILE, "file", b"new")) == []
    assert (outside / "file").read_text() == "host"
    assert tree(target) == [("dir", None), ("dir/file", None), ("file", None)]


def test_what_is_more_than_the_limit_is_left_out(tmp_path):
    skipped = unpack(
        tmp_path, (FILE, "a", b"x" * 6), (FILE, "b", b"x" * 6), (FILE, "c", b"x"), max_bytes=10
    )
    assert tree(tmp_path) == [("a", None), ("c", None)]
    assert skipped == ["'b': more than 10 bytes in all"]


def gnu_tar(folder):
    done = subprocess.run(
        ["tar", "-cS", "--format=posix", f"--directory={folder}", "."],
        capture_output=True,
        check=True,
    )
    return io.BytesIO(done.stdout)


def test_holes_stay_holes(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    size = 1 << 30
    with (source / "holes").open("wb") as file:
        for start in (4096 * 3, size // 2):
            file.seek(start)
            file.write(b"here")
        file.truncate(size)
    (source / "after").write_text("all")
    assert extracted(gnu_tar(source), target, max_bytes=size) == []
    found = (target / "holes").stat()
    assert found.st_size == size
    assert found.st_blocks * 512 < 1 << 20
    with (target / "holes").open("rb") as file:
        for start in (4096 * 3, size // 2):
            file.seek(start - 1)
            assert file.read(6) == b"\0here\0"
    assert (target / "after").read_text() == "all"


def test_a_file_that_is_nothing_but_a_hole_is_left_out_if_it_is_too_large(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    with (source / "huge").open("wb") as file:
        file.truncate(1 << 40)
    (source / "small").write_text("x")
    (reason,) = extracted(gnu_tar(source), target, max_file_bytes=1 << 30)
    assert "huge" in reason
    assert tree(target) == [("small", None)]


@pytest.mark.parametrize("holes", ["1\n9\n9\n", "1\n-1\n1\n", "1\n0\n99\n"])
def test_holes_that_cannot_be_are_left_out(tmp_path, holes):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("evil")
        content = holes.encode().ljust(512, b"\0") + b"x"
        info.size = len(content)
        info.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "evil",
            "GNU.sparse.realsize": "10",
        }
        tar.addfile(info, io.BytesIO(content))
    packed.seek(0)
    skipped = extracted(packed, tmp_path, max_bytes=10**6)
    assert skipped == ["'evil': its holes are not where they can be"]
    assert tree(tmp_path) == []


def test_a_header_that_is_one_hole_does_not_fill_the_memory(tmp_path):
    file = (tmp_path / "archive").open("w+b")
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    file.write(info.tobuf(tarfile.GNU_FORMAT))
    file.truncate(1 << 40)
    file.seek(0)
    with file, pytest.raises(TransferError, match="a header is too large"):
        extracted(file, tmp_path / "target")


def test_more_files_than_a_disk_has_room_for_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.sandbox._extract.MAX_MEMBERS", 3)
    skipped = unpack(tmp_path, *((FILE, f"f{number}", b"") for number in range(9)))
    assert tree(tmp_path) == [("f0", None), ("f1", None), ("f2", None)]
    assert skipped == ["'f3': as all that follows: more than 3 files"]


def test_of_much_that_is_left_out_a_part_is_named(tmp_path):
    skipped = unpack(tmp_path, *((tarfile.FIFOTYPE, f"f{number}", "") for number in range(1000)))
    assert len(skipped) == 51
    assert skipped[-1] == "and 950 more"


def test_a_broken_archive_is_an_error(tmp_path):
    with pytest.raises(TransferError, match="broken"):
        extracted(io.BytesIO(b"no tar" * 200), tmp_path, max_bytes=10)


def test_it_can_be_stopped(tmp_path):
    stop = threading.Event()
    stop.set()
    assert extracted(archive((FILE, "a", b"x")), tmp_path, stop=stop) == []
    assert tree(tmp_path) == []


NAMES = st.lists(st.sampled_from(["a", "b", "c", "..", ".", ""]), max_size=4).map("/".join)
MEMBERS = st.lists(
    st.one_of(
        st.tuples(st.just(FILE), NAMES, st.just(b"new")),
        st.tuples(st.just(FOLDER), NAMES, st.just("")),
        st.tuples(st.just(LINK), NAMES, NAMES),
        st.tuples(st.just(tarfile.LNKTYPE), NAMES, NAMES),
    ),
    max_size=8,
)


@settings(max_examples=150)
@given(rounds=st.lists(MEMBERS, min_size=1, max_size=2))
def test_no_archive_touches_what_is_outside(tmp_path_factory, rounds):
    base = tmp_path_factory.mktemp("base")
    for name in ("a", "b", "c"):
        (base / name).write_text("host")
    target = base / "target"
    for members in rounds:
        unpack(target, *members)
    assert sorted(path.name for path in base.iterdir()) == ["a", "b", "c", "target"]
    assert {(base / name).read_text() for name in ("a", "b", "c")} == {"host"}
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target.resolve())
