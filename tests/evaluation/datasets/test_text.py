from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import DatasetError
from rollout.evaluation.datasets._place import Place
from rollout.evaluation.datasets._text import csv_lines, decoded, json_lines, lookup_encoding

TEXT = '{"user_prompt": "é\U0001f600\u2028ſ"}\n'

MARKED = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}


def prompts(dataset):
    return [row.initial_messages[-1]["content"] for row in dataset.rows()]


@pytest.mark.parametrize("encoding", MARKED)
@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("form", ["a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_taken_off(dataset, encoding, said, form):
    text = TEXT if form == "a.jsonl" else 'user_prompt\n"é\U0001f600\u2028ſ"\n'
    data = MARKED[encoding] + text.encode(encoding)
    source = dataset(form, data, encoding=encoding if said else "auto")
    assert prompts(source) == ["é\U0001f600\u2028ſ"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "UTF8", "utf-8-sig", "u16"])
def test_names_that_leave_the_mark_open(dataset, encoding):
    assert prompts(dataset("a.jsonl", TEXT.encode(encoding), encoding=encoding)) == [
        "é\U0001f600\u2028ſ"
    ]


@pytest.mark.parametrize("encoding", [*MARKED, "utf-8-sig"])
def test_a_mark_may_be_missing_where_the_encoding_is_said(dataset, encoding):
    data = TEXT.encode(encoding.removesuffix("-sig"))
    assert prompts(dataset("a.jsonl", data, encoding=encoding)) == ["é\U0001f600\u2028ſ"]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "é\x85\xa0ÿ"),
        ("cp1252", "“€”"),
        ("shift_jis", "日本語表"),
        ("gb18030", "汉字€"),
        ("iso2022_jp", "日本語"),
        ("utf-7", "é+"),
    ],
)
def test_other_encodings(dataset, encoding, text):
    data = f'{{"user_prompt": "{text}"}}\n'.encode(encoding)
    assert prompts(dataset("a.jsonl", data, encoding=encoding)) == [text]


@pytest.mark.parametrize(
    "encoding", ["latin1x", "utf-9", "base64", "rot13", "hex", "", "a\0b", "é"]
)
def test_an_unknown_encoding_is_refused_at_once(encoding):
    with pytest.raises(DatasetError, match=r"encoding .* is unknown"):
        lookup_encoding(encoding, Place("a"))


@pytest.mark.parametrize("encoding", ["idna", "punycode", "undefined", "unicode_escape"])
def test_encodings_that_are_none_for_files(encoding):
    with pytest.raises(DatasetError, match="cannot be used for files"):
        lookup_encoding(encoding, Place("a"))


def test_opening_looks_the_encoding_up(dataset):
    with pytest.raises(DatasetError, match="'nope' is unknown"):
        dataset("a.jsonl", TEXT, encoding="nope")


@pytest.mark.parametrize(
    ("data", "encoding", "reason"),
    [
        (codecs.BOM_UTF8 + b"{}", "latin-1", "byte-order mark of utf-8, but"),
        (codecs.BOM_UTF16_LE + b"{\0}\0", "utf-8", "byte-order mark of utf-16-le, but"),
        (codecs.BOM_UTF16_LE + b"{\0}\0", "utf-16-be", "byte-order mark of utf-16-le, but"),
        (codecs.BOM_UTF32_LE + b"{\0\0\0", "utf-16", "byte-order mark of utf-32-le, but"),
        (b"{\0}\0", "utf-16", "has no byte-order mark; set encoding to utf-16-le or utf-16-be"),
        (b"{\0\0\0", "utf-32", "has no byte-order mark; set encoding to utf-32-le or utf-32-be"),
        (b"{\0}\0", "auto", "seems to be UTF-16 or UTF-32"),
        (b"\0\0\0{", "auto", "seems to be UTF-16 or UTF-32"),
    ],
)
def test_marks_that_contradict_or_are_missed(dataset, data, encoding, reason):
    with pytest.raises(DatasetError) as caught:
        dataset("a.jsonl", data, encoding=encoding).scan()
    assert reason in caught.value.reason
    assert caught.value.row is None


