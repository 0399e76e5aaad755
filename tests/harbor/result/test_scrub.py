"""A folder that was scrubbed holds no form of the key that is looked for, and the rest stays."""

from __future__ import annotations

import base64
import bz2
import gzip
import html
import io
import json
import lzma
import os
import socket
import sqlite3
import stat
import tarfile
import tempfile
import zipfile
import zlib
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import nest

from rollout._redaction import _DUMMIES, Redactor
from rollout.backend.harbor.result import scrub
from rollout.backend.harbor.result.scrub import scrub_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs descriptors of folders")

KEY = "sk-Proj_7f3aQ9zLw2"
ODD = "k\"e/y\\ +é&%'z"


def contents(folder: Path) -> bytes:
    """Everything that is left, names included, as one string of bytes."""
    found = []
    for way, folders, files in os.walk(folder):
        found += [os.fsencode(name) for name in (*folders, *files)]
        for name in files:
            path = Path(way, name)
            found.append(os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes())
    return b"\n".join(found)


def written_forms(key: str) -> dict[str, bytes]:
    """The key as all sorts of programs write it."""
    data = key.encode()
    forms = {
        "utf-8": data,
        "json": json.dumps(key).encode(),
        "json in utf-8": json.dumps(key, ensure_ascii=False).encode(),
        "json with slashes": json.dumps(key).replace("/", "\\/").encode(),
        "json three times": json.dumps(json.dumps(json.dumps(key))).encode(),
        "repr": repr(key).encode(),
        "repr of bytes": repr(data).encode(),
        "url": quote(key, safe="").encode(),
        "query": quote_plus(key).encode(),
        "html": html.escape(key).encode(),
        "hex": data.hex().encode(),
        "basic": base64.b64encode(b"user:" + data),
    }
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms[f"{encode.__name__} at {offset}"] = encode(b"abc"[:offset] + data + b"tail")
    return forms


FORMS = [(key, name) for key in (KEY, ODD) for name in written_forms(key)]


def test_without_a_key_nothing_is_done(tmp_path):
    (tmp_path / "file").write_bytes(b"\0binary")
    report = scrub_folder(tmp_path, [None, ""])
    assert report.verified
    assert report.to_dict() == {"cleaned": 0, "deleted": [], "verified": True}


def test_a_missing_folder_is_clean(tmp_path):
    assert scrub_folder(tmp_path / "nothing", [KEY]).verified


@pytest.mark.parametrize("key", ["abc", "test", "EMPTY", "none", "Not-Needed"])
def test_a_short_key_or_a_dummy_is_none(tmp_path, key):
    (tmp_path / "file").write_text(f"{key} tests")
    assert scrub_folder(tmp_path, [key]).verified
    assert (tmp_path / "file").read_text() == f"{key} tests"


@pytest.mark.parametrize(("key", "name"), FORMS)
def test_each_form_is_found_in_text_and_the_rest_stays(tmp_path, key, name):
    path = tmp_path / "log.txt"
    path.write_bytes(b"before " + written_forms(key)[name] + b" after\n\xff")
    report = scrub_folder(tmp_path, [key])
    assert (report.verified, report.cleaned, report.deleted) == (True, 1, [])
    left = path.read_bytes()
    assert not Redactor([key]).holds(left)
    assert left.startswith(b"before ")
    assert left.endswith(b" after\n\xff")
    assert b"[redacted]" in left


def test_json_stays_json(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"env": {"KEY": ODD, "plain": "é"}, ODD: [KEY]}))
    assert scrub_folder(tmp_path, [ODD, KEY]).verified
    assert json.loads(path.read_text()) == {
        "env": {"KEY": "[redacted]", "plain": "é"},
        "[redacted]": ["[redacted]"],
    }


@given(
    key=st.text(min_size=8, max_size=12).filter(
        lambda key: len(key.strip()) >= 8 and key.strip().lower() not in _DUMMIES
    ),
    before=st.binary(max_size=40),
    after=st.binary(max_size=40),
    wrap=st.sampled_from(["plain", "json", "ascii", "quote", "base64", "hex"]),
)
@settings(max_examples=30, deadline=None)
def test_no_form_is_left_whatever_is_around_it(key, before, after, wrap):
    form = {
        "plain": lambda: key,
        "json": lambda: json.dumps(key, ensure_ascii=False)[1:-1],
        "ascii": lambda: json.dumps(key)[1:-1],
        "quote": lambda: quote(key, safe=""),
        "base64": lambda: base64.b64encode(before + key.encode() + after).decode(),
        "hex": lambda: key.encode().hex(),
    }[wrap]().encode()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "file")
        path.write_bytes(before + form + after)
        assert scrub_folder(Path(name), [key]).verified
        left = contents(Path(name))
        assert key.encode() not in left
        assert form not in left


