"""Runs that stop once their pass rate is known well enough."""

from __future__ import annotations

import json

import pytest
import trio
from evaluation.run.cases import config_of, keys, run_all, scripted
from evaluation.run.fake import failure, success

from rollout.errors import EvaluationDamagedError, EvaluationInputsChangedError
from rollout.evaluation import evaluate, final_records, write_report
from rollout.evaluation.export.reading import read_run
from rollout.evaluation.folder.manifest import read_manifest, write_manifest
from rollout.evaluation.folder.outputs import summarize
from rollout.evaluation.sequential import drawn_order

URL = "http://fake"


def passing(rate: float, started: list[int] | None = None):
    """Let this share of the rows pass, spread over the file."""

    async def end(rollout):
        if started is not None:
            started.append(rollout.row)
        await trio.lowlevel.checkpoint()
        return success(float(int((rollout.row + 1) * rate) > int(rollout.row * rate)))

    return end


async def test_a_run_stops_once_its_interval_is_narrow_enough(tmp_path, server):
    server.end = passing(0.9)
    config = config_of(tmp_path, server=URL, rows=scripted(400), until=0.1, seed=7, n=2)
    run, records = await run_all(config)
    assert run.stopped_early
    assert run.complete
    results = run.metrics.results
    rate = results.pass_rate
    assert 10 < results.rows < 200
    assert (rate.method, rate.rows, rate.attempts) == ("sequential", results.rows, 2 * results.rows)
    assert rate.high - rate.low <= 0.2
    assert rate.low <= 0.9 <= rate.high
    order = drawn_order(range(400), 7)
    # Only the first rows in the order drawn count, whatever else has ended by then.
    counted = [json.loads(line) for line in (run.folder / "index.jsonl").read_text().splitlines()]
    assert {line["row"] for line in counted} == set(order[: results.rows])
    assert len(counted) == results.attempts.settled == results.attempts.planned
    assert {record.row for record in records} <= set(order[: results.rows + 64])
    assert summarize(run.folder) == run.metrics
    page = (run.folder / "report.html").read_text()
    assert "The run stopped early" in page
    assert "95% confidence sequence" in page


async def test_what_is_in_flight_is_cancelled_and_no_half_row_counts(tmp_path, server):
    slow = set(drawn_order(range(100), 1)[30:])

    async def end(rollout):
        if rollout.row in slow and rollout.attempt == 1:
            await rollout.cancelled.wait()
        await trio.lowlevel.checkpoint()
        return success()

    server.end = end
    config = config_of(tmp_path, server=URL, rows=scripted(100), until=0.2, seed=1, n=2)
    run, _ = await run_all(config)
    assert run.stopped_early
    assert not server.active
    assert set(server.prefixes) == {f"{run.manifest['run_id']}-"}
    counts = run.metrics.results.attempts
    assert counts.settled == counts.planned == 2 * run.metrics.results.rows <= 60
    assert counts.cancelled == counts.missing == 0


async def test_a_slow_row_holds_up_those_behind_it(tmp_path, server):
    order, released = drawn_order(range(100), 3), trio.Event()
    ended = 0

    async def end(rollout):
        nonlocal ended
        if rollout.row == order[0]:
            await released.wait()
        await trio.lowlevel.checkpoint()
        ended += 1
        if ended == 60:
            released.set()
        return success()

    server.end = end
    config = config_of(tmp_path, server=URL, rows=scripted(100), until=0.2, seed=3)
    run, records = await run_all(config)
    assert len(records) >= 60
    assert run.metrics.results.rows < 40


async def test_a_lower_until_goes_on_and_none_runs_the_rest(tmp_path, server):
    server.end = passing(0.9)
    rows = scripted(200)
    first, before = await run_all(config_of(tmp_path, server=URL, rows=rows, until=0.15))
    seed = read_manifest(first.folder)["run"]["seed"]
    again, none = await run_all(config_of(tmp_path, server=URL, until=0.15))
    assert (none, again.metrics.results) == ([], first.metrics.results)
    wider, none = await run_all(config_of(tmp_path, server=URL, until=0.3))
    assert none == []
    assert wider.metrics.results.rows < first.metrics.results.rows
    second, more = await run_all(config_of(tmp_path, server=URL, until=0.05))
    assert second.metrics.results.rows > first.metrics.results.rows
    assert read_manifest(first.folder)["run"]["seed"] == seed
    assert not set(keys(before)) & set(keys(more))
    assert first.metrics.results.pass_rate.low <= second.metrics.results.pass_rate.low
    rest, last = await run_all(config_of(tmp_path, server=URL))
    assert not rest.stopped_early
    assert len(before) + len(more) + len(last) == 200
    assert rest.metrics.results.pass_rate.method == "cluster-wilson"
    assert rest.metrics.results.pass_rate.value == 0.9


