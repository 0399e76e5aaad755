"""A folder that was scrubbed holds no form of the key, whatever is in it."""

import base64
import bz2
import gzip
import html
import io
import json
import lzma
import os
import shlex
import sqlite3
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from backend.harbor_rules.scrubbed import KEY, contents
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.backend.harbor.credential_forms import Forms, _Patterns
from rollout.backend.harbor.credential_search import Limits
from rollout.backend.harbor.credentials import scrub_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs descriptors of folders")

ODD = "k\"e/y\\ +é&%'z"


def written_forms(key: str) -> dict[str, bytes]:
    """The key as all sorts of programs write it."""
    data = key.encode()
    tripled = json.dumps(json.dumps(json.dumps(key)))
    forms = {
        "utf-8": data,
        "utf-16": key.encode("utf-16"),
        "utf-16-be": key.encode("utf-16-be"),
        "utf-32-le": key.encode("utf-32-le"),
        "latin-1": key.encode("latin-1"),
        "json": json.dumps(key).encode(),
        "json in utf-8": json.dumps(key, ensure_ascii=False).encode(),
        "json with slashes": json.dumps(key).replace("/", "\\/").encode(),
        "json with capitals": json.dumps(key).replace("\\u00e9", "\\u00E9").encode(),
        "json three times": tripled.encode(),
        "json in utf-16": json.dumps(key).encode("utf-16-le"),
        "repr": repr(key).encode(),
        "repr of bytes": repr(data).encode(),
        "url": quote(key, safe="").encode(),
        "url in small letters": quote(key, safe="").lower().encode() if key == ODD else data,
        "query": quote_plus(key).encode(),
        "url twice": quote(quote(key, safe="")).encode(),
        "all escaped in url": "".join(f"%{byte:02x}" for byte in data).encode(),
        "all escaped in json": "".join(f"\\u{ord(c):04X}" for c in key).encode(),
        "html": html.escape(key).encode(),
        "shell": shlex.quote(key).encode(),
        "hex": data.hex().encode(),
        "hex with colons": data.hex(":").upper().encode(),
        "basic": base64.b64encode(b"user:" + data),
        "base64 in lines": base64.encodebytes(b"x" * 50 + data + b"y" * 30),
        "base64 in a url": quote(base64.b64encode(b"xy" + data), safe="").encode(),
        "base64 of utf-16": base64.b64encode(key.encode("utf-16-le")),
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


def test_a_short_key_is_never_called_clean(tmp_path):
    (tmp_path / "file").write_text("abc abc")
    report = scrub_folder(tmp_path, [KEY, "abc"])
    assert not report.verified
    assert "fewer than 4" in report.reason
    assert (tmp_path / "file").read_text() == "abc abc"


@pytest.mark.parametrize(("key", "name"), FORMS)
def test_each_form_is_found_in_text_and_the_rest_stays(tmp_path, key, name):
    form = written_forms(key)[name]
    wide = {"utf-16": "utf-16-le", "json in utf-16": "utf-16-le"}.get(name, name)
    encoding = wide if wide.startswith("utf-") and wide != "utf-8" else "ascii"
    path = tmp_path / "log.txt"
    before = "before ".encode(encoding)
    path.write_bytes(before + form + " after".encode(encoding))
    report = scrub_folder(tmp_path, [key])
    assert report.verified
    assert report.cleaned == 1
    assert report.deleted == []
    left = path.read_bytes()
    assert not Forms.of([key]).holds(left)
    assert left.startswith(before)
    assert left.endswith(" after".encode(encoding))
    assert "[redacted]".encode(encoding) in left


def test_json_stays_json(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"env": {"KEY": ODD, "plain": "é"}, ODD: [KEY]}))
    assert scrub_folder(tmp_path, [ODD, KEY]).verified
    assert json.loads(path.read_text()) == {
        "env": {"KEY": "[redacted]", "plain": "é"},
        "[redacted]": ["[redacted]"],
    }


def test_a_key_that_a_terminal_has_broken_into_lines(tmp_path):
    path = tmp_path / "pane.txt"
    path.write_text(f"KEY={KEY[:7]}\n{KEY[7:]} done")
    (tmp_path / "log.json").write_text(json.dumps(f"KEY={KEY[:9]}\r\n{KEY[9:]} done"))
    assert scrub_folder(tmp_path, [KEY]).cleaned == 2
    assert path.read_text() == "KEY=[redacted] done"
    assert json.loads((tmp_path / "log.json").read_text()) == "KEY=[redacted] done"


@given(
    key=st.text(min_size=4, max_size=12).filter(lambda key: len(key.strip()) >= 4),
    before=st.binary(max_size=40),
    after=st.binary(max_size=40),
    encoding=st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32-be"]),
    wrap=st.sampled_from(["plain", "json", "ascii", "quote", "base64", "hex"]),
)
@settings(max_examples=30, deadline=None)
def test_no_form_is_left_whatever_is_around_it(key, before, after, encoding, wrap):
    text = {
        "plain": lambda: key,
        "json": lambda: json.dumps(key, ensure_ascii=False)[1:-1],
        "ascii": lambda: json.dumps(key)[1:-1],
        "quote": lambda: quote(key, safe=""),
        "base64": lambda: base64.b64encode(before + key.encode() + after).decode(),
        "hex": lambda: key.encode().hex(),
    }[wrap]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "file"
        form = text.encode(encoding)
        path.write_bytes(before + form + after)
        report = scrub_folder(folder, [key])
        assert report.verified
        left = contents(folder)
        assert key.encode(encoding) not in left
        if wrap != "base64":
            assert form not in left
        assert not Forms.of([key]).holds(path.read_bytes() if path.exists() else b"")