@given(at=st.integers(-40, 40), chunk=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_across_the_pieces_in_which_a_file_is_read(at, chunk):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "file")
        start = chunk * (1 << 20) + at
        path.write_bytes(b"x" * start + KEY.encode() + b"y" * 100)
        assert scrub_folder(Path(name), [KEY]).cleaned == 1
        assert path.read_bytes() == b"x" * start + b"[redacted]" + b"y" * 100


def test_a_key_of_several_lines(tmp_path):
    key = "first line\nsecond line"
    (tmp_path / "file").write_text(f"a\n{key}\nb\n")
    (tmp_path / "torn").write_text("x" * ((1 << 20) - 11) + key)  # between two pieces
    report = scrub_folder(tmp_path, [key])
    assert report.deleted == ["torn: the key is in it, in several lines"]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["a\n[redacted]\nb\n"]


# --- what is no text --------------------------------------------------------------------------


def test_a_binary_with_the_key_is_deleted_and_one_without_stays(tmp_path):
    (tmp_path / "with").write_bytes(b"\0\1\2" + KEY.encode() + b"\0")
    (tmp_path / "without").write_bytes(b"\0\1\2\0")
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert report.deleted == ["with: the key is in it, and it is not a text"]
    assert [path.name for path in tmp_path.iterdir()] == ["without"]


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/b.txt", data)
    return file.getvalue()


def packed(data: bytes) -> dict[str, bytes]:
    as_tar = io.BytesIO()
    with tarfile.open(fileobj=as_tar, mode="w:gz") as archive:
        info = tarfile.TarInfo("a/b.txt")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return {
        "zip": zipped(data),
        "tar.gz": as_tar.getvalue(),
        "gz": gzip.compress(data),
        "two in one gz": gzip.compress(b"first") + gzip.compress(data),
        "bz2": bz2.compress(data),
        "xz": lzma.compress(data),
        "zlib": zlib.compress(data),
        "large gz": gzip.compress(data * 40_000),
    }


@pytest.mark.parametrize("kind", list(packed(b"")))
def test_what_is_packed_is_searched(tmp_path, kind):
    text = b"a long enough log, line by line\n" * 3
    clean = packed(text)[kind]
    (tmp_path / "clean").write_bytes(clean)
    (tmp_path / "not").write_bytes(packed(text + KEY.encode() + text)[kind])
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert (tmp_path / "clean").read_bytes() == clean
    assert report.deleted == ["not: the key is packed into it"]
    assert report.unsearched == []


def test_nothing_is_deleted_that_does_not_hold_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(scrub, "_MOST_UNPACKED", 1000)
    with closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE a (text)")
        names = {path.name for path in tmp_path.iterdir()}
        assert "a.db-wal" in names
        files = {
            "a.zst": b"\x28\xb5\x2f\xfd rest",
            "b.7z": b"7z\xbc\xaf\x27\x1c rest",
            "c.gz": gzip.compress(b"text" * 50)[:-9],
            "d.zip": b"PK\x03\x04 torn",
            "e.txt": b"x^2 is no stream",
            "f.gz": gzip.compress(bytes(2000)),
            "g.gz": gzip.compress(gzip.compress(KEY.encode())),
        }
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        report = scrub_folder(tmp_path, [KEY])
        assert {path.name for path in tmp_path.iterdir()} == names | files.keys()
    assert report.verified
    assert report.deleted == []
    assert sorted(report.unsearched) == [
        "a.zst: it cannot be opened (zstd)",
        "b.7z: it cannot be opened (7z)",
        "c.gz: it cannot be searched to its end (EOFError)",
        "d.zip: it cannot be searched to its end (BadZipFile)",
        "f.gz: it cannot be searched to its end (too much is packed into it)",
    ]


def test_there_is_an_end_to_searching(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x" * 2000)
    monkeypatch.setattr(scrub, "_MOST_BYTES", 1000)
    assert scrub_folder(tmp_path, [KEY]).deleted == ["a: there is too much to search"]


@pytest.mark.parametrize("run", [b"\\", b"%25", b"\\u0073", b"\n", b"\0", b"x\n", b"k"])
def test_runs_of_what_patterns_begin_with_take_no_longer_than_others(run):
    # Anything quadratic would take minutes.
    assert not Redactor([KEY, ODD]).holds(run * (2_000_000 // len(run)))


# --- names, links, special files and rights ---------------------------------------------------


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
    here = nest(tmp_path, "a", 150)
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
