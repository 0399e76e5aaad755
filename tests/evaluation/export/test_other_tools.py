"""Exports read back with the tools that they are for: ``nox -s integrations`` installs them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluation.export.exported import exported
from evaluation.report.runs import hostile

from rollout.errors import EvaluationError
from rollout.evaluation.export import export_run

# What these packages warn about is theirs.
pytestmark = pytest.mark.filterwarnings("default")


def need(name: str, extra: str) -> Any:
    return pytest.importorskip(name, reason=f"needs {extra}, as in nox -s integrations")


# --- parquet ----------------------------------------------------------------------------------


def test_polars_reads_the_table(tmp_path):
    polars = need("polars", "polars")
    need("pyarrow", "the extra parquet")
    table = polars.read_parquet(export_run(exported(tmp_path / "run"), "parquet").target)
    assert table["reward"].mean() == 0.75
    failed = table.filter(polars.col("outcome").is_in(["failure", "error"]))
    assert failed["err_category"].to_list() == ["timeout", "unreachable"]
    last = table["messages"].list.last().struct.field("content")
    assert last.to_list()[0] == "It is 42 \ufffd"


# --- Inspect ----------------------------------------------------------------------------------


def test_inspect_reads_the_log(tmp_path):
    log = need("inspect_ai.log", "the extra inspect")
    export = export_run(exported(tmp_path / "run"), "inspect")
    assert export.target == tmp_path / "run.eval"
    read = log.read_eval_log(str(export.target))
    assert (read.status, read.eval.task, read.eval.model) == (
        "success",
        "support-tasks",
        "small-instruct-3b",
    )
    assert (read.eval.dataset.samples, read.eval.config.epochs) == (3, 2)
    assert read.results.total_samples == 6
    scores = {score.name: score.metrics for score in read.results.scores}
    assert scores["passed"]["pass_rate"].value == pytest.approx(0.4)
    assert scores["reward"]["mean_reward"].value == 0.75
    assert scores["metrics.ok"]["mean"].value == 0.5
    assert read.stats.model_usage["small-instruct-3b"].total_tokens == 37
    samples = sorted(read.samples, key=lambda sample: (sample.id, sample.epoch))
    assert [(sample.id, sample.epoch) for sample in samples] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    first, below, removed, failed, lost, _ = samples
    assert (first.scores["passed"].value, first.scores["reward"].value) == ("C", 1.0)
    assert (below.scores["passed"].value, below.scores["metrics.ok"].value) == ("I", 0.0)
    assert removed.scores is None
    assert removed.metadata["rollout"]["removed"] is True
    assert failed.error.message == "timeout: too slow"
    assert (lost.error.message, lost.messages) == ("unreachable: gone", [])
    assert [each.message for each in first.error_retries] == ["http_error: no agent"]
    assert (first.target, first.metadata["level"], first.uuid) == ("42", 0, "r-0-0-1")
    roles = [message.role for message in first.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.role for message in first.input] == roles[:2]
    asked = first.messages[2]
    assert asked.content[0].reasoning == "I multiply."
    assert (asked.tool_calls[0].function, asked.tool_calls[0].arguments) == (
        "multiply",
        {"left": 6, "right": 7},
    )
    assert (first.messages[3].tool_call_id, first.messages[3].text) == ("c1", "42")
    assert first.output.completion == "It is 42 \ufffd"
    assert first.model_usage["small-instruct-3b"].input_tokens == 30
    one = log.read_eval_log_sample(str(export.target), 0, 1)
    assert one.scores["reward"].value == 1.0
    with pytest.raises(EvaluationError, match=r"does not end in \.eval"):
        export_run(tmp_path / "run", "inspect", output=tmp_path / "run.log")


def test_inspect_knows_what_was_cancelled(tmp_path):
    log = need("inspect_ai.log", "the extra inspect")
    export = export_run(exported(tmp_path / "run", complete=False), "inspect")
    read = log.read_eval_log(str(export.target))
    assert read.status == "cancelled"
    assert read.samples[-1].error.message.startswith("Cancelled(")


# --- MLflow -----------------------------------------------------------------------------------


def mlflow_client(monkeypatch: pytest.MonkeyPatch, store: Path) -> Any:
    mlflow = need("mlflow", "the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient(store.as_uri())


def test_mlflow_reads_the_run_from_its_file_store(tmp_path, monkeypatch):
    client = mlflow_client(monkeypatch, tmp_path / "mlruns")
    folder, store = exported(tmp_path / "before"), tmp_path / "mlruns"
    export = export_run(folder, "mlflow", output=store)
    assert export.target.parent.parent == store
    experiment = client.get_experiment_by_name("support-tasks")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("before", "FINISHED")
    figures = run.data.metrics
    assert (figures["mean_reward"], figures["attempts_failure"]) == (0.75, 1)
    assert (figures["metrics.ok"], figures["metrics.calls_all"]) == (0.5, 2)
    assert figures["prompt_tokens"] == 30
    assert run.data.params["chat.model"] == "small-instruct-3b"
    assert run.inputs.dataset_inputs[0].dataset.name == "support-tasks"
    rewards = client.get_metric_history(run.info.run_id, "attempt/reward")
    assert [(each.step, each.value) for each in rewards] == [(0, 1.0), (1, 0.25), (5, 1.0)]
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    table = json.loads(
        Path(client.download_artifacts(run.info.run_id, "attempts.json")).read_text()
    )
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["err_message"] for row in rows[3:5]] == ["too slow", "gone"]
    assert json.loads(rows[0]["messages"])[-1]["content"] == "It is 42 \ufffd"
    assert json.loads(rows[0]["earlier"])[0]["err_message"] == "no agent"
    kept = {each.path for each in client.list_artifacts(run.info.run_id, "trajectories")}
    assert "trajectories/0-0-1.json" in kept
    traces = {
        (int(trace.info.tags["row"]), int(trace.info.tags["attempt"])): trace
        for trace in client.search_traces([experiment.experiment_id])
    }
    assert len(traces) == 6
    first, failed = traces[0, 0], traces[1, 1]
    assert first.info.trace_metadata["mlflow.sourceRun"] == run.info.run_id
    assert (first.info.client_request_id, first.info.state.value) == ("r-0-0-1", "OK")
    assert (first.info.request_preview, first.info.response_preview) == (
        "What is 6 * 7?",
        "It is 42 \ufffd",
    )
    assert first.info.token_usage["total_tokens"] == 37
    (span,) = first.data.spans
    assert [message["role"] for message in span.inputs["messages"]] == ["system", "user"]
    assert [message["content"] for message in span.outputs["messages"]] == [
        "",
        "42",
        "It is 42 \ufffd",
    ]
    values = {each.name: each.value for each in first.info.assessments}
    assert values == {
        "reward": 1.0,
        "passed": True,
        "label": "42",
        "metrics.ok": 1.0,
        "metrics.calls/all": 2.0,
    }
    assert failed.info.state.value == "ERROR"
    assert failed.data.spans[0].status.description == "too slow"


def test_an_mlflow_store_takes_several_runs_and_each_once(tmp_path, monkeypatch):
    client = mlflow_client(monkeypatch, tmp_path / "mlruns")
    first, store = exported(tmp_path / "first"), tmp_path / "mlruns"
    export_run(first, "mlflow", output=store)
    second = exported(tmp_path / "second", complete=False)
    manifest = json.loads((second / "manifest.json").read_text())
    manifest["dataset"]["digest"] = "11"
    (second / "manifest.json").write_text(json.dumps({**manifest, "run_id": "another"}))
    events = (second / "events.jsonl").read_bytes()
    export_run(second, "mlflow", output=store)
    with pytest.raises(EvaluationError, match=r"the run another in .* exists; .* use --replace"):
        export_run(second, "mlflow", output=store)
    export_run(second, "mlflow", output=store, replace=True)
    assert (second / "events.jsonl").read_bytes() == events
    experiment = client.get_experiment_by_name("support-tasks")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted((run.info.run_name, run.info.status) for run in runs) == [
        ("first", "FINISHED"),
        ("second", "KILLED"),
    ]
    digests = {run.inputs.dataset_inputs[0].dataset.digest[:2] for run in runs}
    assert digests == {"9f", "11"}
    traces = client.search_traces([experiment.experiment_id])
    sources = [trace.info.trace_metadata["mlflow.sourceRun"] for trace in traces]
    assert sorted(sources) == sorted(6 * [run.info.run_id for run in runs])
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "mlruns"}
    with pytest.raises(EvaluationError, match="is not an MLflow file store"):
        export_run(first, "mlflow", output=first)


# --- Weights & Biases -------------------------------------------------------------------------


def wandb_records(folder: Path) -> Iterator[Any]:
    """Read the messages of an offline run: LevelDB's log format, after a header of 7 bytes."""
    pb = need("wandb.proto.wandb_internal_pb2", "the extra wandb")
    (path,) = folder.glob("run-*.wandb")
    data, at, parts = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no header starts so late in a block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # the whole of a message, or its last part
            record = pb.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb_has_the_run_in_an_offline_run(tmp_path):
    need("wandb", "the extra wandb")
    folder, target = exported(tmp_path / "before"), tmp_path / "wandb"
    export = export_run(folder, "wandb", output=target)
    assert export.target.parent == target
    assert {path.name for path in tmp_path.iterdir()} == {"before", "wandb"}
    records = list(wandb_records(export.target))
    (run,) = [each.run for each in records if each.HasField("run")][:1]
    assert (run.run_id, run.project, run.display_name) == (
        "e7c1f0a2b94d",
        "support-tasks",
        "before",
    )
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["chat"]["model"] == "small-instruct-3b"
    logged = [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in each.history.item
        }
        for each in records
        if each.HasField("history")
    ]
    assert [row["reward"] for row in logged if "reward" in row] == [1.0, 0.25, 1.0]
    assert [row["metrics/ok"] for row in logged if "metrics/ok" in row] == [1.0, 0.0]
    summary: dict[str, Any] = {}
    for each in records:
        if each.HasField("summary"):
            for item in each.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    assert (summary["mean_reward"], summary["attempts_failure"]) == (0.75, 1)
    assert (summary["metrics/calls/all"], summary["prompt_tokens"]) == (2, 30)
    assert summary["complete"] is True
    (shown,) = [row["attempts/path"] for row in logged if "attempts/path" in row]
    table = json.loads((export.target / "files" / shown).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["err_message"] for row in rows[3:5]] == ["too slow", "gone"]
    assert json.loads(rows[0]["messages"])[-1]["content"] == "It is 42 \ufffd"
    assert not any(each.HasField("artifact") for each in records)  # nothing is elsewhere
    with pytest.raises(EvaluationError, match=r"exists; .* use --replace"):
        export_run(folder, "wandb", output=target)
    export_run(folder, "wandb", output=target, replace=True)
    assert len(list(target.iterdir())) == 1


@pytest.mark.parametrize(
    ("to", "module"), [("inspect", "inspect_ai"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_whatever_a_run_holds_is_taken(tmp_path, monkeypatch, to, module):
    need(module, f"the extra {to}")
    output = tmp_path / "out.eval"
    export = export_run(hostile(tmp_path / "run"), to, output=output)
    assert export.target.exists()
    assert len(export.unread) == 6
