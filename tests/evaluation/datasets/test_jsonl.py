from __future__ import annotations

import json

import pytest

from rollout.codec import MAX_JSON_DEPTH
from rollout.errors import DatasetError


def labels(dataset):
    return [row.label for row in dataset.rows()]


def prompts(dataset):
    return [row.initial_messages[-1]["content"] for row in dataset.rows()]


def failure(dataset):
    """The error of a scan, which rows() raises just the same."""
    with pytest.raises(DatasetError) as caught:
        dataset.scan()
    with pytest.raises(DatasetError) as again:
        list(dataset.rows())
    assert str(again.value) == str(caught.value)
    return caught.value


def where(error):
    return error.row, error.line, error.column


def test_a_row_has_all_columns(dataset):
    source = dataset(
        "a.jsonl",
        '{"system_prompt": "s", "user_prompt": "u", "ground_truth": "g", "metadata": {"a": [1]},'
        ' "other": 1}\n',
    )
    (row,) = source.rows()
    assert (row.index, row.line, row.label, row.metadata) == (0, 1, "g", {"a": [1]})
    assert row.initial_messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
    ]


def test_what_is_missing_or_null_is_left_out(dataset):
    text = '{"user_prompt": "u"}\n'
    text += '{"user_prompt": "u", "system_prompt": null, "ground_truth": null, "metadata": null}\n'
    for row in dataset("a.jsonl", text).rows():
        assert row.initial_messages == [{"role": "user", "content": "u"}]
        assert row.label is None
        assert row.metadata is None


@pytest.mark.parametrize("name", ["a.ndjson", "A.JSONL", "my.data.jsonl"])
def test_the_name_tells_the_format(dataset, name):
    assert dataset(name, '{"user_prompt": "u"}').format == "jsonl"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_end_in_lf_or_crlf_and_blank_ones_are_no_rows(dataset, end, last):
    lines = ["", '{"user_prompt": "a"}', "", " \t ", '{"user_prompt": "b"}', ""]
    text = end.join(lines) + (end if last else "")
    source = dataset("a.jsonl", text)
    assert [(row.index, row.line) for row in source.rows()] == [(0, 2), (1, 5)]
    assert source.scan().rows == 2


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x7f", "\u200b", "\ufeff"])
def test_separators_within_strings_end_no_line(dataset, separator):
    text = f'{{"user_prompt": "a{separator}b"}}\n{{"user_prompt": "c"}}\n'
    assert prompts(dataset("a.jsonl", text)) == [f"a{separator}b", "c"]


@pytest.mark.parametrize(
    "escape", ["\\u000b", "\\f", "\\u001c", "\\n", "\\r", "\\u0000", "\\ud800"]
)
def test_escapes_are_taken(dataset, escape):
    text = f'{{"user_prompt": "a{escape}b"}}'
    assert prompts(dataset("a.jsonl", text)) == [json.loads(f'"a{escape}b"')]


@pytest.mark.parametrize("control", ["\x0b", "\x0c", "\x1e", "\t", "\0"])
def test_bare_control_characters_are_no_json(dataset, control):
    error = failure(dataset("a.jsonl", f'{{"user_prompt": "a{control}b"}}'))
    assert where(error) == (0, 1, "user_prompt")
    assert "Invalid control character at character 19" in error.reason


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "-0",
        "1.50",
        "1E5",
        "1e-400",
        "9" * 10_000,
        "true",
        "false",
        "[]",
        '{"b":  [1.50, null, "x"], "a": "\\u00e9"}',
        f"[{'7' * 5000}]",
    ],
)
def test_the_label_of_what_is_no_string_is_its_text_in_the_file(dataset, text):
    source = dataset("a.jsonl", f'{{"user_prompt": "u", "ground_truth":  {text} , "x": 1}}')
    assert labels(source) == [text]


def test_a_string_is_a_label_as_it_is(dataset):
    source = dataset("a.jsonl", '{"user_prompt": "u", "ground_truth": " \\"1.50\\"\\n"}')
    assert labels(source) == [' "1.50"\n']


@pytest.mark.parametrize("column", ["ground_truth", "metadata", "messages"])
@pytest.mark.parametrize("text", ["1e400", "-1e400", "[1e400]", "NaN", "[-Infinity]", "Infinity"])
def test_numbers_beyond_floats_are_refused_by_column(dataset, column, text):
    error = failure(dataset("a.jsonl", f'\n{{"user_prompt": "u", "{column}": {text}}}'))
    assert where(error) == (0, 2, column)
    assert "beyond the range of floats" in error.reason or "not JSON" in error.reason


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("1e-400", True),
        ("-0.001E-500", True),
        ("0e-400", False),
        ("-0.0", False),
        ("5e-324", False),
    ],
)
def test_a_number_that_would_become_zero_is_refused(dataset, text, refused):
    source = dataset("a.jsonl", f'{{"user_prompt": "u", "metadata": {{"a": {text}}}}}')
    if refused:
        assert "too small for a float" in failure(source).reason
    else:
        assert [row.metadata["a"] for row in source.rows()] == [float(text)]


