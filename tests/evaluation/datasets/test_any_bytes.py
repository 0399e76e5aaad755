"""Whatever a file holds, each of its rows is what other readers find, or there is an error."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import DatasetError
from rollout.evaluation import DatasetConfig
from rollout.evaluation.datasets import _csv, open_dataset
from rollout.evaluation.datasets._place import Place


def read(name, data):
    """The rows of a file, or the error that both ways to read it raise."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        source = open_dataset(DatasetConfig(path=path))
        failed = None
        try:
            scan = source.scan()
        except DatasetError as error:
            failed = error
        if failed is not None:
            with pytest.raises(DatasetError) as again:
                list(source.rows())
            assert str(again.value) == str(failed)
            return failed
        rows = list(source.rows())
        assert len(rows) == scan.selected == scan.rows > 0
        return rows


FRAGMENTS = [
    *'{}[]:,"\\ \n\r\t-1e.',
    *("true", "null", "NaN", "1.50", "\u2028", "\x0b"),
    *("user_prompt", '"user_prompt": ', '"ground_truth": '),
    *('{"user_prompt": "u"', '{"user_prompt": "u"}\n'),
]

json_text = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@given(st.binary(max_size=40) | json_text.map(str.encode))
def test_jsonl(data):
    rows = read("a.jsonl", data)
    if isinstance(rows, DatasetError):
        return
    marks = {"utf-8": b"\xef\xbb\xbf", "utf-16": (b"\xff\xfe", b"\xfe\xff")}
    encoding = next((name for name, mark in marks.items() if data.startswith(mark)), "utf-8")
    lines = data.decode(encoding).removeprefix("\ufeff").split("\n")
    found = [json.loads(line) for line in lines if line.strip(" \t\r")]
    assert [row.initial_messages[-1]["content"] for row in rows] == [
        value["user_prompt"] for value in found
    ]
    for row, value in zip(rows, found, strict=True):
        truth = value.get("ground_truth")
        if isinstance(truth, str) or truth is None:
            assert row.label == truth
        else:
            assert json.loads(row.label) == truth


@given(st.text(st.sampled_from('a,"\n\r \tb\u2028'), max_size=25))
def test_what_is_taken_as_csv_is_what_the_standard_library_reads(text):
    try:
        found = list(_csv._Cells([text], ",", Place("a")).rows())
    except DatasetError:
        return
    expected = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = [cells for cells in expected if cells and (len(cells) > 1 or cells[0].strip(" \t"))]
    # Unlike it, a quoted cell that is blank is a row of one column.
    assert [cells for cells in found if len(cells) > 1 or cells[0].strip(" \t")] == rows


@given(st.binary(max_size=40) | st.text(st.sampled_from('a,"\n\r ')).map(str.encode))
def test_csv(data):
    rows = read("a.csv", b"user_prompt,x\n" + data)
    if not isinstance(rows, DatasetError):
        assert all(row.initial_messages[0]["content"] for row in rows)


def test_what_is_drawn_can_be_sound():
    assert len(read("a.jsonl", "".join(FRAGMENTS[-1:] * 3).encode())) == 3


def parquet_file():
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    columns = {"user_prompt": ["one", "two"], "metadata": [{"a": 1.5}, None]}
    pq.write_table(pa.table(columns), buffer, compression=None)
    return buffer.getvalue()


def test_parquet():
    good = parquet_file()
    # A footer that lies can make Arrow ask for any amount of memory, so it is left alone.
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")

    @given(st.integers(0, footer - 1), st.binary(min_size=1, max_size=4))
    def damaged(at, junk):
        data = good[:at] + junk + good[at + len(junk) :]
        rows = read("a.parquet", data[: len(good)])
        if not isinstance(rows, DatasetError):
            assert len(rows) == 2

    damaged()
