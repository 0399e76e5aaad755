"""Invariant: a poll starts a retry only where it fits before the last confirmed end of the lease.

The whole loop runs on a simulated clock, against a plain simulation that knows no loop, no
schedule object and no cancel scope.
"""

from __future__ import annotations

import httpx
import pytest
import trio
import trio.testing
from client.fakes import FakeServer, admitted, after, bare_client, refused, result, run
from hypothesis import given
from hypothesis import strategies as st

from rollout.client import RolloutPollTimeoutError, RolloutProtocolError

ANSWERS = {
    "lost": httpx.ReadError("reset"),
    "gateway": refused(502),
    "running": result("running"),
    "success": result("success"),
}
ERRORS = {
    "lost": httpx.ReadError,
    "gateway": RolloutProtocolError,
    "trickle": RolloutPollTimeoutError,
}
# Never at a deadline to the last bit: the backoffs are multiples of 0.05 s, these end on 0.03.
LEASE_OFFSET = 0.03


def simulate(steps, wait, lease):
    """Return when each poll is sent, how it ends, and when."""
    now, deadline, times, known = 0.0, lease, [], "queued"
    steps = iter(steps)
    full = wait + 10
    while True:
        begun, earlier = now, None
        delays = {"lost": [0.1, 0.5], "gateway": [0.25, 0.5, 1, 2, 4, 8]}
        while True:
            times.append(now)
            kind, duration = next(steps)
            cut = deadline if earlier else now + max(lease, full)
            if now + duration > cut:
                return times, earlier or "trickle", cut
            sent, now = now, now + duration
            if kind in {"running", "success"}:
                break
            earlier = kind
            if not delays[kind] or now + delays[kind][0] + full >= deadline:
                return times, kind, now
            now += delays[kind].pop(0)
        if kind == "success":
            return times, kind, now
        deadline = sent + lease
        if known == "running" and now - begun < wait / 2:
            now += min(0.5, wait / 4)
        known = "running"


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["lost", "lost", "gateway", "gateway", "gateway", "running"]),
            st.sampled_from([0.0, 0.0, 0.5, 3.0, 10.0, 29.5, 60.0, 200.0]),
        ),
        max_size=25,
    ),
    wait=st.sampled_from([2, 30]),
    more=st.integers(1, 480).map(lambda quarters: quarters / 4)
    | st.integers(40, 52).map(lambda quarters: quarters / 4),
)
def test_polls_are_sent_when_the_simulation_sends_them(steps, wait, more):
    lease = wait + more + LEASE_OFFSET
    steps = [*steps, ("success", 0.0)]
    times, end, ended_at = simulate(steps, wait, lease)
    server = FakeServer(
        admissions=[admitted(wait=wait, lease=lease)],
        polls=[after(duration, ANSWERS[kind]) for kind, duration in steps],
    )

    async def main():
        if end == "success":
            assert (await run(bare_client(server))).status == "success"
        else:
            with pytest.raises(ERRORS[end]):
                await run(bare_client(server))
        return trio.current_time()

    clock = trio.testing.MockClock(autojump_threshold=0)
    assert trio.run(main, clock=clock) == pytest.approx(ended_at)
    assert server.times() == pytest.approx(times)
