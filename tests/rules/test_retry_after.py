"""What a ``Retry-After`` header asks for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.rules import retry_after_sec

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 1.0),
        ("", 1.0),
        ("   ", 1.0),
        ("5", 5.0),
        (" 5 ", 5.0),
        ("+5", 5.0),
        ("007", 7.0),
        ("1.5", 1.5),
        ("0", 0.05),
        ("0.01", 0.05),
        ("-1", 0.05),
        ("59.9", 59.9),
        ("60", 60.0),
        ("61", 60.0),
        ("9" * 5000, 60.0),
        ("inf", 1.0),
        ("-inf", 1.0),
        ("Infinity", 1.0),
        ("nan", 1.0),
        ("1e400", 1.0),
        ("1e3", 1.0),
        ("1_0", 1.0),
        ("0x10", 1.0),
        ("٣", 1.0),
        ("5, 5", 1.0),
        ("5;5", 1.0),
        ("5 s", 1.0),
        ("soon", 1.0),
        ("\x00", 1.0),
    ],
)
def test_seconds_and_nonsense(header, seconds):
    assert retry_after_sec(header, NOW) == seconds


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("Fri, 02 Jan 2026 03:04:35 GMT", 30.0),
        ("Friday, 02-Jan-26 03:04:35 GMT", 30.0),
        ("Fri Jan  2 03:04:35 2026", 30.0),
        ("Fri, 02 Jan 2026 03:04:35", 30.0),
        ("Fri, 02 Jan 2026 03:04:35 -0000", 30.0),
        ("Fri, 02 Jan 2026 04:04:35 +0100", 30.0),
        ("Fri, 02 Jan 2026 03:04:05 GMT", 0.05),
        ("Fri, 02 Jan 2026 03:04:00 GMT", 0.05),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.05),
        ("Fri, 02 Jan 2026 03:14:05 GMT", 60.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60.0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 60.0),
        ("Sat, 01 Jan 0001 00:00:00 +2359", 0.05),
        ("Fri, 32 Jan 2026 03:04:35 GMT", 1.0),
        ("Fri, 02 Jan 99999 03:04:35 GMT", 1.0),
        ("Fri, 02 Foo 2026 03:04:35 GMT", 1.0),
        ("2026-01-02T03:04:35Z", 1.0),
    ],
)
def test_dates(header, seconds):
    assert retry_after_sec(header, NOW) == seconds


def test_a_date_is_measured_against_any_aware_clock():
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-7)))
    assert retry_after_sec("Fri, 02 Jan 2026 03:04:35 GMT", elsewhere) == 30.0


@given(header=st.text() | st.text("0123456789 ,:-+GMTJanFeb."))
def test_whatever_the_header_says_the_wait_is_bounded(header):
    assert 0.05 <= retry_after_sec(header, NOW) <= 60.0


@given(seconds=st.integers(0, 10**12))
def test_whole_seconds_are_held_between_the_bounds(seconds):
    assert retry_after_sec(str(seconds), NOW) == sorted((0.05, seconds, 60.0))[1]


@given(seconds=st.integers(-(10**8), 10**8))
def test_every_date_is_held_between_the_bounds(seconds):
    header = format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)
    assert retry_after_sec(header, NOW) == sorted((0.05, seconds, 60.0))[1]
