"""Attempts that are tried again, at once or by the next call; and those that never are."""

from __future__ import annotations

import httpx
import pytest
import trio
from evaluation.run.cases import all_keys, config_of, keys, record, run_all, scripted
from evaluation.run.fake import failure, refused, success
from hypothesis import given
from hypothesis import strategies as st

import rollout.evaluation.run
from rollout.evaluation import AttemptOutcome, evaluate, final_records, read_records
from rollout.evaluation.rules import setup_retry_delay_sec, wants_setup_retry


@pytest.fixture(autouse=True)
def delays(monkeypatch):
    """The waits before tries, which take no time here."""
    asked = []
    monkeypatch.setattr(
        rollout.evaluation.run, "setup_retry_delay_sec", lambda used: asked.append(used) or 0
    )
    return asked


def ending(*results):
    """End the tries of each attempt like that, one after the other; the last one repeats."""

    async def end(started):
        number = end.seen.get((started.row, started.attempt), 0)
        end.seen[started.row, started.attempt] = number + 1
        return results[min(number, len(results) - 1)]

    end.seen = {}
    return end


SETUP = failure("http_error", started=False)


async def test_a_failed_setup_is_tried_again_under_a_fresh_id(tmp_path, server, delays):
    server.end = ending(SETUP, SETUP, success())
    config = config_of(tmp_path, server="http://fake", rows=scripted(1), retry_setup_failures=3)
    run, records = await run_all(config)
    assert [r.superseded for r in records] == [True, True, False]
    assert [r.retry for r in records] == [0, 1, 2]
    assert [r.outcome for r in records] == ["failure", "failure", "success"]
    assert len({r.rollout_id for r in records}) == 3
    assert delays == [0, 1]
    assert list(read_records(run.folder)) == records  # the failed ones stay on record
    assert list(final_records(run.folder)) == records[2:]
    assert run.progress.retries == 2
    assert run.progress.outcomes == {AttemptOutcome.SUCCESS: 1}
    assert {r.trajectory for r in records} == {"0-0-0.json", "0-0-1.json", "0-0-2.json"}
    assert run.metrics.results.attempts.passed == 1


async def test_the_budget_is_for_each_attempt(tmp_path, server, delays):
    server.end = ending(SETUP)
    config = config_of(
        tmp_path, server="http://fake", rows=scripted(2), n=2, retry_setup_failures=2
    )
    run, _ = await run_all(config)
    assert set(server.tries.values()) == {3}
    assert run.progress.outcomes == {AttemptOutcome.FAILURE: 4}
    assert run.metrics.results.attempts.settled == 4
    assert len(delays) == 8


@pytest.mark.parametrize("result", [failure("timeout"), failure("http_error"), failure()])
async def test_an_agent_that_ran_is_never_rolled_again(tmp_path, server, result):
    server.end = ending(result)
    config = config_of(tmp_path, server="http://fake", rows=scripted(3), retry_setup_failures=9)
    run, records = await run_all(config)
    assert server.tries.total() == len(records) == 3
    assert not any(r.superseded for r in records)
    assert run.complete


@pytest.mark.parametrize(
    ("refusal", "retried"),
    [
        (refused(409), True),
        (refused(422), True),
        (refused(503), True),
        (httpx.ConnectError("no"), True),
        (httpx.ConnectTimeout("no"), True),
        (refused(500), False),
        (refused(502), False),
        (refused(504), False),
        (httpx.ReadError("cut"), False),
        (httpx.ReadTimeout("late"), False),
        (httpx.RemoteProtocolError("half"), False),
        (httpx.Response(202, content=b"not json"), False),
    ],
)
async def test_only_what_was_surely_not_admitted_is_tried_again(tmp_path, server, refusal, retried):
    server.admit = lambda _: refusal if server.tries.total() == 1 else None
    config = config_of(tmp_path, server="http://fake", rows=scripted(1), retry_setup_failures=1)
    _, records = await run_all(config)
    assert [r.superseded for r in records] == ([True, False] if retried else [False])
    assert records[0].outcome == "error"
    assert records[0].may_have_run is not retried
    assert records[0].agent_started_at is None


async def test_none_by_default(tmp_path, server):
    server.end = ending(SETUP, success())
    _, records = await run_all(config_of(tmp_path, server="http://fake", rows=scripted(2)))
    assert [r.outcome for r in records] == ["failure", "failure"]


