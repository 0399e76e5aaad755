from __future__ import annotations

import datetime as dt
import hashlib
import io
import sys
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import DatasetError
from rollout.evaluation.datasets import _parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def file_of(columns, **settings):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **settings)
    return buffer.getvalue()


def failure(dataset):
    with pytest.raises(DatasetError) as caught:
        dataset.scan()
    with pytest.raises(DatasetError) as again:
        list(dataset.rows())
    assert str(again.value) == str(caught.value)
    return caught.value


def labels(dataset, values, kind):
    data = file_of({"user_prompt": ["u"] * len(values), "ground_truth": pa.array(values, kind)})
    return [row.label for row in dataset("a.parquet", data).rows()]


@pytest.mark.parametrize("name", ["a.parquet", "a.pq"])
def test_rows_and_digest(dataset, name):
    data = file_of(
        {
            "user_prompt": ["a\u2028", "b\n"],
            "system_prompt": [None, ""],
            "ground_truth": ["", None],
            "metadata": [{"a": [1, None], "b": 1.5}, None],
            "other": [b"\xff", b""],
        }
    )
    source = dataset(name, data)
    scan = source.scan()
    assert (scan.rows, scan.selected) == (2, 2)
    assert scan.digest == hashlib.sha256(data).hexdigest()
    first, second = source.rows()
    assert first.initial_messages == [{"role": "user", "content": "a\u2028"}]
    assert second.initial_messages == [{"role": "user", "content": "b\n"}]
    assert (first.index, first.line, first.label) == (0, None, None)
    assert (second.index, second.line, second.label) == (1, None, None)
    assert first.metadata == {"a": [1, None], "b": 1.5}
    assert second.metadata is None


def test_messages_as_lists_of_structs_and_as_text(dataset):
    messages = [{"role": "user", "content": "hi"}]
    for value in (messages, '[{"role": "user", "content": "hi"}]'):
        (row,) = dataset("a.parquet", file_of({"messages": [value]})).rows()
        assert row.initial_messages == messages


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_kind_of_text(dataset, kind):
    data = file_of(pa.table({"user_prompt": pa.array(["a", "b", "a"], pa.string()).cast(kind)}))
    rows = dataset("a.parquet", data).rows()
    assert [row.initial_messages[0]["content"] for row in rows] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([True, False, None], pa.bool_(), ["true", "false", None]),
        ([1, -(2**63)], pa.int64(), ["1", "-9223372036854775808"]),
        ([2**64 - 1], pa.uint64(), ["18446744073709551615"]),
        ([0.1, 1.0, 1e22], pa.float64(), ["0.1", "1.0", "1e+22"]),
        ([0.1, 3.4028234663852886e38], pa.float32(), ["0.1", "3.4028235e+38"]),
        (
            [Decimal("1.50"), Decimal("1E+3"), Decimal("0E-2")],
            pa.decimal128(20, 2),
            ["1.50", "1000.00", "0.00"],
        ),
        ([{"a": "é", "b": [1.5, None]}], None, ['{"a": "é", "b": [1.5, null]}']),
        ([[], [1]], pa.list_(pa.int8()), ["[]", "[1]"]),
        ([None], pa.null(), [None]),
    ],
)
def test_labels_are_written_as_in_json(dataset, values, kind, expected):
    assert labels(dataset, values, kind) == expected


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_label_of_a_short_float_gives_the_same_float(value):
    text = _parquet._shortest(value, "f")
    assert pa.scalar(float(text), pa.float32()).as_py() == value
    assert len(Decimal(text).normalize().as_tuple().digits) <= 9


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("ground_truth", [1.5, float("nan")], "holds NaN or an infinity"),
        ("ground_truth", [[1.5], [float("inf")]], "holds NaN or an infinity"),
        ("ground_truth", ["a", None], ""),
        ("ground_truth", [None, dt.date(2030, 1, 1)], "holds a date, which has no JSON form"),
        ("ground_truth", [None, b"a"], "holds a bytes, which has no JSON form"),
        ("metadata", [None, {"a": float("nan")}], "holds NaN or an infinity"),
        ("metadata", [None, {"a": dt.datetime(2030, 1, 1, tzinfo=dt.UTC)}], "holds a datetime"),
        ("metadata", [None, {"a": Decimal("1.5")}], "holds a Decimal"),
        ("metadata", [None, [1]], "must be an object or null"),
        ("metadata", ["{}", "{"], "is not JSON"),
        ("metadata", ["", "1"], "must be an object or null"),
        ("system_prompt", [None, 1], "must be a string or null"),
        ("messages", [None, [{"role": "user"}]], "is given together with 'user_prompt'"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_row_and_column(dataset, column, values, reason):
    source = dataset("a.parquet", file_of({"user_prompt": ["u", "u"], column: values}))
    if not reason:
        assert source.scan().selected == 2
        return
    error = failure(source)
    assert (error.row, error.line, error.column) == (1, None, column)
    assert reason in error.reason


def test_maps_are_no_objects(dataset):
    values = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))
    error = failure(dataset("a.parquet", file_of({"user_prompt": ["u"], "metadata": values})))
    assert "holds a tuple" in error.reason


