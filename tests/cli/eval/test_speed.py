"""The rate of a run, and the time that it has yet to go."""

from __future__ import annotations

import pytest

from rollout.cli.eval.progress import Speed, duration_text, rate_text


def test_nothing_is_said_before_an_attempt_has_ended():
    speed = Speed(100, 40)
    assert speed.rate(100) is None
    assert speed.rate(160) is None
    assert speed.remaining_sec(160, 50) is None


def test_what_had_ended_before_is_no_speed():
    speed = Speed(100, 40)
    speed.move(110, 45)
    assert speed.rate(110) == 0.5
    assert speed.remaining_sec(110, 50) == 10


def test_attempts_that_end_together_took_their_time():
    """Of sixteen at a time that take five minutes, one ends in about nineteen seconds."""
    speed = Speed(0, 0)
    for settled in range(1, 17):
        speed.move(300 + settled / 100, settled)
    assert speed.rate(300.2) == pytest.approx(16 / 300, rel=0.01)
    assert speed.remaining_sec(300.2, 160) == pytest.approx(2700, rel=0.01)


def test_without_an_end_the_rate_goes_down():
    speed = Speed(0, 0)
    speed.move(10, 10)
    assert [speed.rate(now) for now in (10, 20, 100)] == [1, 0.5, 0.1]


def test_a_run_that_got_slower_is_as_slow_as_of_late():
    speed = Speed(0, 0)
    for now in range(1, 1001):
        speed.move(now, 10 * now)
    assert speed.rate(1000) == pytest.approx(10)
    for now in range(1001, 3001):
        speed.move(now, 10_000 + (now - 1000) // 10)
    assert speed.rate(3000) == pytest.approx(0.1, rel=0.02)
    assert len(speed._steps) < 700


def test_a_slow_run_has_a_rate_however_slow_it_is():
    speed = Speed(0, 0)
    for settled in range(1, 101):
        speed.move(1000 * settled, settled)
    assert speed.rate(100_000) == pytest.approx(1 / 1000)
    assert len(speed._steps) < 50


def test_a_slow_run_is_not_judged_by_its_last_attempt():
    speed, now = Speed(0, 0), 0
    for settled in range(1, 100):
        now += (3000, 700, 700)[(settled - 1) % 3]
        speed.move(now, settled)
    assert speed.rate(now) == pytest.approx(3 / 4400, rel=0.05)


def test_many_at_once_cost_no_memory():
    speed = Speed(0, 0)
    for settled in range(1, 100_001):
        speed.move(settled / 1000, settled)
    assert speed.rate(100) == pytest.approx(1000)
    assert len(speed._steps) < 110


def test_a_clock_that_stands_still_divides_by_nothing():
    speed = Speed(5, 0)
    speed.move(5, 3)
    assert speed.rate(5) is None


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, "-/s"),
        (123.45, "123.5/s"),
        (1, "1.0/s"),
        (0.5, "30.0/min"),
        (1 / 60, "1.0/min"),
        (0.001, "3.6/h"),
    ],
)
def test_a_rate_is_written_in_a_unit_that_one_can_read(rate, text):
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "--:--"),
        (0, "00:00"),
        (6.2, "00:07"),
        (59.5, "01:00"),
        (3599.5, "1:00:00"),
        (3723, "1:02:03"),
        (86399.5, "1d 00:00"),
        (183_840, "2d 03:04"),
    ],
)
def test_a_time_is_written_as_clocks_do(seconds, text):
    assert duration_text(seconds) == text
