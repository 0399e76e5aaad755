"""Archives from inside, whatever is in them."""

from __future__ import annotations

import io
import os
import tarfile
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.backend.harbor._namespace.errors import TransferError
from rollout.backend.harbor._namespace.extract import extract

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
    return extract(archive(*members), target, max_bytes=max_bytes, stop=threading.Event())


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


def test_more_than_the_limit_is_an_error(tmp_path):
    with pytest.raises(TransferError, match="more than 10 bytes"):
        unpack(tmp_path, (FILE, "a", b"x" * 6), (FILE, "b", b"x" * 6), max_bytes=10)
    assert not (tmp_path / "b").exists()


def test_a_broken_archive_is_an_error(tmp_path):
    with pytest.raises(TransferError, match="broken"):
        extract(io.BytesIO(b"no tar" * 200), tmp_path, max_bytes=10, stop=threading.Event())


def test_it_can_be_stopped(tmp_path):
    stop = threading.Event()
    stop.set()
    assert extract(archive((FILE, "a", b"x")), tmp_path, max_bytes=10, stop=stop) == []
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
