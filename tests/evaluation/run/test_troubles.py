"""Servers that refuse, die and come back; disks that are full; datasets that change."""

from __future__ import annotations

import errno
import json
import os

import httpx
import pytest
import trio
from evaluation.run.cases import (
    all_keys,
    config_of,
    keys,
    raising,
    record,
    run_all,
    scripted,
    write_rows,
)
from evaluation.run.fake import failure, refused, success
from integrations.scripted import refuse, say, scripted_endpoint
from support import CHAT_URL, local_backend, make_app, prompt, served

import rollout.evaluation.attempts
from rollout import AgentWorkflow
from rollout.errors import (
    DatasetError,
    EvaluationError,
    EvaluationInputsChangedError,
    EvaluationStoppedError,
    InvalidBodyError,
)
from rollout.evaluation import evaluate, read_records
from rollout.evaluation.rules import CircuitBreaker
from rollout.gateway import ModelGateway
from rollout.integrations.chat import chat

FULL = OSError(errno.ENOSPC, "No space left on device")


# --- silence of the evaluation itself ---------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True])
async def test_what_ends_by_the_runs_own_silence_is_no_failure(tmp_path, server, monkeypatch, gone):
    """Stopped or asleep: the server ends its rollouts, and in the end forgets them."""
    clock = 1000.0
    monkeypatch.setattr("rollout.evaluation.standstill._now", lambda: clock)

    async def end(rollout):
        nonlocal clock
        if rollout.row == 0:
            return success()
        if not gone:
            return failure("lease_expired")
        clock += 3600
        return refused(404, "unknown rollout_id")

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(3), max_in_flight=1)
    run, records = await run_all(config)
    outcomes = {record.row: record.outcome for record in records}
    assert outcomes == {0: "success", 1: "cancelled", 2: "cancelled"}
    assert run.metrics.results.pass_rate.value == 1
    assert not run.complete
    server.end = None
    _, rest = await run_all(config)
    assert keys(rest) == [(1, 0), (2, 0)]


# --- datasets that cannot be graded -----------------------------------------------------------


async def test_a_dataset_in_which_no_row_can_be_graded_is_refused(tmp_path, server):
    rows = [{"user_prompt": "1 + 1", "answer": "2"}] * 3
    config = config_of(tmp_path, server="http://fake", rows=rows)
    with pytest.raises(DatasetError, match=r"could be graded; map .*columns\.ground_truth"):
        await run_all(config)
    assert not server.tries
    assert not (config.run.output / "manifest.json").exists()


async def test_rows_that_cannot_be_graded_are_warned_about(tmp_path, server, caplog):
    rows = [{"user_prompt": "1"}, {"user_prompt": "2", "label": "2"}, {"user_prompt": "3"}]
    run, _ = await run_all(config_of(tmp_path, server="http://fake", rows=rows))
    assert run.complete
    assert "2 of 3 rows have neither a ground truth nor metadata" in caplog.text


# --- the circuit breaker ----------------------------------------------------------------------


async def test_breaker_stops_a_run_that_only_meets_http_errors(tmp_path, server):
    async def end(_):
        return failure("http_error")

    server.end = end
    config = config_of(
        tmp_path, server="http://fake", rows=scripted(50), breaker_failures=5, max_in_flight=2
    )
    with pytest.raises(EvaluationStoppedError) as caught:
        await run_all(config)
    assert str(caught.value) == (
        "5 attempts in a row failed for a reason outside of agent and grader, so the run was "
        "stopped; the last one: http_error: it broke; once fixed, resume with retry_failed "
        "(--retry-failed)"
    )
    recorded = list(read_records(config.run.output))
    assert 5 <= len(recorded) <= 7
    assert server.active == {}

    # A call that mends nothing leaves them as they are, and stops again.
    with pytest.raises(EvaluationStoppedError):
        await run_all(config)
    server.end = None
    run, _ = await run_all(config, retry_failed=True)
    assert run.metrics.results.attempts.passed == 50


async def test_metrics_are_there_when_the_breaker_tripped(tmp_path, server):
    async def end(_):
        return failure("http_error")

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(50), breaker_failures=2)
    with pytest.raises(EvaluationStoppedError):
        async with evaluate(config) as run:
            async for _ in run:
                pass
            assert run.metrics is None
    assert run.metrics.results.error_categories == {"http_error": run.progress.settled}