@pytest.mark.parametrize("key", [KEY, ODD, "日本語のキー", "😀😀😀😀"])
def test_no_pattern_matches_more_than_is_kept_from_piece_to_piece(key):
    forms = Forms.of([key])
    pieces = [
        piece
        for encoding in ("ascii", "utf-16-le", "utf-32-be")
        for piece in _Patterns(encoding).all(key)
    ]
    assert max(piece.longest for piece in pieces) <= forms.longest


@given(at=st.integers(-40, 40), chunk=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_across_the_pieces_in_which_a_file_is_read(at, chunk):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "file")
        start = chunk * (1 << 20) + at
        path.write_bytes(b"x" * start + KEY.encode() + b"y" * 100)
        assert scrub_folder(Path(name), [KEY]).cleaned == 1
        assert path.read_bytes() == b"x" * start + b"[redacted]" + b"y" * 100


# --- what is no text --------------------------------------------------------------------------


def test_a_binary_with_the_key_is_deleted_and_one_without_stays(tmp_path):
    (tmp_path / "with").write_bytes(b"\0\1\2" + KEY.encode() + b"\0")
    (tmp_path / "without").write_bytes(b"\0\1\2\0")
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert report.deleted == ["with: the key is in it, and it is no text"]
    assert (tmp_path / "without").read_bytes() == b"\0\1\2\0"


def packed(data: bytes) -> dict[str, bytes]:
    as_zip, as_tar = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(as_zip, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/b.txt", data)
    with tarfile.open(fileobj=as_tar, mode="w:gz") as archive:
        info = tarfile.TarInfo("a/b.txt")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return {
        "zip": as_zip.getvalue(),
        "tar.gz": as_tar.getvalue(),
        "gz": gzip.compress(data),
        "two in one gz": gzip.compress(b"first") + gzip.compress(data),
        "bz2": bz2.compress(data),
        "xz": lzma.compress(data),
        "zlib": zlib.compress(data),
        "zlib within": b"\0\1PNG" + zlib.compress(data) + b"\0\1",
        "gz in zip in gz": gzip.compress(_zip_of(gzip.compress(data))),
    }


def _zip_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inner", data)
    return file.getvalue()


@pytest.mark.parametrize("kind", list(packed(b"")))
def test_what_is_packed_is_looked_into(tmp_path, kind):
    text = b"a long enough log, line by line\n" * 9
    clean = packed(text)[kind]
    (tmp_path / "clean").write_bytes(clean)
    (tmp_path / "not").write_bytes(packed(text + KEY.encode() + text)[kind])
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert (tmp_path / "clean").read_bytes() == clean
    assert not (tmp_path / "not").exists()
    assert len(report.deleted) == 1


def test_what_cannot_be_looked_into_is_deleted(tmp_path):
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    (tmp_path / "b.7z").write_bytes(b"7z\xbc\xaf\x27\x1c rest")
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"text" * 50)[:-9])
    (tmp_path / "d.zip").write_bytes(b"PK\x03\x04 torn")
    (tmp_path / "e.gz").write_bytes(gzip.compress(_zip_of(gzip.compress(_zip_of(b"deep")))))
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert [line.partition(":")[0] for line in sorted(report.deleted)] == [
        "a.zst", "b.7z", "c.gz", "d.zip", "e.gz",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_limits(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x" * 2000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\0" * 100_000))
    (tmp_path / "small").write_bytes(b"x" * 100)
    limits = Limits(file_bytes=1000, inside_bytes=50_000)
    report = scrub_folder(tmp_path, [KEY], limits=limits)
    assert report.verified
    assert sorted(report.deleted) == [
        "a.bin: it is too large to be looked through",
        "bomb.gz: too much is packed into it",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    (tmp_path / "small too").write_bytes(b"x" * 100)
    assert len(scrub_folder(tmp_path, [KEY], limits=Limits(total_bytes=150)).deleted) == 1


def test_there_is_an_end_to_looking_for_streams(tmp_path):
    (tmp_path / "file").write_bytes(b"x\x9c\0" * 1000)
    report = scrub_folder(tmp_path, [KEY], limits=Limits(inside_bytes=100_000))
    assert report.deleted == ["file: too much is packed into it"]


@pytest.mark.parametrize("run", [b"\\", b"%25", b"\\u0073", b"\n", b"\0", b"x\n"])
def test_runs_of_what_patterns_begin_with_take_no_longer_than_others(run):
    # Anything quadratic would take minutes.
    assert not Forms.of([KEY, ODD]).holds(run * (2_000_000 // len(run)))


def test_databases(tmp_path):
    for name, value in (("with.db", KEY), ("long.db", "x" * 4000 + KEY * 300), ("clean.db", "x")):
        with sqlite3.connect(tmp_path / name) as database:
            database.execute('CREATE TABLE "a ""b" (id, text)')
            database.execute('INSERT INTO "a ""b" VALUES (1, ?)', (value,))
        database.close()
    report = scrub_folder(tmp_path, [KEY])
    assert report.verified
    assert [path.name for path in tmp_path.iterdir()] == ["clean.db"]


def test_a_value_that_a_database_keeps_in_pieces(tmp_path):
    # The key lies across the pages that hold a long value.
    for length in range(4070, 4100, 3):
        with sqlite3.connect(tmp_path / f"{length}.db") as database:
            database.execute("CREATE TABLE a (text)")
            database.execute("INSERT INTO a VALUES (?)", ("x" * length + KEY + "y" * 9000,))
        database.close()
    scrub_folder(tmp_path, [KEY])
    assert list(tmp_path.iterdir()) == []
