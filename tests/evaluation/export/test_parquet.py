"""What every export does, on the one that the plain session can read."""

from __future__ import annotations

import json
import sys

import pytest
from evaluation.export.exported import CALL, exported
from evaluation.report.runs import hostile

from rollout.errors import EvaluationError
from rollout.evaluation.export import FORMATS, export_run
from rollout.evaluation.export.reading import ExportedRun

parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")


def test_attempts_failures_rewards_metrics_tokens_and_messages_are_columns(tmp_path):
    folder = exported(tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    export = export_run(folder, "parquet")
    assert export.target == tmp_path / "run.parquet"
    assert export.unread == ("row 2, attempt 0: it has no trajectory",)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.parquet"}
    assert export.target.stat().st_mode & 0o777 == 0o600
    table = parquet.read_table(export.target)
    columns = table.to_pydict()
    assert list(zip(columns["row"], columns["attempt"], columns["outcome"], strict=True)) == [
        (0, 0, "success"),
        (0, 1, "success"),
        (1, 0, "success"),
        (1, 1, "failure"),
        (2, 0, "error"),
        (2, 1, "success"),
    ]
    assert columns["reward"] == [1.0, 0.25, None, None, None, 1.0]
    assert columns["passed"] == [True, False, False, False, False, True]
    assert columns["removed"] == [False, False, True, False, False, False]
    assert columns["err_category"][3:5] == ["timeout", "unreachable"]
    assert (columns["err_source"][3], columns["err_message"][3]) == ("agent", "too slow")
    assert columns["metrics.calls/all"] == [2.0, *[None] * 5]
    assert columns["metrics.ok"] == [1.0, 0.0, *[None] * 4]
    assert (columns["prompt_tokens"][0], columns["completion_tokens"][0]) == (30, 7)
    assert columns["label"] == ["42", "42", "42", "42", None, "42"]
    assert json.loads(columns["metadata"][3]) == {"level": 1}
    assert (columns["prompt"][0], columns["answer"][0]) == ("What is 6 * 7?", "It is 42 \ufffd")
    said = columns["messages"][0]
    assert [each["role"] for each in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert (said[2]["reasoning_content"], said[2]["tool_calls"]) == ("I multiply.", [CALL])
    assert (said[3]["content"], said[3]["tool_call_id"]) == ("42", "c1")
    assert columns["messages"][4] is None
    ((earlier,), *others) = columns["earlier"]
    assert (earlier["rollout_id"], earlier["err_message"]) == ("r-0-0-0", "no agent")
    assert not any(others)
    about = table.schema.metadata
    assert json.loads(about[b"rollout.manifest"])["run_id"] == "e7c1f0a2b94d"
    assert json.loads(about[b"rollout.metrics"])["results"]["attempts"]["passed"] == 2


def test_what_exists_is_replaced_only_if_told_and_only_by_something_whole(tmp_path, monkeypatch):
    folder, target = exported(tmp_path / "run"), tmp_path / "there.parquet"
    target.write_text("mine")
    with pytest.raises(EvaluationError, match=r"there\.parquet exists; .* use --replace"):
        export_run(folder, "parquet", output=target)
    with pytest.raises(EvaluationError, match="is a folder"):
        export_run(folder, "parquet", output=folder, replace=True)
    attempts = ExportedRun.attempts

    def full_disk(run):
        yield next(attempts(run))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ExportedRun, "attempts", full_disk)
        with pytest.raises(EvaluationError, match="cannot be written: No space left on device"):
            export_run(folder, "parquet", output=target, replace=True)
    assert target.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "there.parquet"}
    export_run(folder, "parquet", output=target, replace=True)
    assert parquet.read_table(target).num_rows == 6
    assert {path.name for path in tmp_path.iterdir()} == {"run", "there.parquet"}


@pytest.mark.parametrize(
    ("to", "module"),
    [
        ("parquet", "pyarrow"),
        ("inspect", "inspect_ai.log"),
        ("mlflow", "mlflow"),
        ("wandb", "wandb"),
    ],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, to, module):
    assert to in FORMATS
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EvaluationError, match=rf'pip install "trio-rollout\[{to}\]"'):
        export_run(exported(tmp_path / "run"), to, output=tmp_path / "out.eval")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_without_an_attempt_and_a_format_that_there_is_not(tmp_path):
    folder = exported(tmp_path / "run")
    with pytest.raises(EvaluationError, match="csv is not a format of exports; there are parquet"):
        export_run(folder, "csv")
    (folder / "events.jsonl").unlink()
    with pytest.raises(EvaluationError, match="no attempt has ended yet"):
        export_run(folder, "parquet")


def test_whatever_a_run_holds_is_text(tmp_path):
    export = export_run(hostile(tmp_path / "run"), "parquet")
    assert parquet.read_table(export.target).num_rows == 6
    assert len(export.unread) == 6