async def test_breaker_needs_them_in_a_row(tmp_path, server):
    async def end(started):
        return success() if started.row % 3 == 2 else failure("http_error")

    server.end = end
    config = config_of(
        tmp_path, server="http://fake", rows=scripted(20), breaker_failures=3, max_in_flight=1
    )
    run, _ = await run_all(config)
    assert run.complete


@pytest.mark.parametrize("category", ["timeout", "agent_error", "validation_error"])
async def test_breaker_leaves_failures_of_agents_alone(tmp_path, server, category):
    async def end(_):
        return failure(category)

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(9), breaker_failures=1)
    run, _ = await run_all(config)
    assert run.metrics.results.error_categories == {category: 9}


def test_breaker_looks_past_what_was_cancelled():
    """Cancelling what is in flight says nothing about whether the trouble is over."""
    breaker = CircuitBreaker(2)
    trouble = record(outcome="failure", err_category="http_error")
    assert not breaker.add(trouble)
    assert not breaker.add(record(outcome="cancelled"))
    assert breaker.add(trouble)
    assert breaker.tripped is trouble


async def test_breaker_that_is_off(tmp_path, server):
    async def end(_):
        return failure("http_error")

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(30), breaker_failures=0)
    run, _ = await run_all(config)
    assert run.complete


@pytest.mark.parametrize(
    "trouble", [httpx.ConnectError("refused"), refused(502), refused(503), refused(504)]
)
async def test_breaker_for_a_server_that_is_gone(tmp_path, server, trouble):
    server.admit = lambda _: trouble if server.tries.total() > 3 else None
    config = config_of(
        tmp_path, server="http://fake", rows=scripted(60), breaker_failures=10, max_in_flight=3
    )
    with pytest.raises(EvaluationStoppedError, match="the last one: unreachable: "):
        await run_all(config)
    server.admit = lambda _: None  # it comes back
    run, records = await run_all(config, retry_failed=True)
    assert len(records) == 57
    assert run.complete


@pytest.mark.parametrize(
    "nonsense",
    [refused(500), httpx.Response(202, text="<html>"), httpx.Response(200), refused(307)],
)
async def test_breaker_for_a_server_that_answers_nonsense(tmp_path, server, nonsense):
    server.admit = lambda _: nonsense
    config = config_of(tmp_path, server="http://fake", rows=scripted(60), breaker_failures=10)
    with pytest.raises(EvaluationStoppedError, match="the last one: protocol: "):
        await run_all(config)
    assert server.tries.total() < 60


async def test_breaker_for_a_server_that_forgets_its_rollouts(tmp_path, server):
    async def end(rollout):
        return httpx.Response(404, json={"detail": "unknown rollout_id"})

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(60), breaker_failures=10)
    with pytest.raises(EvaluationStoppedError, match=r"the last one: protocol: .*unknown"):
        await run_all(config)


async def test_breaker_leaves_requests_that_are_refused_alone(tmp_path, server):
    server.admit = lambda _: refused(422)
    config = config_of(tmp_path, server="http://fake", rows=scripted(9), breaker_failures=1)
    run, _ = await run_all(config)
    assert run.metrics.results.error_categories == {"protocol": 9}


async def test_tries_of_a_failed_setup_count_for_the_breaker(tmp_path, server, monkeypatch):
    monkeypatch.setattr("rollout.evaluation.run.setup_retry_delay_sec", lambda _: 0)

    async def end(_):
        return failure("http_error", started=False)

    server.end = end
    config = config_of(
        tmp_path,
        server="http://fake",
        rows=scripted(1),
        breaker_failures=4,
        retry_setup_failures=100,
    )
    with pytest.raises(EvaluationStoppedError):
        await run_all(config)
    assert server.tries.total() == 4


# --- a server that no attempt can use ---------------------------------------------------------


async def test_unreachable_at_the_start(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(5))
    server.healthy = httpx.ConnectError("All connection attempts failed")
    with pytest.raises(EvaluationError, match="at http://fake does not answer: All conn"):
        await run_all(config)
    assert list(read_records(config.run.output)) == []
    server.healthy = None
    run, _ = await run_all(config)
    assert run.complete


