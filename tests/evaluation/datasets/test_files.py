"""Files as such: missing, special, packed, changed; what is counted and selected."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import sys

import pytest

from rollout.errors import DatasetError
from rollout.evaluation import DatasetConfig
from rollout.evaluation.datasets import open_dataset
from rollout.evaluation.datasets._csv import read_csv
from rollout.evaluation.datasets._jsonl import read_jsonl
from rollout.evaluation.datasets._place import Place
from rollout.evaluation.datasets._source import CHUNK_BYTES
from rollout.evaluation.datasets._text import decoded
from rollout.evaluation.datasets.rows import RowBuilder
from rollout.evaluation.selection import Picker, RowSelection

ROW = b'{"user_prompt": "u"}\n'


def refusal(path, **settings):
    with pytest.raises(DatasetError) as caught:
        open_dataset(DatasetConfig(path=path, **settings))
    error = caught.value
    assert (error.row, error.line, error.column) == (None, None, None)
    assert error.path == str(path)
    return error.reason


def test_a_missing_file(tmp_path):
    assert refusal(tmp_path / "a.jsonl") == "there is no such file"


def test_a_folder(tmp_path):
    folder = tmp_path / "a.jsonl"
    folder.mkdir()
    assert refusal(folder) == "is a folder, not a file"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    assert "is not a regular file" in refusal(tmp_path / "a.jsonl")


@pytest.mark.skipif(sys.platform == "win32", reason="no device files here")
def test_a_device(tmp_path):
    link = tmp_path / "a.jsonl"
    link.symlink_to("/dev/null")
    assert "is not a regular file" in refusal(link)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("rollout.evaluation.datasets._source.os.open", refuse)
    path = tmp_path / "a.jsonl"
    assert refusal(path) == "cannot be opened: Permission denied"


def test_a_path_that_can_be_none(tmp_path):
    assert "cannot be opened" in refusal(tmp_path / "a\0b.jsonl")


def test_a_disk_that_fails(dataset, monkeypatch):
    source = dataset("a.jsonl", ROW)

    class Failing:
        def __init__(self, file):
            pass

        def read(self, size):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("rollout.evaluation.datasets._source._Hashed", Failing)
    with pytest.raises(DatasetError, match="cannot be read further: Input/output error"):
        source.scan()


@pytest.mark.parametrize("name", ["a", "a.txt", "a.json", "a.tsv", "a.jsonl.bak", "a.gz"])
def test_a_name_that_does_not_tell_the_format(tmp_path, name):
    assert 'set format = "jsonl"' in refusal(tmp_path / name)


def test_a_format_may_be_said(dataset):
    source = dataset("a.txt", "user_prompt\tx\nu\t1\n", format="csv", delimiter="\t")
    assert source.format == "csv"
    assert source.scan().rows == 1
    assert repr(source).endswith("a.txt' (csv)>")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("data", [b"", b"\n\r\n\n", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_a_file_without_rows(dataset, name, data):
    source = dataset(name, data)
    for read in (source.scan, lambda: list(source.rows())):
        with pytest.raises(DatasetError, match=r"a\.\w+: has no rows$"):
            read()


def test_a_header_alone(dataset):
    with pytest.raises(DatasetError, match="has no rows"):
        dataset("a.csv", "user_prompt,x\n").scan()


def test_a_scan_says_digest_and_counts(dataset):
    data = b"\n" + ROW * 5 + b"\n"
    source = dataset("a.jsonl", data, rows="1-3", limit=2)
    scan = source.scan()
    assert scan.digest == hashlib.sha256(data).hexdigest()
    assert (scan.rows, scan.selected) == (5, 2)
    assert [row.index for row in source.rows()] == [1, 2]


def test_rows_beyond_the_selection_are_not_read(dataset):
    source = dataset("a.jsonl", ROW * 2 + b"\xff{", limit=2)
    assert [row.index for row in source.rows()] == [0, 1]
    with pytest.raises(DatasetError, match="is not utf-8"):
        source.scan()


def test_a_limit_and_a_range_may_go_beyond_the_end(dataset):
    source = dataset("a.jsonl", ROW * 3, limit=100, rows="1-99")
    assert (source.scan().selected, len(list(source.rows()))) == (2, 2)


def test_ranges_that_overlap_select_a_row_once_in_the_order_of_the_file(dataset):
    source = dataset("a.jsonl", ROW * 9, rows="7-,2-4,3-5,4")
    assert [row.index for row in source.rows()] == [2, 3, 4, 5, 7, 8]
    assert source.scan().selected == 6


@pytest.mark.parametrize(("rows", "part"), [("3", "3"), ("0,7-9", "7-9"), ("2,5-,0", "5-")])
def test_a_part_of_the_selection_that_selects_nothing(dataset, rows, part):
    source = dataset("a.jsonl", ROW * 3, rows=rows)
    for read in (source.scan, lambda: list(source.rows())):
        with pytest.raises(DatasetError, match=f"has 3 rows, so that {part} selects none"):
            read()


# --- gzip ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.JSONL.GZ", "a.jsonl"])
def test_packed_files_are_unpacked_and_their_own_bytes_hashed(dataset, name):
    data = gzip.compress(ROW) + gzip.compress(ROW)
    source = dataset(name, data)
    scan = source.scan()
    assert (scan.rows, scan.digest) == (2, hashlib.sha256(data).hexdigest())
    assert len(list(source.rows())) == 2


def test_packed_csv(dataset):
    data = gzip.compress("\ufeffuser_prompt\nu\n".encode("utf-16-le"))
    assert dataset("a.csv.gz", data).scan().rows == 1


PACKED = gzip.compress(b"".join(ROW.replace(b"u", b"%d" % at, 1) for at in range(9)), mtime=0)


@pytest.mark.parametrize(
    "data",
    [ROW, PACKED[:-12], PACKED[:12], PACKED + b"junk", PACKED[:-8] + b"\0" * 8, PACKED[:10] + ROW],
)
def test_damage_in_a_packed_file(dataset, data):
    with pytest.raises(DatasetError, match=r"cannot be read further|is not JSON"):
        dataset("a.jsonl.gz", data).scan()


# --- changes ------------------------------------------------------------------------------------


def scanned(dataset, rows=3, **settings):
    source = dataset("a.jsonl", ROW * rows, **settings)
    source.scan()
    return source


@pytest.mark.parametrize("limit", [None, 1])
def test_a_file_of_another_size_is_noticed_at_once(dataset, limit):
    source = scanned(dataset, limit=limit)
    with source.config.path.open("ab") as file:
        file.write(ROW)
    with pytest.raises(DatasetError, match="changed after it was scanned"):
        next(source.rows())


@pytest.mark.parametrize("limit", [None, 1])
def test_other_bytes_of_the_same_size_are_noticed_at_once(dataset, limit):
    source = scanned(dataset, limit=limit)
    source.config.path.write_bytes(ROW.replace(b'"u"', b'"v"') * 3)
    os.utime(source.config.path, ns=(1, 1))
    with pytest.raises(DatasetError, match="changed after it was scanned"):
        next(source.rows())


def test_the_same_bytes_under_another_time_or_in_another_file_are_no_change(dataset):
    source = scanned(dataset)
    path = source.config.path
    os.utime(path, ns=(1, 1))
    assert len(list(source.rows())) == 3
    copy = path.with_name("copy")
    copy.write_bytes(ROW * 3)
    copy.replace(path)
    assert len(list(source.rows())) == 3


def test_bytes_that_change_in_secret_are_noticed_at_the_end(dataset, monkeypatch):
    source = scanned(dataset)
    stamp, _ = source._scanned[source.config.path]
    source.config.path.write_bytes(ROW.replace(b'"u"', b'"v"') * 3)
    monkeypatch.setattr("rollout.evaluation.datasets._source.Source.stamp", lambda _: stamp)
    rows = source.rows()
    assert [next(rows).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DatasetError, match="changed after it was scanned"):
        next(rows)


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("scan", [True, False])
def test_a_file_that_grows_while_it_is_read(dataset, limit, scan):
    source = dataset("a.jsonl", ROW * 3, limit=limit)
    if scan:
        source.scan()
    rows = source.rows()
    next(rows)
    with source.config.path.open("ab") as file:
        file.write(ROW)
    with pytest.raises(DatasetError, match="changed"):
        list(rows)


# Far more than is read at a time, so that what is rewritten is read in part from each version.
MANY = 200
LONG = b'{"user_prompt": "' + b"u" * 2_000 + b'"}\n'


@pytest.mark.parametrize("keep_size", [False, True])
@pytest.mark.parametrize("limit", [None, MANY - 1])
@pytest.mark.parametrize(
    "rewritten",
    [
        LONG.replace(b"uuu", b"", 1) * (MANY + 1),
        b"[" * len(LONG) * MANY,
        b"\xff" * len(LONG) * MANY,
        b"\n" * len(LONG) * MANY,
        b"",
    ],
    ids=["other-lengths", "no-json", "no-text", "no-rows", "cut"],
)
def test_rows_that_fail_since_the_file_was_rewritten_say_so(dataset, limit, keep_size, rewritten):
    source = dataset("a.jsonl", LONG * MANY, limit=limit)
    source.scan()
    rows = source.rows()
    next(rows)
    if keep_size:
        rewritten = rewritten[: len(LONG) * MANY].ljust(len(LONG) * MANY, b" ")
    source.config.path.write_bytes(rewritten)
    with pytest.raises(DatasetError, match="changed after it was scanned") as caught:
        list(rows)
    assert caught.value.row is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_rows_that_fail_since_bytes_changed_in_secret_say_so(dataset, monkeypatch, name):
    data = b"user_prompt\n" + b'"%b"\n' % (b"u" * 2_000) * MANY if ".csv" in name else LONG * MANY
    if name.endswith(".gz"):
        # Not packed any smaller, so that there is more than is read at a time.
        data = gzip.compress(data, compresslevel=0)
    source = dataset(name, data)
    source.scan()
    stamp, _ = source._scanned[source.config.path]
    rows = source.rows()
    next(rows)
    source.config.path.write_bytes(data[: len(data) // 2] + b'"' * (len(data) - len(data) // 2))
    monkeypatch.setattr("rollout.evaluation.datasets._source.Source.stamp", lambda _: stamp)
    with pytest.raises(DatasetError, match="changed after it was scanned"):
        list(rows)


@pytest.mark.parametrize("read", ["scan", "rows"])
def test_rows_that_fail_while_the_file_changes_say_so(dataset, monkeypatch, read):
    source = dataset("a.jsonl", LONG + b"{}\n")
    build = RowBuilder.build

    def meddle(builder, record):
        os.utime(source.config.path, ns=(1, 1))
        return build(builder, record)

    monkeypatch.setattr(RowBuilder, "build", meddle)
    with pytest.raises(DatasetError, match="changed while it was read"):
        source.scan() if read == "scan" else list(source.rows())


def test_a_second_scan_is_about_the_file_as_it_is_now(dataset):
    source = scanned(dataset)
    source.config.path.write_bytes(ROW + b"{}\n")
    with pytest.raises(DatasetError, match="there is no column") as caught:
        source.scan()
    assert caught.value.row == 1


def test_a_row_that_fails_in_a_file_that_is_the_same_is_still_named(dataset, monkeypatch):
    source = scanned(dataset)
    build = RowBuilder.build

    def refuse(builder, record):
        row = build(builder, record)
        if row.index == 1:
            raise DatasetError("a.jsonl", "is odd", row=1)
        return row

    monkeypatch.setattr(RowBuilder, "build", refuse)
    with pytest.raises(DatasetError, match="is odd") as caught:
        list(source.rows())
    assert caught.value.row == 1


@pytest.mark.parametrize("scan", [True, False])
def test_a_file_that_cannot_be_looked_at_any_more(dataset, monkeypatch, scan):
    source = dataset("a.jsonl", LONG * MANY)
    if scan:
        source.scan()
    rows = source.rows()
    next(rows)
    source.config.path.write_bytes(b"[" * len(LONG) * MANY)

    def gone(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("rollout.evaluation.datasets._source.Source.stamp", gone)
    with pytest.raises(DatasetError, match="is not JSON"):
        list(rows)


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(dataset):
    source = scanned(dataset)
    rows = source.rows()
    next(rows)
    other = source.config.path.with_name("other")
    other.write_bytes(b"something else")
    other.replace(source.config.path)
    assert len(list(rows)) == 2
    with pytest.raises(DatasetError, match="changed after it was scanned"):
        list(source.rows())


def test_a_file_that_changes_during_its_scan(dataset, monkeypatch):
    source = dataset("a.jsonl", ROW * 3)
    build = source._check_selection

    def meddle(place):
        os.utime(source.config.path, ns=(1, 1))
        build(place)

    monkeypatch.setattr(source, "_check_selection", meddle)
    with pytest.raises(DatasetError, match="changed while it was read"):
        source.scan()


def test_a_file_that_is_gone_after_its_scan(dataset):
    source = scanned(dataset)
    source.config.path.unlink()
    with pytest.raises(DatasetError, match="there is no such file"):
        list(source.rows())


def test_rows_that_are_left_early_leave_no_file_open(dataset):
    rows = scanned(dataset).rows()
    next(rows)
    file = rows.gi_frame.f_locals["source"].file
    rows.close()
    assert file.closed


# --- streaming ----------------------------------------------------------------------------------


def counted(data, size, seen):
    for at in range(0, len(data), size):
        seen.append(at)
        yield data[at : at + size]


def test_the_first_row_comes_before_the_rest_is_read():
    place = Place("a")
    picker = Picker(RowSelection(), None)
    seen = []
    texts = decoded(counted(ROW * 1000, 64, seen), "utf-8", place)
    rows = read_jsonl(texts, place, picker, labels=["ground_truth"], used=["user_prompt"])
    assert seen == []
    assert next(rows).text("user_prompt") == "u"
    assert len(seen) == 1
    assert place.row == 0
    for _ in range(9):
        next(rows)
    assert len(seen) == 4


def test_the_first_row_of_a_csv_comes_before_the_rest_is_read():
    place = Place("a")
    picker = Picker(RowSelection(), None)
    seen = []
    texts = decoded(counted(b"user_prompt\n" + b'"u\n"\n' * 1000, 64, seen), "utf-8", place)
    rows = read_csv(texts, place, picker, delimiter=",", check_header=seen.append)
    assert next(rows).text("user_prompt") == "u\n"
    assert seen == [0, ["user_prompt"]]
    for _ in range(20):
        next(rows)
    assert seen == [0, ["user_prompt"], 64]


def test_a_file_is_read_in_chunks(dataset):
    source = dataset("a.jsonl", ROW * 100_000)
    rows = source.rows()
    next(rows)
    file = rows.gi_frame.f_locals["source"].file
    assert file.tell() == CHUNK_BYTES
    rows.close()


def test_rows_in_another_order_come_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.evaluation.datasets.dataset._IN_ORDER_AT_A_TIME", 4)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"user_prompt": "{row}"}}\n' for row in range(10)))
    source = open_dataset(DatasetConfig(path=path, rows="1-"))
    source.scan()
    order = [9, 1, 5, 3, 2, 8, 4, 7, 6]
    found = list(source.rows_in(order))
    assert [row.index for row in found] == order
    assert [row.initial_messages[0]["content"] for row in found] == list(map(str, order))