async def test_a_run_in_the_order_of_its_file_gets_an_order_when_it_is_to_stop(tmp_path, server):
    started: list[int] = []
    server.end = passing(0.9, started)
    config = config_of(tmp_path, server=URL, rows=scripted(100), max_in_flight=1)
    async with evaluate(config) as run:
        async for _ in run:
            if len(started) >= 20:
                break
    assert read_manifest(run.folder)["run"]["seed"] is None
    assert started == list(range(len(started)))
    known = {record.row for record in final_records(run.folder)}
    started.clear()
    stopping, _ = await run_all(config_of(tmp_path, server=URL, until=0.2, max_in_flight=1))
    order = drawn_order(range(100), read_manifest(run.folder)["run"]["seed"])
    assert stopping.stopped_early
    # One at a time, the rows that were missing ran as they were drawn.
    assert started == [row for row in order if row not in known][: len(started)]
    with pytest.raises(EvaluationInputsChangedError, match=r"run\.seed was \d+ and is 1"):
        await run_all(config_of(tmp_path, server=URL, seed=1))


async def test_a_seed_alone_only_shuffles(tmp_path, server):
    started: list[int] = []
    server.end = passing(1.0, started)
    config = config_of(tmp_path, server=URL, rows=scripted(30), seed=4, max_in_flight=1)
    run, _ = await run_all(config)
    assert started == drawn_order(range(30), 4)
    assert run.metrics.results.pass_rate.method == "wilson-rows"


async def test_failures_that_run_again_count_anew(tmp_path, server):
    broken = True

    async def end(rollout):
        await trio.lowlevel.checkpoint()
        return failure() if broken and rollout.row % 10 == 0 else success()

    server.end = end
    rows = scripted(100)
    config = config_of(tmp_path, server=URL, rows=rows, until=0.2, seed=2, breaker_failures=0)
    run, _ = await run_all(config)
    first = run.metrics.results
    assert first.pass_rate.value < 1
    assert first.error_categories == {"agent_error": first.outcomes["failure"]}
    broken = False
    again, records = await run_all(config, retry_failed=True)
    assert len(records) >= first.outcomes["failure"]
    assert again.metrics.results.pass_rate.value == 1
    assert again.metrics.results.rows < first.rows


async def test_rows_and_limit_say_which_rows_the_rate_is_of(tmp_path, server):
    dataset = {"rows": "10-", "limit": 50}
    config = config_of(tmp_path, server=URL, rows=scripted(100), until=0.2, dataset=dataset)
    run, records = await run_all(config)
    assert {record.row for record in records} <= set(range(10, 60))
    order = drawn_order(range(10, 60), read_manifest(run.folder)["run"]["seed"])
    assert run.stopped_early
    assert set(order[: run.metrics.results.rows]) <= {record.row for record in records}


async def test_a_run_that_needs_all_rows_is_complete_like_any_other(tmp_path, server):
    server.end = passing(0.5)
    run, records = await run_all(config_of(tmp_path, server=URL, rows=scripted(8), until=0.001))
    assert len(records) == run.metrics.results.rows == 8
    assert not run.stopped_early
    assert run.complete
    assert run.metrics.results.pass_rate.method == "cluster-wilson"
    assert "stopped early" not in (run.folder / "report.html").read_text()


async def test_a_run_that_is_not_complete_shows_what_it_has(tmp_path, server):
    config = config_of(tmp_path, server=URL, rows=scripted(300), until=0.005, max_in_flight=1)
    async with evaluate(config) as run:
        seen = 0
        async for _ in run:
            seen += 1
            if seen == 12:
                break
    results = run.metrics.results
    assert (results.rows, results.pass_rate.method) == (300, "sequential")
    assert results.pass_rate.rows >= 12
    assert run.progress.half_width == pytest.approx((1 - results.pass_rate.low) / 2)


async def test_an_export_has_the_rows_that_count(tmp_path, server):
    config = config_of(tmp_path, server=URL, rows=scripted(100), until=0.2, max_in_flight=32)
    run, _ = await run_all(config)
    exported = read_run(run.folder)
    assert exported.metrics == run.metrics
    assert len(list(exported.attempts())) == run.metrics.results.rows


async def test_a_damaged_manifest_is_refused_and_the_report_says_so(tmp_path, server):
    run, _ = await run_all(config_of(tmp_path, server=URL, rows=scripted(100), until=0.2))
    manifest = read_manifest(run.folder)
    for wrong in ({"seed": "x"}, {"seed": None}, {"until": "x"}):
        damaged = {**manifest, "run": {**manifest["run"], **wrong}}
        write_manifest(run.folder, damaged)
        with pytest.raises(EvaluationDamagedError, match=r"run\.(seed|until)"):
            summarize(run.folder)
        page = write_report(run.folder).read_text()
        assert "it is not known whether this run stopped early" in page