async def test_nothing_listens(tmp_path):
    config = config_of(tmp_path, server="http://127.0.0.1:9", rows=scripted(5))
    with pytest.raises(EvaluationError, match=r"http://127\.0\.0\.1:9 does not answer"):
        await run_all(config)


async def test_wrong_key_at_the_start(tmp_path):
    async with served(make_app(api_key="right")) as url:
        config = config_of(tmp_path, server=url, rows=scripted(5))
        with pytest.raises(EvaluationError, match=r"refuses the key \(HTTP 401\); name the var"):
            await run_all(config)
    assert list(read_records(config.run.output)) == []


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "refuses the key"), (403, "refuses the key"), (404, "is not a rollout server")],
)
async def test_a_server_that_turns_everything_away_in_the_middle(tmp_path, server, status, words):
    server.admit = lambda _: refused(status) if server.tries.total() > 3 else None
    config = config_of(tmp_path, server="http://fake", rows=scripted(50), max_in_flight=1)
    with pytest.raises(EvaluationError, match=words):
        await run_all(config)
    assert len(list(read_records(config.run.output))) == 3
    server.admit = lambda _: None
    _, records = await run_all(config)
    assert len(records) == 47


async def test_something_else_answers(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(5))
    server.healthy = httpx.Response(404, text="<html>")
    with pytest.raises(EvaluationError, match="is not a rollout server"):
        await run_all(config)


@pytest.mark.parametrize("url", ["ftp://host", "http://[::1", "no url"])
def test_urls_that_are_none(tmp_path, url):
    with pytest.raises(InvalidBodyError, match=r"server\.url"):
        config_of(tmp_path, server=url, rows=scripted(1))


# --- trouble of single attempts ---------------------------------------------------------------


@pytest.mark.parametrize("status", [409, 413, 422, 500])
async def test_one_row_that_is_refused_does_not_end_the_run(tmp_path, server, status):
    server.admit = lambda body: (
        refused(status, "not this one") if "row 2" in str(body["initial_messages"]) else None
    )
    run, records = await run_all(config_of(tmp_path, server="http://fake", rows=scripted(5)))
    (odd,) = [entry for entry in records if entry.outcome == "error"]
    assert (odd.row, odd.err_category) == (2, "protocol")
    assert "not this one" in odd.err_message
    assert run.metrics.results.attempts.passed == 4


@pytest.mark.parametrize(
    ("trouble", "category"),
    [
        (httpx.ConnectTimeout("late"), "unreachable"),
        (httpx.WriteError("cut"), "unreachable"),
    ],
)
async def test_a_poll_that_fails(tmp_path, server, trouble, category):
    async def end(started):
        return trouble if started.row == 1 else success()

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(3), retry_setup_failures=2)
    run, records = await run_all(config)
    (odd,) = [entry for entry in records if entry.outcome == "error"]
    assert (odd.row, odd.err_category, odd.may_have_run) == (1, category, True)
    assert run.complete


async def test_real_server_that_dies_and_comes_back(tmp_path):
    # For as long as a lease, admissions are sent again.
    lease = {"result_wait_timeout_sec": 0.5, "polling_lease_timeout_sec": 2.0}
    app = make_app(local_backend(max_concurrent=None), **lease)
    rows = [*scripted(2), {"messages": prompt(sleep=600), "ground_truth": "42"}, *scripted(30)]
    async with trio.open_nursery() as nursery:
        serving = trio.CancelScope()
        urls = []

        async def serve_once(task_status):
            with serving:
                async with served(app) as url:
                    urls.append(url)
                    task_status.started()
                    await trio.sleep_forever()

        await nursery.start(serve_once)
        config = config_of(tmp_path, server=urls[0], rows=rows, max_in_flight=1, breaker_failures=2)
        with pytest.raises(EvaluationStoppedError, match="out of reach"):
            async with evaluate(config) as run:
                for _ in range(2):
                    await anext(aiter(run))
                while run.progress.in_flight < 1:
                    await trio.lowlevel.checkpoint()
                serving.cancel()
                async for _ in run:
                    pass
    assert keys(read_records(run.folder))[:2] == all_keys(2)
    assert run.metrics.results.outcomes["success"] == 2


# --- disks ------------------------------------------------------------------------------------


