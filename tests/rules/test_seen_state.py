"""The header by which a poll says what its caller has seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.rules import SeenState
from rollout.types import RolloutStatus


@given(status=st.sampled_from(RolloutStatus), started=st.booleans())
def test_the_header_comes_back_as_it_went(status, started):
    state = SeenState(status, started)
    assert SeenState.from_header(state.to_header()) == state
    assert state.to_header().isascii()


@pytest.mark.parametrize(
    ("header", "state"),
    [
        ("queued", SeenState(RolloutStatus.QUEUED)),
        ("running;agent-started", SeenState(RolloutStatus.RUNNING, True)),
        (" Running ; Agent-Started ", SeenState(RolloutStatus.RUNNING, True)),
        ("grading;from-the-future;agent-started", SeenState(RolloutStatus.GRADING, True)),
        ("running;agent-stopped", SeenState(RolloutStatus.RUNNING)),
        (None, None),
        ("", None),
        (";", None),
        ("agent-started", None),
        ("asleep", None),
        ("running, queued", None),
    ],
)
def test_what_is_read(header, state):
    assert SeenState.from_header(header) == state


@given(header=st.text())
def test_no_header_is_an_error(header):
    state = SeenState.from_header(header)
    assert state is None or isinstance(state.status, RolloutStatus)