GOOD = '{"user_prompt": "é"}'


@pytest.mark.parametrize(
    ("encoding", "bad", "offset"),
    [
        ("utf-8", b"\xff", 0),
        ("utf-8", b"\xc3\xff", 0),
        ("utf-8", b"\xed\xa0\x80", 0),
        ("cp1252", b"\x81", 0),
        ("ascii", b"\x80", 0),
        ("utf-16-le", b"\x00\xdc", 0),
        ("utf-16-be", b"\xd8\x00\x00a", 0),
        ("utf-32-le", b"\x00\x00\x11\x00", 0),
        ("shift_jis", b"\x81\x00", 0),
        ("gb18030", b"\x81\x00", 0),
    ],
)
@pytest.mark.parametrize("padding", [0, 65_530, 65_531, 65_532, 65_533, 65_534, 65_535, 65_536])
def test_bad_bytes_are_named_by_row_and_byte(dataset, encoding, bad, offset, padding):
    good = GOOD.replace("é", "e" if encoding in {"ascii", "shift_jis", "gb18030"} else "é")
    head = f"{good}\n\n{good}\n{{".encode(encoding)
    head += " ".encode(encoding) * (padding - len(head))
    source = dataset("a.jsonl", head + bad + f"}}\n{good}\n".encode(encoding), encoding=encoding)
    with pytest.raises(DatasetError) as caught:
        source.scan()
    assert f"is not {encoding} (at byte {len(head) + offset})" in caught.value.reason
    assert (caught.value.row, caught.value.line) == (2, 4)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-32-be", "shift_jis"])
def test_a_file_that_is_cut_within_a_character(dataset, encoding):
    data = '{"user_prompt": "x日'.encode(encoding)
    with pytest.raises(DatasetError, match=f"is not {encoding}") as caught:
        dataset("a.jsonl", data[:-1], encoding=encoding).scan()
    assert f"at byte {len(data) - len('日'.encode(encoding))})" in caught.value.reason


@pytest.mark.parametrize(
    ("data", "row", "line"),
    [
        (b"user\xff_prompt\nu\n", None, 1),
        (b"user_prompt\n\xffu\n", 0, 2),
        (b'user_prompt\n"a\nb"\n"c\n\xff"\n', 1, 4),
        (b"user_prompt\ra\r\xffb\r", 1, 3),
        (b"user_prompt\r\na\r\n\xffb\r", 1, 3),
    ],
)
def test_bad_bytes_in_a_csv(dataset, data, row, line):
    with pytest.raises(DatasetError) as caught:
        dataset("a.csv", data).scan()
    assert f"is not utf-8 (at byte {data.index(255)})" in caught.value.reason
    assert (caught.value.row, caught.value.line) == (row, line)


def pieces(value, cuts):
    edges = [0, *sorted(cut % (len(value) + 1) for cut in cuts), len(value)]
    return [value[a:b] for a, b in pairwise(edges) if a < b]


cuts = st.lists(st.integers(0, 100), max_size=8)


@given(st.text(st.sampled_from('a,"\r\n\x85\u2028\x0b'), max_size=30), cuts)
def test_lines_are_the_same_wherever_the_text_is_cut(text, cuts):
    lines = list(csv_lines(pieces(text, cuts)))
    assert "".join(lines) == text
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    expected = unified.split("\n")
    assert [line.rstrip("\r\n") for line in lines] == (expected if expected[-1] else expected[:-1])
    expected = text.split("\n")
    assert list(json_lines(pieces(text, cuts))) == (expected if expected[-1] else expected[:-1])


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    cuts,
    st.sampled_from(list(MARKED)),
    st.booleans(),
)
def test_text_is_the_same_wherever_the_bytes_are_cut(text, cuts, encoding, marked):
    data = (MARKED[encoding] if marked else b"") + text.encode(encoding)
    # The first chunk of a file holds its mark as a whole.
    chunks = [data[:4], *pieces(data[4:], cuts)] if data[:4] else []
    if not marked and text.startswith("\ufeff"):
        text = text[1:]
    assert "".join(decoded(chunks, encoding, Place("a"))) == text
