"""Runs that stop once their pass rate is known well enough."""

from __future__ import annotations

import json

import trio
from evaluation.run.cases import config_of, keys, run_all, scripted
from evaluation.run.fake import success

from rollout.evaluation.folder.manifest import read_manifest
from rollout.evaluation.folder.outputs import summarize
from rollout.evaluation.sequential import drawn_order

URL = "http://fake"


def passing(rate: float):
    """Let this share of the rows pass, spread over the file."""

    async def end(rollout):
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
    assert {record.row for record in records} <= set(order[: results.rows + 16])
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
