"""Runs that are left, cancelled or broken off, and what the next call makes of them."""

from __future__ import annotations

import os
import threading

import httpx
import pytest
import trio
import trio.testing
from attrs import define, field
from evaluation.run.cases import all_keys, config_of, keys, raising, run_all, scripted
from evaluation.run.fake import Started, success
from support import local_backend, make_app, prompt, served

import rollout.evaluation.run
from rollout.client import RolloutClient
from rollout.evaluation import evaluate, final_records, read_records
from rollout.evaluation.datasets import Dataset


@define(eq=False)
class Held:
    """Ends the first rollouts at once and holds the others until they are cancelled."""

    free: int
    waiting: int = 0
    changed: trio.Event = field(factory=trio.Event)

    async def __call__(self, rollout):
        if self.free > 0:
            self.free -= 1
            return success()
        self.waiting += 1
        self.changed.set()
        await rollout.cancelled.wait()
        return {"status": "cancelled"}

    async def until_waiting(self, count):
        while self.waiting < count:
            self.changed = trio.Event()
            await self.changed.wait()


async def test_leaving_early_cancels_on_the_server_and_keeps_what_ended(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(10), max_in_flight=4)
    server.end = held = Held(free=3)
    async with evaluate(config) as run:
        records = [await anext(aiter(run)) for _ in range(3)]
        await held.until_waiting(4)
    assert server.active == {}
    assert set(server.prefixes) == {f"{run.manifest['run_id']}-"}
    assert run.metrics.results.attempts.settled == 3
    assert run.metrics.results.attempts.missing == 7
    assert not (run.folder / "report.html").exists()
    assert keys(read_records(run.folder)) == keys(records)

    server.end = None
    resumed, rest = await run_all(config)
    assert resumed.progress.resumed == 3
    assert sorted([*keys(records), *keys(rest)]) == all_keys(10)
    assert all(server.tries[key] == 1 for key in keys(records))
    assert resumed.manifest == run.manifest
    assert resumed.metrics.results.attempts.settled == 10


async def test_left_overs_of_a_process_that_was_killed_are_cancelled(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    server.end = Held(free=1)
    async with evaluate(config) as run:
        await anext(aiter(run))
    server.end = None
    server.prefixes.clear()
    await run_all(config)
    assert server.prefixes == [f"{run.manifest['run_id']}-"]


async def test_first_process_killed_before_its_first_record(tmp_path, server):
    """What it left on the server is cancelled although nothing is on record."""
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    server.end = held = Held(free=0)
    async with evaluate(config) as run:
        await held.until_waiting(2)
    server.end = None
    server.prefixes.clear()
    await run_all(config)
    assert server.prefixes == [f"{run.manifest['run_id']}-"]


async def test_killed_at_any_byte_it_comes_to_the_same_end(tmp_path, server):
    """Wherever the journal is cut off, what was whole stays, and the rest runs once."""

    async def end(rollout):
        return success(float(rollout.row == rollout.attempt))

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(2), n=2)
    whole, _ = await run_all(config)
    journal = whole.folder / "events.jsonl"
    data = journal.read_bytes()
    ends = [at for at in range(len(data)) if data[at] == ord("\n")]
    cuts = {0, 1, *(at + more for at in ends for more in (-40, -1, 0, 1))}
    for cut in sorted(cuts):
        journal.write_bytes(data[:cut])
        for name in ("metrics.json", "index.jsonl", "report.html"):
            (whole.folder / name).unlink(missing_ok=True)
        # A line is whole with its last byte, whether or not its line break is there.
        kept = max(0, sum(at <= cut for at in ends) - 1)
        run, records = await run_all(config)
        assert (len(records), run.progress.resumed) == (4 - kept, kept)
        assert keys(final_records(run.folder)) == all_keys(2, n=2)
        assert journal.read_bytes().startswith(b"".join(data.splitlines(keepends=True)[: kept + 1]))
        assert run.metrics.results == whole.metrics.results


async def test_on_a_real_server_nothing_is_left_running(tmp_path):
    async with served(make_app(local_backend(max_concurrent=None))) as url:
        rows = [*scripted(3), *scripted(6, sleep=600)]
        config = config_of(tmp_path, server=url, rows=rows, max_in_flight=5)
        async with evaluate(config) as run:
            for _ in range(3):
                await anext(aiter(run))
            while run.progress.in_flight < 5:
                await trio.lowlevel.checkpoint()
        async with RolloutClient(url=url) as client:
            await client.wait_idle(timeout_sec=30, poll_interval_sec=0.01)
    assert keys(read_records(run.folder)) == all_keys(3)


async def test_cancelled_by_somebody_else_runs_again(tmp_path):
    async with served(make_app(local_backend(max_concurrent=None))) as url:
        rows = [*scripted(2), {"messages": prompt(sleep=600), "ground_truth": "42"}]
        config = config_of(tmp_path, server=url, rows=rows)
        async with evaluate(config) as run:
            for _ in range(2):
                await anext(aiter(run))
            async with RolloutClient(url=url) as client:
                while True:
                    answer = await client.cancel_rollouts(all=True)
                    if answer.dispositions:
                        break
            cancelled = await anext(aiter(run))
            assert [record async for record in run] == []
        assert (cancelled.row, cancelled.outcome) == (2, "cancelled")
        assert not run.complete
        assert run.metrics.results.attempts.cancelled == 1

        async with evaluate(config) as again:
            assert again.progress.resumed == 2
            assert again.progress.outcomes.total() == 2
            while again.progress.in_flight < 1:
                await trio.lowlevel.checkpoint()
        assert again.metrics.results.attempts.cancelled == 1