async def test_full_disk_for_the_journal(tmp_path, server, monkeypatch):
    config = config_of(tmp_path, server="http://fake", rows=scripted(200), max_in_flight=4)
    fsync = os.fsync
    with monkeypatch.context() as patch:
        with pytest.raises(EvaluationError, match="No space left on device; the run stops") as got:
            async with evaluate(config) as run:
                for _ in range(3):
                    await anext(aiter(run))
                patch.setattr(os, "fsync", raising(FULL))
                async for _ in run:
                    pass
        assert any("index and metrics" in note for note in got.value.__notes__)
    assert os.fsync is fsync
    kept = keys(read_records(run.folder))
    assert len(kept) >= 3
    _, records = await run_all(config)
    assert sorted([*kept, *keys(records)]) == all_keys(200)


async def test_full_disk_for_trajectories(tmp_path, server, monkeypatch):
    config = config_of(tmp_path, server="http://fake", rows=scripted(9), max_in_flight=4)
    with monkeypatch.context() as patch:
        patch.setattr(rollout.evaluation.attempts, "write_atomic", raising(FULL))
        with pytest.raises(EvaluationError, match=r"0\.json: No space left .*; the run stops"):
            await run_all(config)
    assert list(read_records(config.run.output)) == []
    assert server.active == {}
    run, _ = await run_all(config)
    assert run.complete


async def test_full_disk_for_metrics(tmp_path, server, monkeypatch):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    with monkeypatch.context() as patch:
        patch.setattr("rollout.evaluation.folder.outputs.write_atomic", raising(FULL))
        with pytest.raises(EvaluationError, match="metrics cannot be written: No space left"):
            await run_all(config)
    run, records = await run_all(config)
    assert records == []
    assert run.metrics.results.attempts.passed == 2


# --- datasets ---------------------------------------------------------------------------------


async def test_dataset_that_is_not_there(tmp_path, server):
    config = config_of(tmp_path, server="http://fake")
    with pytest.raises(DatasetError, match=r"rows\.jsonl"):
        await run_all(config)


async def test_dataset_that_changes_during_the_run(tmp_path, server):
    rows = scripted(500, answer="42", padding=" " * 1000)  # more than is read at a time
    config = config_of(tmp_path, server="http://fake", rows=rows, max_in_flight=2)
    with pytest.raises(DatasetError, match="changed"):
        async with evaluate(config) as run:
            await anext(aiter(run))
            write_rows(config.dataset.path, scripted(500, answer="41", padding=" " * 1000))
            async for _ in run:
                pass
    assert server.active == {}
    kept = list(read_records(run.folder))
    with pytest.raises(EvaluationInputsChangedError, match=r"dataset changed: rows\.jsonl"):
        await run_all(config)
    assert list(read_records(run.folder)) == kept


async def test_dataset_that_is_replaced_before_it_is_read(tmp_path, server, monkeypatch):
    config = config_of(tmp_path, server="http://fake", rows=scripted(5))
    health = server.handle_async_request

    async def swap(request):
        if request.url.path == "/health":
            write_rows(tmp_path / "new", scripted(6)).rename(config.dataset.path)
        return await health(request)

    monkeypatch.setattr(type(server), "handle_async_request", lambda _, request: swap(request))
    with pytest.raises(DatasetError, match="changed"):
        await run_all(config)
    assert list(read_records(config.run.output)) == []


# --- bugs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyError, ZeroDivisionError])
async def test_a_bug_in_the_way_is_never_swallowed(tmp_path, server, kind):
    async def end(started):
        return kind(f"row {started.row}")

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(20))
    with pytest.raises(kind, match=r"row \d+"):
        await run_all(config)
    assert list(read_records(config.run.output)) == []
    server.end = None
    run, _ = await run_all(config)
    assert run.complete


async def test_a_bug_in_reading_rows_is_never_swallowed(tmp_path, server, monkeypatch):
    config = config_of(tmp_path, server="http://fake", rows=scripted(20))

    def rows(_):
        yield from ()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("rollout.evaluation.datasets.Dataset.rows", rows)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await run_all(config)


