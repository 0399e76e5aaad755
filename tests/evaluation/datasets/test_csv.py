from __future__ import annotations

import csv
import threading

import pytest

from rollout.errors import DatasetError


def failure(dataset):
    with pytest.raises(DatasetError) as caught:
        dataset.scan()
    with pytest.raises(DatasetError) as again:
        list(dataset.rows())
    assert str(again.value) == str(caught.value)
    return caught.value


def where(error):
    return error.row, error.line, error.column


def prompts(dataset):
    return [row.initial_messages[-1]["content"] for row in dataset.rows()]


def test_a_row_has_all_columns(dataset):
    text = "system_prompt,user_prompt,ground_truth,metadata,other\n"
    text += 's,u,1.50,"{""a"": [1, null]}",x\n'
    (row,) = dataset("a.csv", text).rows()
    assert (row.index, row.line, row.label, row.metadata) == (0, 2, "1.50", {"a": [1, None]})
    assert row.initial_messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
    ]


@pytest.mark.parametrize("empty", ["", '""'])
def test_an_empty_cell_is_null(dataset, empty):
    text = "system_prompt,user_prompt,ground_truth,metadata,messages\n"
    text += f"{empty},u,{empty},{empty},{empty}\n"
    (row,) = dataset("a.csv", text).rows()
    assert row.initial_messages == [{"role": "user", "content": "u"}]
    assert row.label is None
    assert row.metadata is None


def test_text_is_taken_as_it_is(dataset):
    text = 'user_prompt,ground_truth\n  a b\t, NaN \n5" pipe,true\n"  ",null\n'
    rows = list(dataset("a.csv", text).rows())
    assert [row.initial_messages[0]["content"] for row in rows] == ["  a b\t", '5" pipe', "  "]
    assert [row.label for row in rows] == [" NaN ", "true", "null"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
def test_every_line_end_ends_lines_and_stays_within_quotes(dataset, end, last):
    lines = ["", "user_prompt,x", "", "a,1", " \t", f'"b{end}{end}c",2', "d,3"]
    source = dataset("a.csv", end.join(lines) + (end if last else ""))
    rows = list(source.rows())
    assert [(row.index, row.line) for row in rows] == [(0, 4), (1, 6), (2, 9)]
    assert prompts(source) == ["a", f"b{end}{end}c", "d"]
    assert source.scan().rows == 3


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1e", "\0"])
def test_other_separators_are_text(dataset, separator):
    source = dataset("a.csv", f"user_prompt,x\na{separator}b,1\n")
    assert prompts(source) == [f"a{separator}b"]


def test_quotes_are_doubled_within_quotes(dataset):
    text = 'user_prompt\n"say ""hi"", twice"\n""""\n""""""\n"a,""\n""b"\n'
    assert prompts(dataset("a.csv", text)) == ['say "hi", twice', '"', '""', 'a,"\n"b']


@pytest.mark.parametrize("delimiter", [";", "\t", "|", "é", " "])
def test_other_delimiters(dataset, delimiter):
    text = f'user_prompt{delimiter}ground_truth\n"a,{delimiter}b"{delimiter}c\n'
    (row,) = dataset("a.csv", text, delimiter=delimiter).rows()
    assert row.initial_messages[0]["content"] == f"a,{delimiter}b"
    assert row.label == "c"


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ("1,u", "ground_truth", "is missing: the row has 2 of 3 cells"),
        ("1", "user_prompt", "is missing: the row has 1 of 3 cells"),
        ("1,u,g,x", "ground_truth", "has 4 cells instead of 3"),
        ('"1\n2",u,g,', "ground_truth", "has 4 cells instead of 3"),
        ('1,"u', "user_prompt", "has a quote that is never closed"),
        ('1,"u"",g\n', "user_prompt", "has a quote that is never closed"),
        ('1,"u"v,g', "user_prompt", "goes on after its closing quote"),
        ('1,"u" ,g', "user_prompt", "goes on after its closing quote"),
        ('1, "u",g', "user_prompt", "has white space before its opening quote"),
        ("1,,g", "user_prompt", "is empty, and the row has no other prompt"),
        (",,", "user_prompt", "is empty, and the row has no other prompt"),
    ],
)
def test_a_bad_row_is_refused_by_row_line_and_column(dataset, row, column, reason):
    error = failure(dataset("a.csv", f'id,user_prompt,ground_truth\n1,"a\nb",g\n\n{row}'))
    assert where(error) == (1, 5, column)
    assert reason in error.reason


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("metadata", "{'a': 1}", "is not JSON"),
        ("metadata", "{} x", "Extra data at character 4"),
        ("metadata", " ", "Expecting value"),
        ("metadata", "[1]", "must be an object or null"),
        ("metadata", '{"a": NaN}', "holds NaN, which is not JSON"),
        ("metadata", '{"a": 1e999}', "beyond the range of floats"),
        ("metadata", '{"a": 1, "a": 1}', "has the key 'a' twice"),
        ("metadata", '{"a":' * 127 + "1" + "}" * 127, ""),
        ("metadata", '{"a":' * 128 + "1" + "}" * 128, "nests deeper than 127 levels"),
        ("messages", "hi", "is not JSON"),
        ("messages", '[{"role": "user"}]', "is given together with 'user_prompt'"),
    ],
)
def test_metadata_and_messages_are_json_text(dataset, column, cell, reason):
    quoted = cell.replace('"', '""')
    source = dataset("a.csv", f'user_prompt,{column}\nu,"{quoted}"\n')
    if reason:
        error = failure(source)
        assert where(error) == (0, 2, column)
        assert reason in error.reason
    else:
        assert source.scan().selected == 1


