"""Several files, patterns, and files that zstd has packed."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import import_module

import pytest

from rollout.errors import DatasetError, InvalidBodyError, InvalidFieldError
from rollout.evaluation import DatasetConfig, load_config
from rollout.evaluation.datasets import open_dataset

MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def lines(*prompts: str) -> bytes:
    return b"".join(json.dumps({"user_prompt": each}).encode() + b"\n" for each in prompts)


def write(folder, name, *prompts):
    path = folder / name
    if name.endswith(".parquet"):
        arrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"user_prompt": prompts}), path, row_group_size=2)
    elif name.endswith(".csv"):
        path.write_text("user_prompt\n" + "".join(f"{each}\n" for each in prompts))
    else:
        path.write_bytes(lines(*prompts))
    return path


def prompts(source):
    return [(row.index, row.initial_messages[0]["content"]) for row in source.rows()]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_rows_count_on_from_file_to_file(tmp_path, kind):
    files = [
        write(tmp_path, f"b.{kind}", "one", "two", "three"),
        write(tmp_path, f"a.{kind}", "four", "five", "six"),
    ]
    source = open_dataset(DatasetConfig(path=files))
    scan = source.scan()
    assert (scan.rows, scan.selected) == (6, 6)
    assert prompts(source) == list(enumerate(["one", "two", "three", "four", "five", "six"]))
    digests = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    assert scan.digest == hashlib.sha256(digests).hexdigest()
    some = open_dataset(DatasetConfig(path=files, rows="1,3-4", limit=2))
    assert (some.scan().rows, some.scan().selected) == (6, 2)
    assert prompts(some) == [(1, "two"), (3, "four")]
    reverse = open_dataset(DatasetConfig(path=files[::-1]))
    assert reverse.scan().digest != scan.digest
    assert f"{files[0]}, {files[1]}" in repr(source)


def test_a_pattern_takes_its_files_by_name_and_one_file_keeps_its_digest(tmp_path):
    write(tmp_path, "part-10.jsonl", "three")
    one = write(tmp_path, "part-02.jsonl", "one", "two")
    (tmp_path / "part-03.jsonl").mkdir()
    pattern = tmp_path / "part-*.jsonl"
    assert prompts(open_dataset(DatasetConfig(path=pattern))) == [
        (0, "one"),
        (1, "two"),
        (2, "three"),
    ]
    deep = open_dataset(DatasetConfig(path=tmp_path / "**" / "part-0?.jsonl"))
    assert deep.files == (one,)
    assert deep.scan().digest == hashlib.sha256(one.read_bytes()).hexdigest()
    with pytest.raises(DatasetError, match=r"x\*\.jsonl: no file matches this pattern"):
        open_dataset(DatasetConfig(path=tmp_path / "x*.jsonl"))
    with pytest.raises(DatasetError, match=r"part-02\.jsonl: is twice among the files"):
        open_dataset(DatasetConfig(path=[one, pattern]))


def test_a_file_may_be_named_like_a_pattern(tmp_path):
    write(tmp_path, "a1.jsonl", "other")
    path = write(tmp_path, "a[1].jsonl", "meant")
    assert prompts(open_dataset(DatasetConfig(path=path))) == [(0, "meant")]


def test_an_error_names_its_file_and_the_line_in_it(tmp_path):
    first, second = write(tmp_path, "a.jsonl", "one"), tmp_path / "b.jsonl"
    second.write_bytes(lines("two") + b"{\n")
    with pytest.raises(DatasetError) as caught:
        open_dataset(DatasetConfig(path=[first, second])).scan()
    assert (caught.value.path, caught.value.row, caught.value.line) == (str(second), 2, 2)
    with pytest.raises(DatasetError, match=r"a\.jsonl, .*b\.jsonl: has 2 rows, so that 7 selects"):
        second.write_bytes(lines("two"))
        open_dataset(DatasetConfig(path=[first, second], rows="7")).scan()
    with pytest.raises(DatasetError, match=r"c\.csv: is csv, but a\.jsonl is jsonl"):
        open_dataset(DatasetConfig(path=[first, write(tmp_path, "c.csv", "x")]))


def test_a_change_of_any_file_is_noticed(tmp_path):
    files = [write(tmp_path, "a.jsonl", "one"), write(tmp_path, "b.jsonl", "two")]
    source = open_dataset(DatasetConfig(path=files))
    source.scan()
    files[1].write_bytes(lines("three"))
    with pytest.raises(DatasetError, match=r"b\.jsonl: changed after it was scanned"):
        prompts(source)


def test_files_of_a_config_lie_in_its_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, "a.jsonl", "one")
    write(tmp_path / "sub", "b.jsonl", "two")
    config = tmp_path / "eval.toml"
    text = """
        [server]
        url = "http://127.0.0.1:1"
        [chat]
        url = "http://127.0.0.1:1/v1"
        [dataset]
        path = {}
        [run]
        output = "out"
        """
    config.write_text(text.format('["a.jsonl", "sub/*.jsonl"]'))
    assert prompts(open_dataset(load_config(config).dataset)) == [(0, "one"), (1, "two")]
    for path, reason in (("[]", "must name a file at least"), ("[1]", "must be a path")):
        config.write_text(text.format(path))
        with pytest.raises(InvalidBodyError, match=f"dataset.path: {reason}"):
            load_config(config)
    with pytest.raises(InvalidFieldError, match="must name a file at least"):
        DatasetConfig(path=())


# --- zstd ---------------------------------------------------------------------------------------


@pytest.fixture
def zstd():
    return pytest.importorskip(MODULE, reason="needs the extra zstd")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.JSONL.ZST", "a.jsonl"])
def test_zstd_is_unpacked_and_its_own_bytes_hashed(dataset, zstd, name):
    data = zstd.compress(lines("one")) + zstd.compress(lines("two"))
    source = dataset(name, data)
    scan = source.scan()
    assert (scan.rows, scan.digest) == (2, hashlib.sha256(data).hexdigest())
    assert prompts(source) == [(0, "one"), (1, "two")]


def test_csv_in_zstd(dataset, zstd):
    assert dataset("a.csv.zst", zstd.compress(b"user_prompt\nu\n")).scan().rows == 1


def test_damage_in_zstd(dataset, zstd):
    packed = zstd.compress(lines(*map(str, range(99))))
    for data in (packed[:-5], packed[:12], packed + b"junk", lines("one"), b""):
        with pytest.raises(DatasetError, match=r"cannot be read further|has no rows"):
            dataset("a.jsonl.zst", data).scan()


def test_without_zstd_the_extra_is_named(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(ImportError):
        import_module(MODULE)
    with pytest.raises(DatasetError, match=r'pip install "trio-rollout\[zstd\]"'):
        dataset("a.jsonl.zst", b"")
