"""What is known of a rollout that has ended, and which ones are run again."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime

import httpx
import pytest
import trio
from client.fakes import FakeServer, admitted, client_of, refused, result

from rollout.client import (
    FinishedRollout,
    RolloutAdmissionTimeoutError,
    RolloutProtocolError,
    RolloutRetry,
)
from rollout.errors import InvalidFieldError
from rollout.types import RolloutErrorCategory, RolloutInitRequest, RolloutResultResponse

STARTED = "2026-01-31T12:00:00Z"
WHEN = datetime(2026, 1, 31, 12, tzinfo=UTC)
REQUEST = RolloutInitRequest(
    rollout_id="r", initial_messages=[], chat_completions_url="http://chat/v1"
)
GONE = httpx.ConnectError("refused")


async def run(server, **options):
    async with client_of(server, feed=False) as client:
        async with client.run_rollouts([REQUEST], max_in_flight=1, **options) as finished:
            return await finished.receive()


@pytest.mark.parametrize(
    ("admission", "polls", "known"),
    [
        (GONE, [], ("no", None, True)),
        (httpx.PoolTimeout("full"), [], ("no", None, True)),
        (refused(409), [], ("no", None, True)),
        (refused(503, "the server is shutting down"), [], ("no", None, True)),
        (httpx.Response(503, text="upstream reset"), [], ("unknown", None, False)),
        (refused(500), [], ("unknown", None, False)),
        (httpx.ReadError("reset"), [], ("unknown", None, False)),
        (httpx.Response(202, text="junk"), [], ("unknown", None, False)),
        (admitted(), [GONE], ("yes", None, False)),
        (admitted(), [result("running", agent_started_at=STARTED), GONE], ("yes", WHEN, False)),
        (admitted(), [result("failure")], ("yes", None, True)),
        (admitted(), [result("failure", agent_started_at=STARTED)], ("yes", WHEN, False)),
    ],
    ids=range(12),
)
async def test_a_finished_rollout_says_how_far_it_came(autojump_clock, admission, polls, known):
    ended = await run(FakeServer(admissions=[admission], polls=polls))
    assert (ended.admitted, ended.agent_started_at, ended.never_began) == known
    for twin in (copy.copy(ended), pickle.loads(pickle.dumps(ended))):
        assert (twin.admitted, twin.agent_started_at, twin.attempts) == (*known[:2], 1)


async def test_what_has_not_begun_is_run_again_under_a_new_id(autojump_clock):
    server = FakeServer(
        admissions=[GONE, admitted("r-again-1"), admitted("r-again-2")],
        polls=[result("failure", "r-again-1"), result("success", "r-again-2")],
    )
    ended = await run(server, retry=RolloutRetry())
    assert ended.request is REQUEST
    assert (ended.succeeded, ended.attempts, ended.result.rollout_id) == (True, 3, "r-again-2")
    assert server.times("/rollout") == pytest.approx([0, 1, 3])


async def test_the_attempts_are_bounded(autojump_clock):
    server = FakeServer(admissions=[GONE])
    ended = await run(server, retry=RolloutRetry(attempts=7))
    assert (ended.outcome, ended.attempts) == (GONE, 7)
    assert server.times("/rollout") == pytest.approx([0, 1, 3, 7, 15, 31, 61])


async def test_what_is_left_between_two_attempts_is_not_cancelled_on_the_server(autojump_clock):
    server = FakeServer(admissions=[admitted()], polls=[result("failure")])
    async with client_of(server, feed=False) as client:
        retry = RolloutRetry()
        async with client.run_rollouts([REQUEST], max_in_flight=1, retry=retry):
            await trio.sleep(0.5)
    assert not server.times("/cancel")


def failed(category="agent_error", *, status="failure", started=None, source=None):
    outcome = RolloutResultResponse(
        rollout_id="r",
        status=status,
        err_category=RolloutErrorCategory(category),
        agent_started_at=started,
        err_source=source,
    )
    return FinishedRollout(REQUEST, outcome)


def broken(error, how):
    return FinishedRollout(REQUEST, error, admitted=how)


@pytest.mark.parametrize(
    ("ended", "by_default", "infrastructure"),
    [
        (failed("agent_error"), True, True),
        (failed("timeout"), True, True),
        (failed("validation_error"), False, False),
        (failed("agent_error", started=WHEN), False, False),
        (failed("timeout", started=WHEN), False, False),
        (failed("http_error", started=WHEN), False, True),
        (failed("internal_error", started=WHEN), False, True),
        (failed("lease_expired", started=WHEN), False, True),
        (failed("agent_error", started=WHEN, source="model_endpoint"), False, True),
        (failed("validation_error", started=WHEN, source="model_endpoint"), False, True),
        (failed(status="success"), False, False),
        (failed(status="cancelled"), False, False),
        (broken(GONE, "no"), True, True),
        (broken(GONE, "yes"), False, True),
        (broken(httpx.ReadError("reset"), "unknown"), False, True),
        (broken(RolloutProtocolError("closing", status_code=503), "no"), True, True),
        (broken(RolloutProtocolError("taken", status_code=409), "no"), False, False),
        (broken(RolloutProtocolError("restarted", status_code=404), "yes"), False, True),
        (broken(InvalidFieldError("label", "is wrong"), "no"), False, False),
        (broken(RolloutAdmissionTimeoutError("full"), "no"), False, False),
    ],
    ids=range(20),
)
def test_what_is_worth_another_attempt(ended, by_default, infrastructure):
    assert RolloutRetry().wants(ended) is by_default
    assert RolloutRetry(infrastructure=True).wants(ended) is infrastructure
    assert not RolloutRetry(attempts=1, infrastructure=True).wants(ended)


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"attempts": True}, {"infrastructure": 1}])
def test_a_retry_that_makes_no_sense_is_refused(fields):
    with pytest.raises(InvalidFieldError):
        RolloutRetry(**fields)