def test_a_whole_number_too_long_to_be_sent_is_refused(dataset):
    text = f'{{"user_prompt": "u", "metadata": {{"a": {"1" * 10_000}}}}}'
    error = failure(dataset("a.jsonl", text))
    assert where(error) == (0, 1, "metadata")
    assert "too many digits" in error.reason


def test_numbers_of_unused_columns_may_be_anything(dataset):
    text = f'{{"user_prompt": "u", "a": 1e400, "b": {"1" * 10_000}}}'
    assert prompts(dataset("a.jsonl", text)) == ["u"]


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ('{"user_prompt": 7}', "user_prompt", "must be a string or null"),
        ('{"user_prompt": ["u"]}', "user_prompt", "must be a string or null"),
        ('{"user_prompt": null}', "user_prompt", "is empty, and the row has no other prompt"),
        ('{"user_prompt": "u", "system_prompt": true}', "system_prompt", "must be a string"),
        ('{"user_prompt": "", "metadata": {}}', "user_prompt", "no other prompt and no metadata"),
        ('{"user_prompt": "u", "metadata": "[]"}', "metadata", "must be an object or null"),
        ('{"user_prompt": "u", "metadata": "{"}', "metadata", "is not JSON: "),
        ('{"user_prompt": "u", "metadata": []}', "metadata", "must be an object or null"),
        ('{"user_prompt": "u", "user_prompt": "v"}', "user_prompt", "stands twice in the row"),
        ('{"user_prompt": "u", "x": 1, "x": 1}', "x", "stands twice in the row"),
        ('{"user_prompt": "u", "x": [{"k": 1, "k": 2}]}', "x", "has the key 'k' twice"),
        ('{"user_prompt": "u", "x": }', "x", "Expecting value at character 27"),
        ('{"user_prompt": "u", "x" 1}', "x", "Expecting ':' at character 26"),
        ('{"user_prompt": "u" "x": 1}', "user_prompt", "Expecting ',' or '}' at character 21"),
        ('{"user_prompt": "u",}', None, "Expecting a key in double quotes at character 21"),
        ("{'user_prompt': 'u'}", None, "Expecting a key in double quotes at character 2"),
        ('{"user_prompt": "u', "user_prompt", "Unterminated string"),
        ('{"user_prompt": "u"', "user_prompt", "Expecting ',' or '}'"),
        ('{"user_prompt": "u"} {}', None, "Extra data at character 22"),
        ('{"user_prompt": 01}', "user_prompt", "Expecting ',' or '}' at character 18"),
        ('{"user_prompt": "\\x"}', "user_prompt", "Invalid \\escape"),
        ("{", None, "ends within the object; an object must be on one line"),
        ("[1]", None, "one object a line, not an array"),
        ('"u"', None, "is not a JSON object"),
        ("null", None, "is not a JSON object"),
        ("hello", None, "Expecting an object"),
        ("{}", None, "there is no column 'user_prompt' or 'messages', only none"),
    ],
)
def test_a_bad_row_is_refused_by_row_line_and_column(dataset, text, column, reason):
    error = failure(dataset("a.jsonl", text))
    assert reason in error.reason
    assert where(error) == (0, 1, column)
    assert str(error).startswith(f"{error.path}, row 0 (line 1)")


def test_the_row_of_an_error_is_that_of_the_file(dataset):
    good = '{"user_prompt": "u"}\n'
    error = failure(dataset("a.jsonl", f"{good}\n{good}{{\n{good}"))
    assert where(error) == (2, 4, None)


def test_rows_before_a_bad_one_are_given_out(dataset):
    rows = dataset("a.jsonl", '{"user_prompt": "u"}\n{').rows()
    assert next(rows).index == 0
    with pytest.raises(DatasetError, match=r"row 1 \(line 2\)"):
        next(rows)


def test_rows_that_are_not_selected_are_only_counted(dataset):
    source = dataset("a.jsonl", '{"user_prompt": "a"}\n{\n{"user_prompt": "c"}\n', rows="0,2")
    assert prompts(source) == ["a", "c"]
    scan = source.scan()
    assert (scan.rows, scan.selected) == (3, 2)


