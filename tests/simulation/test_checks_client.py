"""The checks of the client, on small traces that are bad in one way."""

from __future__ import annotations

import pytest
from simulation.written_traces import (
    CANCELLED,
    HANDLE,
    RETRIED,
    RUNNING,
    WELL,
    Bad,
    changed,
    violations,
)

BAD = [
    Bad(
        "retry-in-lease",
        "waited 0.050 s of a backoff of 0.1 s",
        RETRIED.replace("3.1 ", "3.05 "),
    ),
    Bad(
        "retry-in-lease",
        "with a request of 40 s and a lease until 122.000",
        changed(
            RETRIED,
            without="3.1\n3.35\n9",
            plus="82.1 client sent r route=poll request=4 fault=none",
        ),
    ),
    Bad(
        "retry-in-lease",
        "polled again after a final failure",
        changed(
            RETRIED,
            without="3.1\n3.35\n9",
            plus="""
                3.1 client sent r route=poll request=4 fault=none
                3.1 client answered r route=poll request=4 status=404
                4 client sent r route=poll request=5 fault=none
            """,
        ),
    ),
    Bad(
        "retry-in-lease",
        "polled again after a final failure",
        changed(
            RETRIED,
            without="3.1\n3.35\n9",
            plus="".join(
                f"""
                {at} client sent r route=poll request={at} fault=lost-before
                {at} client failed r route=poll request={at} error=ReadError
                """
                for at in (4, 5, 6)
            ),
        ),
    ),
    Bad(
        "retry-in-lease",
        "a retry outlived the lease",
        changed(
            RETRIED,
            without="3.35\n9",
            plus="""
                3.35 client sent r route=poll request=5 fault=trickle
                123 client answered r route=poll request=5 """
            + RUNNING,
        ),
    ),
    Bad(
        "retry-in-lease",
        "its admission was sent again",
        changed(
            WELL,
            without="1 client answered",
            plus="""
                1 client failed r route=admit request=1 error=ReadError
                1 client sent r route=admit request=9 fault=none
            """,
        ),
    ),
    Bad(
        "retry-in-lease",
        "a cancel request was sent again",
        changed(CANCELLED, plus="5 client sent r route=cancel request=9 fault=none"),
    ),
    Bad(
        "local-cancel",
        "a request followed its handle's cancel()",
        changed(HANDLE, plus="5 client sent r route=poll request=9 fault=none"),
    ),
    Bad(
        "local-cancel",
        "a request followed its handle's cancel()",
        changed(HANDLE, plus="4 client sent r route=cancel request=9 fault=none"),
    ),
    Bad(
        "local-cancel",
        "a request outlived its handle's cancel()",
        HANDLE.replace("4 client gave-up", "5 client gave-up"),
    ),
    Bad(
        "local-cancel",
        "a request outlived its handle's cancel()",
        changed(HANDLE, without="4 client gave-up"),
    ),
    Bad(
        "local-cancel",
        "cancel_rollout() ended its handle's polling",
        CANCELLED.replace("polling=true", "polling=false"),
    ),
    Bad(
        "local-cancel",
        "cancel_rollout() cancelled its handle",
        changed(CANCELLED, without="9 caller", plus="9 caller handle-was-cancelled r"),
    ),
    Bad(
        "local-cancel",
        "a result that no server had sent",
        changed(CANCELLED, without="9 client"),
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.invariant}: {bad.says}")
def test_a_bad_trace_has_its_violation(bad: Bad):
    found = violations(bad.text, bad.options, *bad.plans)
    assert any(v.invariant == bad.invariant and bad.says in v.message for v in found), found