# --- the model's endpoint ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "model", "message"),
    [
        (refuse(401, "bad key"), None, "answered 401: bad key"),
        (refuse(404, "no such model"), "m", "answered 404: no such model"),
        (refuse(500, "broken"), "m", "answered 500: broken"),
        (None, "m", "connect"),
        (refuse(404, "no such model"), None, None),
        (refuse(400, "no max_tokens here"), "m", None),
        (refuse(429, "slow down"), "m", None),
        (say("Hello"), "m", None),
    ],
)
async def test_the_model_is_asked_before_anything_starts(
    tmp_path, server, caplog, step, model, message
):
    async with scripted_endpoint(step or say("")) as endpoint:
        chat = {"url": endpoint.url if step else CHAT_URL, "model": model}
        chat = {name: value for name, value in chat.items() if value is not None}
        config = config_of(tmp_path, server="http://fake", rows=scripted(1), chat=chat)
        if message is None:
            _, records = await run_all(config, check_model=True)
            assert len(records) == 1
            await run_all(config, check_model=True)  # nothing is left to do
        else:
            with pytest.raises(EvaluationError, match=f"(?s)http://127.*{message}.*--no-check"):
                await run_all(config, check_model=True)
            assert server.tries.total() == 0
    assert len(endpoint.requests) == (0 if step is None else 1)
    assert ("slow down" in caplog.text) is (message is None and "slow" in (step.error or ""))


async def test_a_refused_key_ends_the_run_and_no_attempt_pays_for_it(tmp_path, server):
    refused_key = failure() | {"err_source": "model_key", "err_message": "401: wrong key"}

    async def end(rollout):
        return success() if rollout.row == 0 else refused_key

    server.end = end
    async with scripted_endpoint(refuse(401, "wrong key"), say("")) as endpoint:
        chat = {"url": endpoint.url}
        config = config_of(
            tmp_path, server="http://fake", rows=scripted(5), chat=chat, max_in_flight=1
        )
        with pytest.raises(EvaluationStoppedError, match=r"refuses the key.*: 401: wrong key$"):
            await run_all(config)
        assert keys(read_records(tmp_path / "out")) == [(0, 0)]
        assert server.tries.total() == 2

        # By the time that somebody asks again the key is taken, so this is about the row.
        async def end_of_one(rollout):
            return refused_key if rollout.row == 3 else success()

        server.end = end_of_one
        run, records = await run_all(config)
    assert run.complete
    assert [(each.row, each.reason) for each in records if each.failed] == [(3, "model_key")]
    assert len(endpoint.requests) == 2


async def test_a_breaker_that_is_off_leaves_refused_keys_on_record(tmp_path, server):
    async def end(_):
        return failure() | {"err_source": "model_key"}

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(3), breaker_failures=0)
    run, records = await run_all(config)
    assert run.complete
    assert {each.reason for each in records} == {"model_key"}


class Asks(AgentWorkflow):
    async def run(self, ctx):
        return [*ctx.prompt, (await chat(ctx.prompt, model="policy")).message]


@pytest.mark.parametrize("gateway", [None, ModelGateway()], ids=["direct", "gateway"])
async def test_a_workflow_whose_key_is_refused_ends_the_run(tmp_path, gateway):
    app = make_app(local_backend(Asks), gateway=gateway)
    async with scripted_endpoint(lambda _: refuse(403, "no such key")) as endpoint:
        async with served(app) as url:
            config = config_of(tmp_path, server=url, rows=scripted(2), chat={"url": endpoint.url})
            with pytest.raises(EvaluationStoppedError, match=r"refuses the key.*no such key"):
                await run_all(config)
    assert not list(read_records(tmp_path / "out"))


async def test_a_dead_endpoint_trips_the_breaker_and_is_counted_apart(tmp_path, server):
    async def end(_):
        return failure() | {"err_source": "model_endpoint"}

    server.end = end
    config = config_of(
        tmp_path, server="http://fake", rows=scripted(30), breaker_failures=3, max_in_flight=1
    )
    handed_over = []
    with pytest.raises(EvaluationStoppedError, match=r"3 attempts in a row.*model_endpoint: "):
        async with evaluate(config) as run:
            handed_over += [record async for record in run]
    records = list(read_records(tmp_path / "out"))
    assert keys(handed_over) == keys(records)
    document = json.loads((tmp_path / "out" / "trajectories" / "0-0-0.json").read_text())
    assert document["extra"]["status"] == "failure"
    assert document["extra"]["error"] == {
        "category": "agent_error",
        "message": "it broke",
        "source": "model_endpoint",
    }
    assert {(r.err_category, r.err_source) for r in records} == {("agent_error", "model_endpoint")}
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["results"]["error_categories"] == {"model_endpoint": len(records)}
