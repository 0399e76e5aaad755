"""The examples of docs/datasets.md do what the page says."""

from __future__ import annotations

import gzip
import re
import tomllib
from pathlib import Path

import pytest

from rollout.errors import DatasetError
from rollout.evaluation import DatasetColumns, DatasetConfig
from rollout.evaluation.datasets import open_dataset

PAGE = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_rows(dataset):
    (example,) = blocks("json")
    first, second = dataset("a.jsonl", example).rows()
    assert [message["role"] for message in first.initial_messages] == ["system", "user"]
    assert (first.label, second.label) == ("42", "3.50")
    assert second.metadata == {"level": 2}


def test_the_error():
    (example,) = blocks("text")
    error = DatasetError(
        "questions.csv",
        "is not JSON: Expecting value at character 9",
        row=41,
        line=57,
        column="metadata",
    )
    assert f"{error}\n" == example


def test_the_configs(tmp_path):
    several = re.compile(r"^path = \[", re.MULTILINE)
    examples = blocks("toml")
    (files,) = filter(several.search, examples)
    pattern, packed = tomllib.loads(files)["dataset"]["path"]
    (tmp_path / "data").mkdir()
    for number in (2, 1):
        (tmp_path / pattern.replace("*", str(number))).write_text('{"user_prompt": "u"}\n')
    (tmp_path / packed).write_bytes(gzip.compress(b'{"user_prompt": "v"}\n'))
    assert (
        open_dataset(DatasetConfig(path=[tmp_path / pattern, tmp_path / packed])).scan().rows == 3
    )
    (hub,) = (each for each in examples if "hf://" in each)
    settings = tomllib.loads(hub)["dataset"]
    columns = DatasetColumns(**settings.pop("columns"))
    assert DatasetConfig(columns=columns, **settings).location == "hf://OWNER/NAME@REVISION"
    for example in (each for each in examples if each not in {files, hub}):
        settings = tomllib.loads(example)["dataset"]
        path = tmp_path / settings.pop("path")
        path.write_text("user_prompt,question,answer\n" + "a,b,c\n" * 300, "utf-8")
        columns = DatasetColumns(**settings.pop("columns", {}))
        scan = open_dataset(DatasetConfig(path=path, columns=columns, **settings)).scan()
        assert scan.selected == (300 if not settings else 100 + 1 + 100)


def test_the_program(tmp_path, capsys):
    (example,) = blocks("python")
    names = {"__name__": "documented"}
    exec(example, names)
    path = tmp_path / "a.jsonl"
    path.write_text('{"user_prompt": "u", "answer": 7}\n' * 101, "utf-8")
    assert names["labels"](path) == ["7"] * 100
    assert capsys.readouterr().out.startswith("100 of 101 rows, SHA-256 ")


LABELS = re.findall(r"^\| JSONL `([^`]+)`", PAGE, re.MULTILINE)


@pytest.mark.parametrize("text", LABELS)
def test_the_table_of_labels(dataset, text):
    (row,) = dataset("a.jsonl", f'{{"user_prompt": "u", "ground_truth": {text}}}').rows()
    assert row.label == text.strip('"')


def test_the_table_of_labels_is_found():
    assert len(LABELS) == 3
