"""Names, links, special files and rights in a folder that is scrubbed."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
from pathlib import Path

import pytest
from backend.harbor_rules.scrubbed import KEY, contents

from rollout.backend.harbor.result.scrub import scrub_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs descriptors of folders")


def test_names(tmp_path):
    (tmp_path / f"dir-{KEY}" / "in").mkdir(parents=True)
    (tmp_path / f"dir-{KEY}" / "in" / f"{KEY}.log").write_text("text")
    (tmp_path / f"{KEY}").write_text("one")
    (tmp_path / base64.b64encode(f"u:{KEY}".encode()).decode()).write_text("two")
    (tmp_path / "[redacted]").write_text("was there")
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert (tmp_path / "dir-[redacted]" / "in" / "[redacted].log").read_text() == "text"
    assert (tmp_path / "[redacted]").read_text() == "was there"
    assert (tmp_path / "[redacted] (2)").read_text() == "one"
    assert KEY.encode() not in contents(tmp_path)


def test_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text(KEY)
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "file").write_text("text")
    links = {
        "in": "file",
        "a/up": "../file",
        "absolute": str(folder / "file"),
        "out": "../outside/secret",
        "a/out": "../../outside",
        "broken": "nowhere",
        "key": KEY,
        "a/b/root": "../..",
        "twisted": "a/b/root/../outside",
        "loop": "loop",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    report = scrub_folder(folder, [KEY])
    assert report.verified
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink()}
    assert left == {"in", "a/up", "broken", "a/b/root", "loop"}
    assert (outside / "secret").read_text() == KEY
    assert not any(KEY in line for line in report.deleted)


def test_a_link_to_a_folder_is_no_way_in(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text(KEY)
    link = tmp_path / "link"
    link.symlink_to(outside)
    assert scrub_folder(link, [KEY]).verified
    assert (outside / "file").read_text() == KEY


def test_other_names_of_a_file_are_left_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text(f"key {KEY}")
    folder = tmp_path / "folder"
    folder.mkdir()
    os.link(outside, folder / "inside")
    assert scrub_folder(folder, [KEY]).verified
    assert (folder / "inside").read_text() == "key [redacted]"
    assert outside.read_text() == f"key {KEY}"


def test_special_files_go(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        # The path of a socket has to be short.
        here = Path.cwd()
        os.chdir(tmp_path)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert sorted(report.deleted) == ["pipe: it is a special file", "socket: it is a special file"]
    assert list(tmp_path.iterdir()) == []


def test_modes(tmp_path):
    locked = tmp_path / "locked" / "more"
    locked.mkdir(parents=True)
    path = locked / "file"
    path.write_text(KEY)
    path.chmod(0o000)
    program = locked / "program"
    program.write_text("text")
    program.chmod(0o6755)
    locked.chmod(0o000)
    locked.parent.chmod(0o000)
    assert scrub_folder(tmp_path, [KEY]).verified
    assert path.read_text() == "[redacted]"
    assert stat.S_IMODE(program.stat().st_mode) == 0o755
    assert stat.S_IMODE(locked.stat().st_mode) == 0o700


def test_as_another_user_than_root(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    folder = tmp_path / "folder"
    locked = folder / "locked"
    locked.mkdir(parents=True)
    (locked / "file").write_text(KEY)
    (locked / "file").chmod(0o000)
    locked.chmod(0o000)
    for path in (locked / "file", locked, folder):
        os.chown(path, 65534, 65534)
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)
    # Whoever that is may not be able to read what Python has yet to import.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text(KEY)
    assert scrub_folder(tmp_path / "other", [KEY]).verified
    os.seteuid(65534)
    try:
        verified = scrub_folder(folder, [KEY]).verified
    finally:
        os.seteuid(0)
    assert verified
    assert (locked / "file").read_text() == "[redacted]"


def test_times_and_modes_of_a_file_stay(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(KEY)
    path.chmod(0o755)
    os.utime(path, ns=(10**18, 10**18))
    scrub_folder(tmp_path, [KEY])
    found = path.stat()
    assert path.read_text() == "[redacted]"
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o755, 10**18)


def test_deep_trees(tmp_path):
    deep = tmp_path / "deep"
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(150):
        os.mkdir("a", dir_fd=here)
        inner = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(file, KEY.encode())
    os.close(file)
    os.close(here)
    deep.mkdir()
    (deep / "file").write_text(KEY)
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert any("nested too deeply" in line for line in report.deleted)
    assert (deep / "file").read_text() == "[redacted]"


def test_attributes(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    try:
        os.setxattr(path, "user.note", KEY.encode())
        os.setxattr(path, "user.other", b"text")
    except (AttributeError, OSError):
        pytest.skip("no extended attributes here")
    assert scrub_folder(tmp_path, [KEY]).verified
    assert os.listxattr(path) == ["user.other"]


def test_what_cannot_be_removed_is_told(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")

    def unlink(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", unlink)
    report = scrub_folder(tmp_path, [KEY])
    assert not report.verified
    assert "cannot be removed" in report.reason


def test_a_report_is_bounded_and_without_the_key(tmp_path):
    for number in range(60):
        (tmp_path / f"{KEY}-{number}").write_bytes(b"\0" + KEY.encode())
    found = scrub_folder(tmp_path, [KEY]).to_dict()
    assert found["verified"]
    assert len(found["deleted"]) == 51
    assert found["deleted"][-1] == "and 10 more"
    assert KEY not in json.dumps(found)


def test_white_space_around_a_key_does_not_hide_it(tmp_path):
    path = tmp_path / "log"
    path.write_text(f"<{KEY}>")
    assert scrub_folder(tmp_path, [f"{KEY}\n"]).verified
    assert path.read_text() == "<[redacted]>"