@pytest.mark.parametrize(
    ("brackets", "fine"), [(MAX_JSON_DEPTH - 1, True), (MAX_JSON_DEPTH, False)]
)
@pytest.mark.parametrize("column", ["ground_truth", "unused"])
def test_depth_has_a_limit(dataset, brackets, fine, column):
    nested = "[" * brackets + "]" * brackets
    source = dataset("a.jsonl", f'{{"user_prompt": "[[", "{column}": {nested}}}')
    if fine:
        assert source.scan().selected == 1
    else:
        error = failure(source)
        assert (error.row, error.column) == (0, column)
        assert f"nests deeper than {MAX_JSON_DEPTH - 1} levels" in error.reason


def test_a_nest_of_a_million_is_refused_as_well(dataset):
    text = '{"user_prompt": "u", "metadata": ' + '{"a":' * 10**6
    assert "nests deeper" in failure(dataset("a.jsonl", text)).reason


def test_many_brackets_side_by_side_are_no_depth(dataset):
    text = json.dumps({"user_prompt": "[" * 500, "metadata": {"a": [[]] * 500}})
    assert dataset("a.jsonl", text).scan().selected == 1


def test_lone_carriage_returns_end_no_line_and_the_error_says_so(dataset):
    error = failure(dataset("a.jsonl", '{"user_prompt": "a"}\r{"user_prompt": "b"}\r'))
    assert r"\r alone does not end a line" in error.reason


def test_files_put_together_are_told_by_their_marks(dataset):
    line = '\ufeff{"user_prompt": "a"}\n'
    error = failure(dataset("a.jsonl", line * 2))
    assert "put together from several" in error.reason
    assert error.row == 1


def test_a_row_may_have_metadata_alone(dataset):
    text = '{"metadata": {"level": 2}}\n{"system_prompt": "Be brief.", "metadata": {"level": 3}}'
    bare, led = dataset("a.jsonl", text).rows()
    assert (bare.initial_messages, bare.metadata) == ([], {"level": 2})
    assert led.initial_messages == [{"role": "system", "content": "Be brief."}]


def test_metadata_may_be_its_json_text(dataset):
    rows = [{"user_prompt": "u", "metadata": text} for text in ('{"a": [1]}', " ", "{}")]
    source = dataset("a.jsonl", "\n".join(map(json.dumps, rows)))
    assert [row.metadata for row in source.rows()] == [{"a": [1]}, None, None]


def test_what_is_empty_counts_as_null(dataset):
    row = {
        "system_prompt": "",
        "user_prompt": "u",
        "ground_truth": "",
        "label": "7",
        "metadata": {},
    }
    (read,) = dataset("a.jsonl", json.dumps(row)).rows()
    assert read.initial_messages == [{"role": "user", "content": "u"}]
    assert (read.label, read.metadata) == ("7", None)


def test_a_message_list_is_a_prompt(dataset):
    messages = [{"role": "user", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "x"}]
    source = dataset("a.jsonl", json.dumps({"messages": messages, "ground_truth": 1}))
    (row,) = source.rows()
    assert row.initial_messages == messages
    assert row.label == "1"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("7", "must be a list of messages"),
        ("hi", "is not JSON: "),
        ({"role": "user"}, "must be a list of messages"),
        ([], "must hold a message at least"),
        ([{"role": "user"}, "hi"], "must be a list of objects; message 1 is not one"),
        ([{"content": "hi"}], "message 0 has no role"),
        ([{"role": "user"}, {"role": 7}], "message 1 has no role"),
        ([{"role": ""}], "message 0 has no role"),
    ],
)
def test_each_message_is_checked(dataset, messages, reason):
    error = failure(dataset("a.jsonl", json.dumps({"messages": messages})))
    assert where(error) == (0, 1, "messages")
    assert reason in error.reason


@pytest.mark.parametrize("other", ["user_prompt", "system_prompt"])
def test_messages_and_prompts_in_one_row_are_refused(dataset, other):
    text = json.dumps({"messages": [{"role": "user"}], other: "u"})
    error = failure(dataset("a.jsonl", text))
    assert where(error) == (0, 1, "messages")
    assert f"is given together with {other!r}" in error.reason
    source = dataset("b.jsonl", text, columns={other: ""})
    assert [row.initial_messages for row in source.rows()] == [[{"role": "user"}]]


def test_rows_of_both_forms_may_stand_in_one_file(dataset):
    text = '{"messages": [{"role": "x", "content": "a"}], "user_prompt": null}\n'
    text += '{"messages": null, "user_prompt": "b"}\n{"user_prompt": "c"}\n'
    assert prompts(dataset("a.jsonl", text)) == ["a", "b", "c"]
