from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidFieldError
from rollout.evaluation.datasets import parse_rows
from rollout.evaluation.selection import Picker, RowRange, RowSelection


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0", [0]),
        ("3-3", [3]),
        ("0-2,5", [0, 1, 2, 5]),
        ("8-", [8, 9]),
        ("0-1,4,8-", [0, 1, 4, 8, 9]),
        (" 1 - 2 , 4 ", [1, 2, 4]),
        ("5,1-3,2-4,1", [1, 2, 3, 4, 5]),
        ("7-,2-3,3-8", [2, 3, 4, 5, 6, 7, 8, 9]),
        ("007", [7]),
    ],
)
def test_rows_are_those_of_the_ranges(text, rows):
    selection = parse_rows(text)
    assert [row for row in range(10) if row in selection] == rows


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("", 1),
        ("  ", 3),
        ("a", 1),
        ("1,", 3),
        ("1, ", 4),
        (",1", 1),
        ("1,,2", 3),
        ("-5", 1),
        ("1-2-3", 4),
        ("1 2", 3),
        ("0-9,5-3", 5),
        ("1.5", 2),
        ("0:5", 2),
        ("1,9999999999999999999", 3),
        ("0-9999999999999999999", 1),
        ("٣", 1),
        ("1\u2003", 2),
    ],
)
def test_nonsense_is_refused_by_its_position(text, character):
    with pytest.raises(InvalidFieldError, match=rf"at character {character}$") as caught:
        parse_rows(text)
    assert caught.value.field == "rows"


ranges = st.builds(
    lambda first, more: (first, None if more is None else first + more),
    st.integers(0, 30),
    st.none() | st.integers(0, 10),
)


@given(st.lists(ranges, min_size=1, max_size=6), st.integers(0, 40), st.integers(0, 5))
def test_a_selection_is_the_union_of_its_ranges(parts, row, more):
    def expected(at):
        return any(first <= at and (last is None or at <= last) for first, last in parts)

    text = ",".join(f"{first}-{'' if last is None else last}" for first, last in parts)
    selection = parse_rows(text)
    assert (row in selection) == expected(row)
    assert selection.overlaps(row, row + more) == any(map(expected, range(row, row + more + 1)))
    assert selection.ends_before(row) == (not any(map(expected, range(row, 60))))


def test_a_range_without_rows_is_named():
    selection = parse_rows("0-99,150,200-")
    assert selection.without_rows(1000) is None
    assert str(selection.without_rows(160)) == "200-"
    assert str(selection.without_rows(100)) == "150"
    assert RowSelection().without_rows(1) is None
    assert str(RowRange(3, 7)) == "3-7"


def test_a_limit_counts_selected_rows():
    picker = Picker(parse_rows("1,3-"), 2)
    assert picker.takes_any(0, 1)
    assert not picker.takes_any(0, 0)
    assert [row for row in range(10) if picker.takes(row)] == [1, 3]
    assert picker.is_done(4)
    assert not picker.takes_any(5, 9)


def test_without_a_limit_a_selection_ends_with_its_last_range():
    picker = Picker(parse_rows("1,3"), None)
    assert not picker.is_done(3)
    assert picker.is_done(4)
    assert not Picker(parse_rows("1-"), None).is_done(10**9)
