"""The mapping of columns, and the rules of the config."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollout.errors import DatasetError, InvalidFieldError
from rollout.evaluation import DatasetColumns, DatasetConfig


def failure(dataset):
    with pytest.raises(DatasetError) as caught:
        dataset.scan()
    with pytest.raises(DatasetError) as again:
        list(dataset.rows())
    assert str(again.value) == str(caught.value)
    return caught.value


ALL = {
    "system_prompt": "sys",
    "user_prompt": "question",
    "ground_truth": "answer",
    "metadata": "info",
    "messages": "",
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.jsonl",
            '{"sys": "s", "question": "q", "answer": 42, "info": {"a": 1}, "messages": 7}',
        ),
        ("a.csv", 'sys,question,answer,info,messages\ns,q,42,"{""a"": 1}",x\n'),
    ],
)
def test_columns_are_mapped(dataset, name, text):
    (row,) = dataset(name, text, columns=ALL).rows()
    assert [message["content"] for message in row.initial_messages] == ["s", "q"]
    assert (row.label, row.metadata) == ("42", {"a": 1})


def test_a_mapped_column_that_no_row_has(dataset):
    text = '{"user_prompt": "u"}\n{"user_prompt": "u", "x": 1}\n'
    error = failure(dataset("a.jsonl", text, columns={"ground_truth": "answr"}))
    assert error.column == "answr"
    assert error.reason == "none of the selected rows has it"
    assert dataset("a.jsonl", text, columns={"ground_truth": "x"}).scan().selected == 2


def test_a_mapped_column_that_a_header_lacks(dataset):
    error = failure(dataset("a.csv", "user_prompt,x\nu,1\n", columns={"metadata": "info"}))
    assert error.column == "info"
    assert error.reason == "there is no such column, only 'user_prompt', 'x'"


def test_a_column_that_nearly_has_the_name(dataset):
    good = '{"user_prompt": "u", "x": 1}\n'
    error = failure(dataset("a.jsonl", f'{good}{{"user_prompt": "u", "Ground-Truth ": "x"}}\n'))
    assert (error.row, error.line, error.column) == (1, 2, "ground_truth")
    assert "but there is 'Ground-Truth '" in error.reason


def test_a_near_name_is_no_trouble_beside_the_right_one_or_when_it_is_mapped(dataset):
    text = '{"user_prompt": "u", "ground_truth": "a", "Ground_Truth": "b", "Messages": 7}'
    assert [row.label for row in dataset("a.jsonl", text).rows()] == ["a"]
    mapped = dataset("a.jsonl", text, columns={"ground_truth": "Ground_Truth"})
    assert [row.label for row in mapped.rows()] == ["b"]
    none = dataset("b.jsonl", '{"user_prompt": "u", "Metadata": 1}', columns={"metadata": ""})
    assert [row.metadata for row in none.rows()] == [None]


@pytest.mark.parametrize(
    ("text", "columns", "labels"),
    [
        ('{"user_prompt": "u", "label": 1.50}', {}, ["1.50"]),
        ('{"user_prompt": "u", "label": "a", "ground_truth": "b"}', {}, ["b"]),
        ('{"user_prompt": "u", "label": "a", "ground_truth": null}', {}, ["a"]),
        ('{"user_prompt": "u", "label": "a"}\n{"user_prompt": "u"}', {}, ["a", None]),
        ('{"user_prompt": "u", "label": "a"}', {"ground_truth": ""}, [None]),
        ('{"user_prompt": "u", "label": "a", "x": "b"}', {"ground_truth": "x"}, ["b"]),
        ('{"label": "u"}', {"user_prompt": "label"}, [None]),
    ],
)
def test_a_column_named_label_is_the_ground_truth_unless_there_is_one(
    dataset, text, columns, labels
):
    source = dataset("a.jsonl", text, columns=columns)
    assert [row.label for row in source.rows()] == labels
    assert source.scan().gradable == sum(label is not None for label in labels)


def test_a_label_of_a_csv(dataset):
    assert [row.label for row in dataset("a.csv", "user_prompt,label\nu,42\n").rows()] == ["42"]
    error = failure(dataset("b.csv", "user_prompt,LABEL\nu,42\n"))
    assert "but there is 'LABEL'" in error.reason


def test_a_column_without_a_name_is_never_used(dataset):
    source = dataset("a.jsonl", '{"user_prompt": "u", "": 1e400}', columns={"ground_truth": ""})
    assert [row.label for row in source.rows()] == [None]


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", ",Question\n0,q\n"), ("a.jsonl", '{"": 0, "Question": "q"}')]
)
def test_a_column_without_a_name_stands_for_no_role(dataset, name, text):
    """The index that pandas writes has an empty name; an empty name in the mapping is none."""
    error = failure(dataset(name, text, columns={"user_prompt": "question", "messages": ""}))
    assert error.column == "question"
    assert "but there is 'Question'" in error.reason
    error = failure(dataset(name, text, columns={"messages": ""}))
    assert error.reason.startswith("there is no column 'user_prompt', only")


def test_rows_of_many_shapes(dataset):
    text = "".join(f'{{"user_prompt": "u", "k{at}": 1}}\n' for at in range(600))
    assert dataset("a.jsonl", text).scan().selected == 600


@pytest.mark.parametrize(
    ("names", "field"),
    [
        ({"user_prompt": "messages"}, "messages"),
        ({"metadata": "x", "ground_truth": "x"}, "metadata"),
        ({"user_prompt": "", "messages": ""}, "user_prompt"),
        ({"user_prompt": " "}, "user_prompt"),
        ({"metadata": None}, "metadata"),
        ({"metadata": 7}, "metadata"),
    ],
)
def test_a_mapping_that_makes_no_sense(names, field):
    with pytest.raises(InvalidFieldError) as caught:
        DatasetColumns(**names)
    assert caught.value.field == field


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "\r", "\0", 1, None])
def test_a_delimiter_is_one_character(delimiter):
    with pytest.raises(InvalidFieldError) as caught:
        DatasetConfig(path="a.csv", delimiter=delimiter)
    assert caught.value.field == "delimiter"


@pytest.mark.parametrize("rows", ["", "a", "3-1", 7])
def test_the_selection_is_checked_by_the_config(rows):
    with pytest.raises(InvalidFieldError) as caught:
        DatasetConfig(path="a.csv", rows=rows)
    assert caught.value.field == "rows"


def test_pyarrow_is_not_imported_before_it_is_needed():
    code = "import sys, rollout.evaluation.datasets; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