async def test_left_in_the_middle_the_budget_goes_on(tmp_path, server, monkeypatch):
    server.end = ending(SETUP)
    config = config_of(tmp_path, server="http://fake", rows=scripted(1), retry_setup_failures=3)
    monkeypatch.setattr(rollout.evaluation.run, "setup_retry_delay_sec", lambda _: 3600)
    async with evaluate(config) as run:
        first = await anext(aiter(run))
    assert first.superseded
    monkeypatch.setattr(rollout.evaluation.run, "setup_retry_delay_sec", lambda _: 0)
    run, records = await run_all(config)
    assert [(r.retry, r.superseded) for r in records] == [(1, True), (2, True), (3, False)]
    assert run.progress.resumed == 0


async def test_retry_failed(tmp_path, server):
    async def end(started):
        return [success(), failure(), SETUP][started.row % 3]

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(6))
    before, old = await run_all(config)
    assert before.progress.outcomes == {AttemptOutcome.SUCCESS: 2, AttemptOutcome.FAILURE: 4}
    server.end = None
    run, records = await run_all(config, retry_failed=True)
    assert run.progress.resumed == 2
    assert keys(records) == [(1, 0), (2, 0), (4, 0), (5, 0)]
    assert all(r.retry == 1 for r in records)
    assert run.progress.outcomes == {AttemptOutcome.SUCCESS: 6}
    assert run.metrics.results.attempts.passed == 6
    assert len(list(read_records(run.folder))) == len(old) + len(records)
    assert (run.folder / "trajectories" / "1-0-0.json").exists()
    assert (await run_all(config, retry_failed=True))[1] == []


async def test_a_failure_that_was_replaced_counts_no_longer(tmp_path, server):
    server.end = ending(failure(), success())
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    await run_all(config)
    await run_all(config, retry_failed=True)
    run, records = await run_all(config)
    assert records == []
    assert run.progress.outcomes[AttemptOutcome.FAILURE] == 0
    assert run.progress.settled == run.progress.outcomes[AttemptOutcome.SUCCESS] == 2


async def test_retry_failed_that_was_left_keeps_the_failure(tmp_path, server):
    server.end = ending(failure())
    config = config_of(tmp_path, server="http://fake", rows=scripted(3))
    await run_all(config)

    async def cancelled(_):
        return {"status": "cancelled"}

    server.end = cancelled
    run, records = await run_all(config, retry_failed=True)
    assert [r.outcome for r in records] == ["cancelled"] * 3
    assert run.metrics.results.outcomes["failure"] == 3
    # Without retry_failed the failures stand; with it they run again.
    server.end = None
    plain, records = await run_all(config)
    assert records == []
    assert plain.progress.outcomes == {AttemptOutcome.FAILURE: 3}
    again, records = await run_all(config, retry_failed=True)
    assert [r.retry for r in records] == [2, 2, 2]
    assert again.metrics.results.attempts.passed == 3


async def test_retry_failed_gives_a_new_budget(tmp_path, server):
    server.end = ending(SETUP)
    config = config_of(tmp_path, server="http://fake", rows=scripted(1), retry_setup_failures=1)
    await run_all(config)
    _, records = await run_all(config, retry_failed=True)
    assert [(r.retry, r.superseded) for r in records] == [(2, True), (3, False)]


def test_delays():
    assert [setup_retry_delay_sec(used) for used in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert setup_retry_delay_sec(10**6) == 30


@given(st.sampled_from(AttemptOutcome), st.booleans(), st.integers(0, 4), st.integers(0, 4))
def test_who_is_tried_again(outcome, may_have_run, used, allowed):
    entry = record(outcome=outcome, may_have_run=may_have_run)
    wanted = wants_setup_retry(entry, used, allowed)
    assert wanted == (outcome in {"failure", "error"} and not may_have_run and used < allowed)


async def test_waiting_for_a_try_ends_with_the_block(tmp_path, server, monkeypatch):
    server.end = ending(SETUP)
    config = config_of(tmp_path, server="http://fake", rows=scripted(2), retry_setup_failures=5)
    monkeypatch.setattr(rollout.evaluation.run, "setup_retry_delay_sec", lambda _: 3600)
    with trio.fail_after(60):
        async with evaluate(config) as run:
            for _ in range(2):
                await anext(aiter(run))
    assert keys(read_records(run.folder)) == all_keys(2)
    assert run.metrics.results.attempts.settled == 0
