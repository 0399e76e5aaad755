"""Counts over time: bounded, and nothing of them lost when bins become longer."""

from __future__ import annotations

import pytest

from rollout.server.live.history import History, Recent


@pytest.mark.parametrize("seconds", [1, 119, 120, 1000, 86_400])
def test_bins_are_bounded_and_keep_every_count(seconds):
    history = History(100.0)
    for second in range(0, seconds, max(1, seconds // 500)):
        into = history.at(100.0 + second)
        into.admitted += 1
        into.rewards += 1
        into.reward_sum += second
    state = history.state()
    assert len(state["admitted"]) <= 120
    assert sum(state["admitted"]) == len(range(0, seconds, max(1, seconds // 500)))
    # The place of a bin says its time.
    for place, (count, mean) in enumerate(zip(state["rewards"], state["mean_reward"], strict=True)):
        assert (mean is None) == (count == 0)
        if mean is not None:
            assert place * state["bin_sec"] <= mean < (place + 1) * state["bin_sec"]


def test_a_rate_is_that_of_the_last_minute():
    recent = Recent()
    for second in range(300):
        recent.add(float(second))
        recent.add(second + 0.5)
    assert recent.rate(299.9, 0.0) == 2.0
    assert recent.rate(329.9, 0.0) == 1.0
    assert recent.rate(1000.0, 0.0) == 0.0
    recent.add(1001.0)
    assert recent.rate(1002.0, 998.0) == 0.25