@pytest.mark.parametrize("where", ["scope", "block", "error"])
async def test_stopped_at_many_moments(tmp_path, server, where, monkeypatch):
    """Whatever the moment: what ended stays, and nothing that had ended runs again."""
    tasks = trio.lowlevel.current_statistics().tasks_living
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(rollout.evaluation.run, "_report", lambda *_: None)
    fired = cut = 0
    for step in range(["scope", "block", "error"].index(where), 180, 8):
        folder = tmp_path / str(step)
        folder.mkdir()
        server.tries.clear()
        config = config_of(folder, server="http://fake", rows=scripted(3), n=2, max_in_flight=2)
        with trio.CancelScope() as scope, counting(step, scope, where) as counter:
            try:
                async with evaluate(config) as run:
                    with counter.leaving:
                        async for _ in run:
                            pass
                    if where == "error" and counter.leaving.cancelled_caught:
                        raise LookupError("the caller's own")
            except LookupError:
                cut += 1
        cut += scope.cancelled_caught or counter.leaving.cancelled_caught
        fired += counter.fired
        assert server.active == {}
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        ended = keys(read_records(config.run.output))
        tried = server.tries.copy()
        run, records = await run_all(config)
        assert sorted([*ended, *keys(records)]) == all_keys(3, n=2)
        assert keys(final_records(run.folder)) == all_keys(3, n=2)
        assert all(server.tries[key] == tried[key] for key in ended)
        assert run.metrics.results.attempts.passed == 6
    assert fired >= 10
    assert cut >= 5


@define(eq=False)
class counting(trio.abc.Instrument):  # noqa: N801 - it is used like a function
    """Cancels a scope once all tasks together have made that many steps."""

    step: int
    outer: trio.CancelScope
    where: str
    leaving: trio.CancelScope = field(factory=trio.CancelScope)
    fired: bool = False
    steps: int = 0

    def before_task_step(self, _):
        self.steps += 1
        if self.steps > self.step and not self.fired:
            self.fired = True
            (self.outer if self.where == "scope" else self.leaving).cancel()

    def __enter__(self):
        trio.lowlevel.add_instrument(self)
        return self

    def __exit__(self, *_):
        trio.lowlevel.remove_instrument(self)


async def test_an_admission_under_way_is_cancelled_once_it_has_arrived(tmp_path, server):
    """A server that admits what its caller no longer waits for is asked a second time."""
    config = config_of(tmp_path, server="http://fake", rows=scripted(1))
    entered = trio.Event()
    cancel = server._cancel

    async def stuck():
        entered.set()
        await trio.sleep_forever()

    def cancel_then_admit(prefix):
        answered = cancel(prefix)
        if len(server.prefixes) == 1:
            server.active[f"{prefix}0-0-late"] = Started(0, 0, {})
        return answered

    server.admission = stuck
    server._cancel = cancel_then_admit
    async with evaluate(config) as run:
        await entered.wait()
    assert len(server.prefixes) == 2
    assert server.active == {}
    assert list(read_records(run.folder)) == []


async def test_cancelling_a_server_that_is_gone_says_so(tmp_path, server, caplog):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    server.end = held = Held(free=0)
    async with evaluate(config):
        await held.until_waiting(2)
        server._cancel = raising(httpx.ConnectError("gone"))
    assert "2 rollout(s) could not be cancelled on the server (ConnectError)" in caplog.text


class OwnError(Exception):
    pass


async def test_the_callers_own_errors_come_out_as_they_are(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    cause = ValueError("its cause")
    error = OwnError("mine")
    with pytest.raises(OwnError) as caught:
        async with evaluate(config) as run:
            await anext(aiter(run))
            raise error from cause
    assert caught.value is error
    assert error.__cause__ is cause
    assert getattr(error, "__notes__", []) == []
    assert run.metrics.results.attempts.settled >= 1


async def test_the_callers_own_group_comes_out_as_it_is(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    group = ExceptionGroup("mine", [OwnError("one"), OwnError("two")])
    with pytest.raises(ExceptionGroup) as caught:
        async with evaluate(config):
            raise group
    assert caught.value is group


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_interrupts_come_out_plain(tmp_path, server, kind):
    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    with pytest.raises(kind):
        async with evaluate(config):
            raise kind
    _, records = await run_all(config)
    assert keys(records) == all_keys(2)


async def test_polls_that_fail_while_the_block_is_left_are_nobodys_errors(tmp_path, server):
    """Neither raised nor recorded: those attempts run again."""
    go = trio.Event()
    waiting = 0

    async def end(_):
        nonlocal waiting
        waiting += 1
        await go.wait()
        return httpx.ConnectTimeout("late")

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(24), max_in_flight=24)
    async with evaluate(config) as run:
        while waiting < 24:
            await trio.lowlevel.checkpoint()
        go.set()
    recorded = list(read_records(run.folder))
    server.end = None
    _, records = await run_all(config)
    assert sorted([*keys(recorded), *keys(records)]) == all_keys(24)


async def test_cancelled_while_the_dataset_is_scanned(tmp_path, server, monkeypatch):
    release = threading.Event()
    scan = Dataset.scan
    entered = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def slow(self):
        token.run_sync_soon(entered.set)
        release.wait(60)
        return scan(self)

    config = config_of(tmp_path, server="http://fake", rows=scripted(2))
    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "scan", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_all, config)
            await entered.wait()
            nursery.cancel_scope.cancel()
        # It did not wait for the scan, and keeps nobody out.
        assert not release.is_set()
        assert {path.name for path in config.run.output.iterdir()} <= {".lock"}
    run, _ = await run_all(config)
    release.set()
    assert run.complete
