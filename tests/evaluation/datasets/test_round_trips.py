"""What is written to a file in any format comes back equal, whatever is in it."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import json_objects, json_values

from rollout.evaluation import DatasetConfig
from rollout.evaluation.datasets import open_dataset

NASTY = "\n\r\x85\u2028\u2029\x0b\x0c\x1c\x00\t \"'\\,;{}[]:\ufeffé\U0001f600NaN"

texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(NASTY), max_size=20)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool"])}, optional={"content": texts, "x": json_values}
    ),
    min_size=1,
    max_size=3,
)
full_texts = texts.filter(bool)
"""An empty text counts as null."""
prompts = st.fixed_dictionaries(
    {"user_prompt": full_texts}, optional={"system_prompt": st.none() | texts}
)
rows = st.tuples(
    prompts | st.fixed_dictionaries({"messages": messages}),
    st.fixed_dictionaries({"metadata": st.none() | json_objects, "other": json_values}),
).map(lambda parts: {**parts[0], **parts[1]})


def read(name, data, **settings):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        source = open_dataset(DatasetConfig(path=path, **settings))
        scan = source.scan()
        found = list(source.rows())
        assert [row.index for row in found] == list(range(scan.rows))
        assert scan.selected == scan.rows
        return found


def initial(row):
    if row.get("messages") is not None:
        return row["messages"]
    system = row.get("system_prompt")
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": row["user_prompt"]}]


def as_text(value):
    """The label of a value that Python's json wrote with its standard settings."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


@given(
    st.lists(st.tuples(rows, json_values), min_size=1, max_size=4),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
    st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \t\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_jsonl(drawn, encoding, end, last, packed):
    content = [{**row, "ground_truth": label} for row, label in drawn]
    text = end.join(json.dumps(row) for row in content) + (end if last else "")
    data = text.encode(encoding)
    found = read("a.jsonl", gzip.compress(data, 1) if packed else data)
    assert [row.initial_messages for row in found] == [initial(row) for row in content]
    assert [row.metadata for row in found] == [row["metadata"] or None for row in content]
    assert [row.label for row in found] == [as_text(label) or None for _, label in drawn]


@given(
    st.lists(st.fixed_dictionaries({"user_prompt": full_texts, "ground_truth": texts}), min_size=1)
)
def test_jsonl_beyond_ascii(content):
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in content)
    found = read("a.jsonl", text.encode())
    assert [row.initial_messages for row in found] == [initial(row) for row in content]
    assert [row.label for row in found] == [row["ground_truth"] or None for row in content]


def cell_of(text, delimiter, quoted):
    """Write a cell; the csv module leaves line breaks bare that are not its own, up to 3.12."""
    if text is None:
        return ""
    if quoted or any(mark in text for mark in ('"', "\r", "\n", delimiter)):
        return '"' + text.replace('"', '""') + '"'
    return text


COLUMNS = ["other", "user_prompt", "ground_truth", "system_prompt", "metadata", "messages"]


@given(
    st.lists(st.tuples(rows, texts), min_size=1, max_size=4),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([",", ";", "\t", "|"]),
    st.booleans(),
)
def test_csv(drawn, encoding, end, delimiter, quoted):
    content = [{**row, "ground_truth": label} for row, label in drawn]
    lines = [delimiter.join(COLUMNS)]
    for row in content:
        cells = {name: row.get(name) for name in COLUMNS}
        for name in ("metadata", "messages", "other"):
            cells[name] = None if cells[name] is None else json.dumps(cells[name])
        lines.append(delimiter.join(cell_of(cells[name], delimiter, quoted) for name in COLUMNS))
    data = (end.join(lines) + end).encode(encoding)
    found = read("a.csv", data, delimiter=delimiter)
    assert [row.initial_messages for row in found] == [initial(row) for row in content]
    assert [row.metadata for row in found] == [row["metadata"] or None for row in content]
    assert [row.label for row in found] == [label or None for _, label in drawn]


@given(st.lists(st.tuples(rows, st.none() | texts), min_size=1, max_size=4), st.integers(1, 3))
def test_parquet(drawn, group):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    content = [{**row, "ground_truth": label} for row, label in drawn]

    def column(name):
        values = [row.get(name) for row in content]
        if name in {"metadata", "messages"}:
            values = [None if value is None else json.dumps(value) for value in values]
        return pa.array(values, pa.string())

    table = pa.table({name: column(name) for name in COLUMNS[1:]})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=group)
    found = read("a.parquet", buffer.getvalue())
    assert [row.initial_messages for row in found] == [initial(row) for row in content]
    assert [row.metadata for row in found] == [row["metadata"] or None for row in content]
    assert [row.label for row in found] == [label or None for _, label in drawn]
