"""Runs that go to their end: what is written, and that nothing is left to do then."""

from __future__ import annotations

import json
import os

import pytest
import trio
from evaluation.run.cases import all_keys, config_of, keys, run_all, scripted
from evaluation.run.fake import failure, success
from integrations.scripted import say, scripted_endpoint
from support import Compare, Script, local_backend, make_app, prompt, served

import rollout.evaluation.run
from rollout import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowOutput, LocalBackend
from rollout.context import get_rollout_context
from rollout.errors import EvaluationError
from rollout.evaluation import AttemptOutcome, evaluate, final_records, read_records
from rollout.evaluation.datasets import Dataset
from rollout.evaluation.folder.manifest import read_manifest
from rollout.integrations.chat import chat, get_recorder
from rollout.trajectory import trajectory_problems


async def test_everything_is_written(tmp_path):
    rows = [
        {"messages": prompt(answer="42"), "ground_truth": "42"},
        {"messages": prompt(answer="41"), "ground_truth": "42"},
        {"messages": prompt(**{"raise": "it broke"}), "ground_truth": "42"},
        {"messages": prompt(), "ground_truth": "42", "metadata": {"grader": {"silent": True}}},
    ]
    async with served(make_app()) as url:
        config = config_of(tmp_path, server=url, rows=rows, n=2, chat={"model": "m"})
        run, records = await run_all(config)
    assert keys(records) == all_keys(4, n=2)
    facts = {
        (r.row, str(r.outcome), r.reward, r.passed, r.err_category, r.err_phase) for r in records
    }
    assert facts == {
        (0, "success", 1.0, True, None, None),
        (1, "success", 0.0, False, None, None),
        (2, "failure", None, False, "agent_error", None),
        (3, "failure", None, False, "validation_error", "grading"),
    }
    assert all(r.agent_started_at is not None and r.may_have_run for r in records)
    assert {r.err_message for r in records if r.row == 2} == {"it broke"}
    assert list(final_records(run.folder)) == sorted(records, key=lambda r: r.key)
    assert run.metrics.to_dict() == json.loads((run.folder / "metrics.json").read_text())
    assert run.metrics.results.attempts.passed == 2
    index = [json.loads(line) for line in (run.folder / "index.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["attempt"]) for entry in index] == all_keys(4, n=2)
    names = {path.name for path in (run.folder / "trajectories").iterdir()}
    assert names == {f"{row}-{attempt}-0.json" for row, attempt in all_keys(4, n=2)}
    document = json.loads((run.folder / "trajectories" / "2-1-0.json").read_text())
    assert trajectory_problems(document) == []
    assert "row" in json.dumps(document["extra"])
    assert (run.folder / "report.html").stat().st_size > 1000
    assert read_manifest(run.folder)["run"]["n"] == 2


class Asking(AgentWorkflow):
    async def run(self, ctx):
        first = await chat(ctx.prompt, model="policy", logprobs=True)
        get_recorder().extra_fields["mood"] = "calm"
        await chat([*ctx.prompt, first.message, {"role": "user", "content": "Sure?"}], model="m")
        await chat([{"role": "user", "content": "an aside"}], model="m", conversation="aside")


async def test_a_recorded_rollout_has_one_document_in_both_places(tmp_path):
    backend = LocalBackend(
        workflow=Asking,
        workflow_config=AgentWorkflowConfig(name="asking"),
        grader=Compare,
        artifact_root=tmp_path / "kept",
    )
    rows = [
        {
            "messages": [
                *prompt(),
                {"role": "assistant", "content": "Hm.", "usage": {"prompt_tokens": 1000}},
                {"role": "user", "content": "6 * 7?"},
            ],
            "ground_truth": "42",
        }
    ]
    async with scripted_endpoint(say("42")) as endpoint, served(make_app(backend)) as url:
        chat_table = {"url": endpoint.url, "model": "m"}
        config = config_of(tmp_path, server=url, rows=rows, chat=chat_table)
        run, (record,) = await run_all(config)
    assert record.outcome is AttemptOutcome.SUCCESS, record.err_message
    ours, own = (
        json.loads(path.read_text())
        for path in (
            run.folder / "trajectories" / "0-0-0.json",
            tmp_path / "kept" / record.rollout_id / "trajectory.json",
        )
    )
    assert trajectory_problems(ours) == []
    for part in ("schema_version", "trajectory_id", "agent", "steps", "final_metrics"):
        assert ours[part] == own[part]
    for part in ("status", "reward", "label", "metrics", "extra_fields", "metadata"):
        assert ours["extra"].get(part) == own["extra"].get(part)
    assert ours["extra"]["extra_fields"].keys() == {"branches", "mood"}
    assert ours["agent"]["model_name"] == "scripted-1"
    replied = ours["steps"][3]
    assert replied["metrics"]["logprobs"] == [-0.5]
    assert replied["timestamp"] < ours["steps"][-1]["timestamp"]
    # All that was spent, the aside included.
    assert record.completion_tokens == record.metrics["completion_tokens"] == 3
    assert record.prompt_tokens == record.metrics["prompt_tokens"]
    assert ours["final_metrics"]["total_completion_tokens"] == 2
    assert ours["final_metrics"]["total_prompt_tokens"] < 1000


async def test_progress(tmp_path, server):
    rows = iter([success(0.5), failure(), success(1.0)])

    async def end(_):
        return next(rows)

    server.end = end
    config = config_of(tmp_path, server="http://fake", rows=scripted(3), max_in_flight=1)
    async with evaluate(config) as run:
        assert run.progress.total == 3
        assert run.progress.mean_reward is None
        assert "0/3" in repr(run)
        async for _ in run:
            pass
        assert run.complete
        assert run.progress.settled == 3
        assert run.progress.outcomes == {AttemptOutcome.SUCCESS: 2, AttemptOutcome.FAILURE: 1}
        assert run.progress.mean_reward == 0.75
        assert run.progress.passed == 1
        assert run.progress.resumed == run.progress.in_flight == 0
        assert run.metrics is None
    assert run.metrics is not None


async def test_second_call_of_a_complete_run_starts_nothing(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(3), n=2)
    first, _ = await run_all(config)
    journal = (first.folder / "events.jsonl").read_bytes()
    server.healthy = server.admit = None  # nobody asks for them
    for _ in range(2):
        run, records = await run_all(config)
        assert records == []
        assert run.progress.resumed == run.progress.settled == 6
        assert run.metrics == first.metrics
        assert run.manifest == first.manifest
    assert (first.folder / "events.jsonl").read_bytes() == journal
    assert server.tries.total() == 6


async def test_never_more_in_flight_than_allowed(tmp_path):
    running, most, full = 0, 0, trio.Event()

    class Counted(Script):
        async def run(self, ctx):
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
            await full.wait()
            await trio.sleep(0.01)  # in which a fourth one would come
            running -= 1
            return await super().run(ctx)

    async with served(make_app(local_backend(Counted, max_concurrent=None))) as url:
        config = config_of(tmp_path, server=url, rows=scripted(12), n=2, max_in_flight=3)
        _, records = await run_all(config)
    assert keys(records) == all_keys(12, n=2)
    assert most == 3


async def test_a_consumer_that_does_not_read_holds_the_run_back(tmp_path, server):
    config = config_of(tmp_path, server="http://fake", rows=scripted(100), max_in_flight=2)
    # Those in the channel, and those that wait to hand theirs over; what ended is kept.
    kept = 2 * rollout.evaluation.run._ENDING_AT_A_TIME
    async with evaluate(config) as run:
        while run.progress.settled < kept:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        assert run.progress.settled == kept
        assert run.progress.in_flight == 2
        assert server.tries.total() == kept + 2
        assert len(list(read_records(run.folder))) == kept
        records = [record async for record in run]
    assert keys(records) == all_keys(100)


async def test_rows_are_not_read_ahead_without_end(tmp_path, server, monkeypatch):
    read = []
    rows = Dataset.rows

    def counted(self):
        for row in rows(self):
            read.append(row.index)
            yield row

    monkeypatch.setattr(Dataset, "rows", counted)
    config = config_of(tmp_path, server="http://fake", rows=scripted(1000), max_in_flight=2)
    async with evaluate(config) as run:
        async for _ in run:
            break
        await trio.testing.wait_all_tasks_blocked(0.05)
    assert len(read) <= 64 * 3


async def test_limit_and_selection(tmp_path, server):
    config = config_of(
        tmp_path, server="http://fake", rows=scripted(20), dataset={"rows": "3-5,9-", "limit": 5}
    )
    run, records = await run_all(config)
    assert keys(records) == [(row, 0) for row in (3, 4, 5, 9, 10)]
    assert run.progress.total == 5
    assert run.metrics.results.rows == 5


async def test_ids_are_of_this_run_and_never_the_same(tmp_path, server):
    named = set()
    server.admit = lambda body: named.add(body["run"])
    config = config_of(tmp_path, server="http://fake", rows=scripted(4), n=3)
    run, records = await run_all(config)
    ids = [record.rollout_id for record in records]
    assert len(set(ids)) == 12
    assert all(name.startswith(f"{run.manifest['run_id']}-") for name in ids)
    assert named == {run.manifest["run_id"]}


SECRET_URL = "http://user:url-secret-3@127.0.0.1:9/v1?version=2024&key=query-secret-4"


async def test_keys_reach_the_server_and_no_file(tmp_path, monkeypatch):
    seen = []

    class Leaky(Script):
        async def run(self, ctx):
            context = get_rollout_context()
            seen.append(context.api_key)
            if "row 0" not in ctx.prompt[0]["content"]:
                raise RuntimeError(f"chat-secret-1 and server-secret-2 {end(context)}")
            messages = [*ctx.prompt, {"role": "assistant", "content": end(context)}]
            return AgentWorkflowOutput(messages=messages, metrics={f"m {end(context)}": 1.0})

    def end(context):
        return f"404 for {context.chat_completions_url} with {context.api_key}, not user 2024"

    monkeypatch.setenv("CHAT_KEY", "chat-secret-1")
    monkeypatch.setenv("SERVER_KEY", "server-secret-2")
    async with served(make_app(local_backend(Leaky), api_key="server-secret-2")) as url:
        config = config_of(
            tmp_path,
            server={"url": url, "api_key_env": "SERVER_KEY"},
            rows=scripted(2),
            chat={"api_key_env": "CHAT_KEY", "url": SECRET_URL},
        )
        run, records = await run_all(config)
    assert seen == ["chat-secret-1"] * len(records) == ["chat-secret-1"] * 2
    everything = b"".join(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    assert b"chat-secret-1" not in everything
    assert b"server-secret-2" not in everything
    assert b"secret" not in everything
    failed = next(record for record in records if record.row == 1)
    assert failed.err_message.endswith(
        "404 for http://[redacted]127.0.0.1:9/v1?[redacted] with [redacted], not user 2024"
    )
    assert run.metrics.results.sample_metrics.keys() == {
        "m 404 for http://[redacted]127.0.0.1:9/v1?[redacted] with [redacted], not user 2024"
    }


@pytest.mark.parametrize("value", [None, "", "  "])
async def test_key_that_is_not_set(tmp_path, server, monkeypatch, value):
    monkeypatch.delenv("CHAT_KEY", raising=False)
    if value is not None:
        monkeypatch.setitem(os.environ, "CHAT_KEY", value)
    config = config_of(
        tmp_path, server="http://fake", rows=scripted(1), chat={"api_key_env": "CHAT_KEY"}
    )
    with pytest.raises(EvaluationError, match=r"chat\.api_key_env: .* CHAT_KEY is not set"):
        await run_all(config)
    assert not config.run.output.exists()


@pytest.mark.parametrize("value", ["secret-4\n", "\tsecret-4", "secret\r-4", "secret-é4"])
@pytest.mark.parametrize("section", ["chat", "server"])
async def test_a_key_that_no_header_can_carry(tmp_path, server, monkeypatch, value, section):
    """Each attempt would fail of it, and the agent would have run."""
    monkeypatch.setenv("BAD_KEY", value)
    parts = {"server": {"url": "http://fake"}, "chat": {}}
    parts[section]["api_key_env"] = "BAD_KEY"
    config = config_of(tmp_path, rows=scripted(1), **parts)
    with pytest.raises(EvaluationError) as caught:
        await run_all(config)
    assert str(caught.value).startswith(f"{section}.api_key_env: the value of BAD_KEY ")
    assert "secret" not in str(caught.value)
    assert not config.run.output.exists()


async def test_removed_and_ungraded_samples(tmp_path, server):
    async def end(rollout):
        if rollout.row == 0:
            return {**success(), "sample": {**success()["sample"], "remove_sample": True}}
        return {**success(), "sample": {**success()["sample"], "reward": None}}

    server.end = end
    run, records = await run_all(config_of(tmp_path, server="http://fake", rows=scripted(2)))
    removed, ungraded = sorted(records, key=lambda record: record.row)
    assert (removed.removed, removed.reward, removed.passed) == (True, None, False)
    assert (ungraded.removed, ungraded.reward, ungraded.passed) == (False, None, False)
    assert run.metrics.results.attempts.removed == 1
    assert len(list(read_records(run.folder))) == 2


async def test_odd_texts_and_numbers_of_a_server(tmp_path, server):
    async def end(started):
        if started.row == 0:
            return {**failure(), "err_message": "half a pair: \ud800 and \x00"}
        odd = {"\udfff": 1.0, "big": 10**400, "text": "no number", "whole": 7, "yes": True}
        return {**success(), "sample": {**success()["sample"], "metrics": odd}}

    server.end = end
    run, records = await run_all(config_of(tmp_path, server="http://fake", rows=scripted(2)))
    failed, ended = sorted(records, key=lambda record: record.row)
    assert failed.err_message.startswith("half a pair: ")
    assert ended.metrics["whole"] == 7
    assert {"text", "yes"}.isdisjoint(ended.metrics)
    assert sorted(read_records(run.folder), key=lambda r: r.key) == [failed, ended]
    assert run.metrics.results.attempts.settled == 2