def test_depth_has_a_limit(dataset):
    def nested(depth):
        kind = pa.int8()
        value = 1
        for _ in range(depth):
            kind, value = pa.list_(kind), [value]
        return pa.array([value], kind)

    place = _parquet.Place("a")
    for depth in (127, 128):
        record = _parquet.ParquetRecord({"ground_truth": nested(depth)}, 0, place)
        if depth == 127:
            assert record.label("ground_truth") == "[" * 127 + "1" + "]" * 127
        else:
            with pytest.raises(DatasetError, match="nests deeper than 127 levels"):
                record.label("ground_truth")


def test_text_that_is_no_utf_8(dataset):
    bad = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"aa\xff")
    )
    error = failure(dataset("a.parquet", file_of({"user_prompt": bad})))
    assert (error.row, error.column) == (1, "user_prompt")
    assert error.reason == "is not UTF-8 (at byte 1 of the text)"


def test_objects_with_a_key_twice(dataset):
    part = pa.array([1], pa.int8())
    twice = pa.StructArray.from_arrays([part, part], names=["k", "k"])
    error = failure(dataset("a.parquet", file_of({"user_prompt": ["u"], "metadata": twice})))
    assert (error.row, error.column) == (0, "metadata")


def test_columns_that_are_missing_or_there_twice(dataset):
    error = failure(dataset("a.parquet", file_of({"prompt": ["u"]})))
    assert "only 'prompt'" in error.reason
    error = failure(dataset("a.parquet", file_of({"User_Prompt": ["u"]})))
    assert "but there is 'User_Prompt'" in error.reason
    column = pa.array(["u"])
    twice = pa.Table.from_arrays([column, column], names=["user_prompt", "user_prompt"])
    error = failure(dataset("a.parquet", file_of(twice)))
    assert "has the column 'user_prompt' twice" in error.reason


def test_names_with_dots(dataset):
    data = file_of({"a": [{"b": "no"}], "a.b": ["yes"], "c": [1]})
    (row,) = dataset("a.parquet", data, columns={"user_prompt": "a.b"}).rows()
    assert row.initial_messages[0]["content"] == "yes"


def test_no_rows(dataset):
    source = dataset("a.parquet", file_of({"user_prompt": pa.array([], pa.string())}))
    assert failure(source).reason == "has no rows"


@pytest.mark.parametrize(("rows", "limit"), [("3-12,19,17", None), ("18-", None), ("2-", 9)])
def test_selection_over_row_groups_and_batches(dataset, monkeypatch, rows, limit):
    monkeypatch.setattr(_parquet, "_BATCH_ROWS", 2)
    data = file_of({"user_prompt": [f"u{at}" for at in range(20)]}, row_group_size=5)
    source = dataset("a.parquet", data, rows=rows, limit=limit)
    expected = [at for at in range(20) if at in source._selection][:limit]
    found = list(source.rows())
    assert [row.index for row in found] == expected
    assert [row.initial_messages[0]["content"] for row in found] == [f"u{at}" for at in expected]
    scan = source.scan()
    assert (scan.rows, scan.selected) == (20, len(expected))


