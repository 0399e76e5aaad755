"""The answer while a rollout is in flight has the same bytes on the short way."""

from __future__ import annotations

from datetime import UTC

from hypothesis import given
from hypothesis import strategies as st

from rollout.server.results import encode, encode_state
from rollout.types import RolloutResultResponse, RolloutStatus


@given(
    rollout_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        lambda text: text not in {".", ".."} and not set(text) & set("/\\\0")
    ),
    status=st.sampled_from(RolloutStatus),
    started=st.none() | st.datetimes(timezones=st.just(UTC)),
)
def test_the_short_way_says_the_same(rollout_id, status, started):
    response = RolloutResultResponse(rollout_id=rollout_id, status=status, agent_started_at=started)
    assert encode_state(rollout_id, status, started) == encode(response)