def test_messages_in_a_cell(dataset):
    text = 'messages\n" [{""role"": ""user"", ""content"": ""a\nb""}] "\n'.replace("a\nb", r"a\nb")
    assert prompts(dataset("a.csv", text)) == ["a\nb"]


def test_a_null_in_a_cell_of_json_is_null(dataset):
    (row,) = dataset("a.csv", "user_prompt,metadata\nu,null\n").rows()
    assert row.metadata is None


def test_cells_of_any_length_and_the_limit_of_the_csv_module_stays(dataset):
    limit = csv.field_size_limit()
    long = "x\n" * limit
    source = dataset("a.csv", f'user_prompt,ground_truth\n"{long}",{"y" * 3 * limit}\n')
    (row,) = source.rows()
    assert row.initial_messages[0]["content"] == long
    assert row.label == "y" * 3 * limit
    assert csv.field_size_limit() == limit


def test_many_passes_at_once(dataset):
    source = dataset("a.csv", "user_prompt\n" + '"a\nb"\n' * 500)
    counts = []
    threads = [
        threading.Thread(target=lambda: counts.append(len(list(source.rows())))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [500] * 4


@pytest.mark.parametrize(
    ("header", "column", "reason"),
    [
        ("user_prompt,x,x", "x", "has the column 'x' twice"),
        ("user_prompt,user_prompt", "user_prompt", "has the column 'user_prompt' twice"),
        ("id,prompt", None, "only 'id', 'prompt'; map yours with columns.user_prompt"),
        ("id;user_prompt", None, "the delimiter seems to be ';'"),
        ("id\tuser_prompt", None, "the delimiter seems to be a tab"),
        ("User_Prompt,x", "user_prompt", "but there is 'User_Prompt'"),
        ("user_prompt ,x", "user_prompt", "but there is 'user_prompt '"),
        ("user_prompt, ground_truth", "ground_truth", "but there is ' ground_truth'"),
        ("user_prompt,Ground Truth", "ground_truth", "but there is 'Ground Truth'"),
        ("MESSAGES,x", "messages", "but there is 'MESSAGES'"),
        ('"user_prompt', None, "has a quote that is never closed"),
    ],
)
def test_a_bad_header_is_refused(dataset, header, column, reason):
    error = failure(dataset("a.csv", f"{header}\n1,2\n"))
    assert (error.row, error.line, error.column) == (None, 1, column)
    assert reason in error.reason


def test_columns_without_a_name_may_be_several(dataset):
    source = dataset("a.csv", ",user_prompt,,\n0,u,,\n")
    assert prompts(source) == ["u"]


def test_many_columns_are_not_all_listed(dataset):
    names = ",".join(f"c{at}" for at in range(99))
    error = failure(dataset("a.csv", f"{names},{'x' * 500}\n"))
    assert "'c11' and 88 more" in error.reason


def test_long_names_are_cut_in_errors(dataset):
    error = failure(dataset("a.csv", f"user_prompt,{'x' * 500}\nu\n"))
    assert error.column == "x" * 80 + "…"


def test_rows_that_are_not_selected_are_only_counted(dataset):
    source = dataset("a.csv", 'user_prompt,x\na\nb,2\n"c",3,4\n', rows="1")
    assert prompts(source) == ["b"]
    assert source.scan().rows == 3


def test_a_blank_line_of_one_column(dataset):
    source = dataset("a.csv", 'user_prompt\na\n\n" "\n \nb\n')
    assert prompts(source) == ["a", " ", " ", "b"]