def test_row_groups_without_selected_rows_are_not_read(dataset):
    data = bytearray(file_of({"user_prompt": ["u" * 99, "v" * 99]}, row_group_size=1))
    at = data.index(b"v" * 30)
    data[at - 40 : at + 30] = b"\xff" * 70
    source = dataset("a.parquet", bytes(data), rows="0")
    assert source.scan().rows == 2
    error = failure(dataset("b.parquet", bytes(data)))
    assert error.row == 1
    assert "is damaged here" in error.reason


def test_a_group_of_which_arrow_gives_no_rows_at_all(dataset):
    data = file_of({"user_prompt": ["one", "two"], "other": [1, 2]}, compression=None)
    at = data.index(b"\x03\0\0\0two") + len(b"\x03\0\0\0two")
    assert data[at : at + 2] == b"\x15\0"
    error = failure(dataset("a.parquet", data[: at + 1] + b"\1" + data[at + 2 :]))
    assert error.row == 0
    assert "is damaged here" in error.reason


def test_a_name_that_is_no_utf_8(dataset):
    data = file_of({"user_prompt": ["u"], "other": [1]}, store_schema=False)
    error = failure(dataset("a.parquet", data.replace(b"other", b"oth\xffr")))
    assert "cannot be read as Parquet" in error.reason


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"user_prompt\nu\n", b"\x1f\x8b" * 99])
def test_what_is_no_parquet_file(dataset, data):
    error = failure(dataset("a.parquet", data))
    assert "cannot be read as Parquet" in error.reason


def test_a_file_that_is_cut(dataset):
    data = file_of({"user_prompt": ["u"] * 99})
    for length in range(0, len(data), 97):
        assert failure(dataset("a.parquet", data[:length])).row is None


def test_a_change_after_the_scan(dataset):
    source = dataset("a.parquet", file_of({"user_prompt": ["u"]}))
    source.scan()
    source.config.path.write_bytes(file_of({"user_prompt": ["u", "v"]}))
    with pytest.raises(DatasetError, match="changed after it was scanned"):
        next(source.rows())


@pytest.mark.parametrize("scan", [True, False])
def test_rows_that_fail_since_the_file_was_rewritten_say_so(dataset, scan):
    plain = {"row_group_size": 100, "compression": "NONE", "use_dictionary": False}
    data = file_of({"user_prompt": ["u" * 2_000] * 500}, **plain)
    source = dataset("a.parquet", data)
    if scan:
        source.scan()
    rows = source.rows()
    next(rows)
    source.config.path.write_bytes(b"?" * len(data))
    words = "changed after it was scanned" if scan else "changed while it was read"
    with pytest.raises(DatasetError, match=words):
        list(rows)


def test_a_change_while_it_is_read(dataset):
    source = dataset("a.parquet", file_of({"user_prompt": ["u", "v"]}))
    rows = source.rows()
    next(rows)
    with source.config.path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(DatasetError, match="changed while it was read"):
        list(rows)


def test_without_pyarrow_the_error_says_what_to_install(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DatasetError) as caught:
        dataset("a.parquet", b"")
    assert 'pip install "trio-rollout[parquet]"' in caught.value.reason
    assert dataset("a.jsonl", '{"user_prompt": "u"}').scan().rows == 1


def test_cells_much_larger_than_their_file_are_read_one_at_a_time(dataset, monkeypatch):
    """A value that repeats is kept once, so a small file can stand for any amount of memory."""
    monkeypatch.setattr(_parquet, "_BATCH_BYTES", 4 << 20)
    monkeypatch.setattr(_parquet, "_LARGEST_TEXT", 2 << 20)
    data = file_of({"user_prompt": ["a" * (3 << 20)] * 5}, compression="zstd")
    assert len(data) < 10_000
    error = failure(dataset("a.parquet", data))
    assert (error.row, error.column) == (0, "user_prompt")
    assert error.reason == "holds 3 MiB; the most is 2 MiB"
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    assert _parquet._batch_rows(group) == 1
    data = file_of({"user_prompt": ["a" * (1 << 20)] * 5}, compression="zstd")
    assert len(list(dataset("b.parquet", data).rows())) == 5
