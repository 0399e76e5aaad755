"""Read a run for an export: each attempt with its conversation, and its figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from rollout._json.text import utf8
from rollout._page.conversation import read_document
from rollout.codec import dump_json, format_timestamp
from rollout.errors import EvaluationError, TrajectoryError
from rollout.evaluation.folder.journal import (
    indexed_records,
    open_journal,
    read_index,
    record_at,
)
from rollout.evaluation.folder.layout import TRAJECTORIES
from rollout.evaluation.folder.manifest import read_manifest
from rollout.evaluation.index import AttemptIndex
from rollout.evaluation.metrics import EvaluationMetrics, compute_metrics
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.sequential import replay
from rollout.trajectory.messages import readable_messages

__all__ = ["METRIC", "ExportedAttempt", "ExportedRun", "import_extra", "read_run", "text_of"]

METRIC = "metrics."
"""What the names of the sample's own metrics begin with."""


def import_extra(extra: str, *modules: str) -> Any:
    """Import what comes with an extra; return the first of the modules.

    Raises:
        EvaluationError: It is not installed.
    """
    try:
        first, *_ = [import_module(module) for module in modules]
    except ImportError as error:
        raise EvaluationError(
            f'exporting to {extra} needs its extra: pip install "trio-rollout[{extra}]" '
            f"({type(error).__name__}: {error})"
        ) from None
    return first


@frozen(kw_only=True)
class ExportedAttempt:
    """An attempt with its conversation, in text that is valid UTF-8.

    Attributes:
        record: The record that counts.
        others: Its other records, in order.
        label: What the grader compared with.
        metadata: The row's metadata.
        messages: The conversation as chat messages; ``None`` if its trajectory cannot be read.
    """

    record: AttemptRecord
    others: list[AttemptRecord]
    label: str | None
    metadata: dict[str, Any] | None
    messages: list[dict[str, Any]] | None

    @property
    def prompt(self) -> str | None:
        """The text of the first message of a user."""
        return self._text("user", self.messages or [])

    @property
    def answer(self) -> str | None:
        """The text of the last message of the agent."""
        return self._text("assistant", reversed(self.messages or []))

    @staticmethod
    def _text(role: str, messages: Any) -> str | None:
        found = next((each for each in messages if each["role"] == role and each["content"]), None)
        return None if found is None else text_of(found["content"])

    def cells(self) -> dict[str, Any]:
        """The attempt as cells of a table, without messages, metrics and earlier rollouts."""
        record = self.record
        cells = {
            "row": record.row,
            "attempt": record.attempt,
            "retry": record.retry,
            "rollout_id": record.rollout_id,
            "outcome": record.outcome.value,
            "reward": None if record.reward is None else float(record.reward),
            "passed": record.passed,
            "removed": record.removed,
            "err_category": record.err_category,
            "err_source": record.err_source,
            "err_message": record.err_message,
            "submitted_at": record.submitted_at,
            "agent_started_at": record.agent_started_at,
            "duration_sec": float(record.duration_sec),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "prompt": self.prompt,
            "answer": self.answer,
            "label": self.label,
            "metadata": None if self.metadata is None else dump_json(self.metadata).decode(),
        }
        return {name: _clean(value) for name, value in cells.items()}

    @property
    def ended_at(self) -> datetime:
        """When it ended."""
        return _end(self.record)

    def table_row(self, metric_names: list[str]) -> dict[str, Any]:
        """All of it as cells of a table: the messages and earlier rollouts are JSON."""
        metrics = self.metrics()
        earlier = [
            {**each, "submitted_at": format_timestamp(each["submitted_at"])}
            for each in self.earlier()
        ]
        return {
            **self.cells(),
            **{f"{METRIC}{name}": metrics.get(name) for name in metric_names},
            "messages": None if self.messages is None else dump_json(self.messages).decode(),
            "earlier": dump_json(earlier).decode(),
        }

    def metrics(self) -> dict[str, float]:
        """The sample's own metrics."""
        return {utf8(name): float(value) for name, value in self.record.metrics.items()}

    def earlier(self) -> list[dict[str, Any]]:
        """The rollouts of this attempt before the one that counts."""
        return [
            {
                "rollout_id": _clean(each.rollout_id),
                "outcome": each.outcome.value,
                "err_category": _clean(each.err_category),
                "err_source": _clean(each.err_source),
                "err_message": _clean(each.err_message),
                "submitted_at": each.submitted_at,
                "duration_sec": float(each.duration_sec),
            }
            for each in self.others
        ]


@define(kw_only=True)
class ExportedRun:
    """A run to export.

    Attributes:
        folder: Its folder.
        manifest: Its manifest, in text that is valid UTF-8.
        metrics: Its figures.
        metric_names: The names of the metrics that its samples have, in order.
        began: When the first attempt was submitted.
        ended: When the last one ended.
        unread: Why conversations could not be read, a line for each; grows as attempts are read.
    """

    folder: Path
    manifest: dict[str, Any]
    metrics: EvaluationMetrics
    metric_names: list[str]
    began: datetime
    ended: datetime
    unread: list[str] = field(factory=list)
    _index: AttemptIndex = field(alias="index")

    @property
    def dataset(self) -> str:
        """The name of the dataset."""
        name = Path(str(self.manifest["dataset"].get("path"))).name
        return re.split(r"[.@]", name)[0] or "dataset"

    @property
    def name(self) -> str:
        """The name of the run: that of its folder."""
        return self.folder.absolute().name or str(self.manifest["run_id"])

    @property
    def complete(self) -> bool:
        """Whether every attempt has ended and none was cancelled."""
        counts = self.metrics.results.attempts
        return counts.settled >= counts.planned

    def attempts(self) -> Iterator[ExportedAttempt]:
        """Read the attempts, by row and number. Blocking.

        Raises:
            EvaluationDamagedError: The journal was changed since it was indexed.
        """
        with open_journal(self.folder) as file:
            for each in self._index:
                record = record_at(self.folder, file, each.place)
                others = [record_at(self.folder, file, place) for place in each.others]
                yield self._attempt(record, others)

    def means(self) -> dict[str, tuple[float, int]]:
        """The mean of each metric of the samples, and over how many attempts it is."""
        metrics = self.metrics.results.sample_metrics.items()
        return {f"{METRIC}{utf8(name)}": (each.mean, each.count) for name, each in metrics}

    def figures(self) -> dict[str, float]:
        """The figures of the run by name, those that there are."""
        results, timing = self.metrics.results, self.metrics.timing
        counts = results.attempts
        found: dict[str, float | None] = {
            "pass_rate": results.pass_rate.value,
            "pass_rate_low": results.pass_rate.low,
            "pass_rate_high": results.pass_rate.high,
            "mean_reward": results.mean_reward.value,
            "mean_reward_low": results.mean_reward.low,
            "mean_reward_high": results.mean_reward.high,
            **{f"pass_at_{each.k}": each.value for each in results.pass_at_k},
            **{f"pass_hat_{each.k}": each.value for each in results.pass_hat_k},
            "attempts_planned": counts.planned,
            "attempts_settled": counts.settled,
            "attempts_passed": counts.passed,
            **{f"attempts_{name}": count for name, count in results.outcomes.items()},
            "prompt_tokens": results.prompt_tokens.total,
            "completion_tokens": results.completion_tokens.total,
            "duration_sec_median": timing.settled.median,
            "duration_sec_p95": timing.settled.p95,
            "retries": timing.retries,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _attempt(self, record: AttemptRecord, others: list[AttemptRecord]) -> ExportedAttempt:
        extra: dict[str, Any] = {}
        messages: list[dict[str, Any]] | None = None
        place = f"row {record.row}, attempt {record.attempt}"
        if record.trajectory is None:
            self.unread.append(f"{place}: it has no trajectory")
        else:
            try:
                document = read_document(self.folder / TRAJECTORIES, record.trajectory)
                messages = [_chat(message) for message in readable_messages(_clean(document))]
                extra = _clean(document.get("extra") or {})
            except TrajectoryError as error:
                self.unread.append(f"{place}: {error}")
        label, metadata = extra.get("label"), extra.get("metadata")
        return ExportedAttempt(
            record=record,
            others=others,
            label=label if isinstance(label, str) else None,
            metadata=metadata if isinstance(metadata, dict) else None,
            messages=messages,
        )


def read_run(folder: Path) -> ExportedRun:
    """Read manifest, journal and figures of a run, complete or not. Blocking.

    Raises:
        EvaluationError: The folder holds no run, or no attempt of it has ended.
        EvaluationDamagedError: A file of the run is damaged.
    """
    manifest, index = read_manifest(folder), read_index(folder)
    names: set[str] = set()
    began: list[datetime] = []
    ended: list[datetime] = []

    def records() -> Iterator[AttemptRecord]:
        for record in indexed_records(folder, index):
            names.update(map(utf8, record.metrics))
            began[:] = [min([record.submitted_at, *began])]
            ended[:] = [max([_end(record), *ended])]
            yield record

    rows, n = manifest["dataset"]["selected"], manifest["run"]["n"]
    stopping = replay(manifest, index)
    metrics = compute_metrics(records(), rows=rows, n=n, stopping=stopping)
    if not began:
        raise EvaluationError(f"{folder}: no attempt has ended yet, so there is nothing to export")
    return ExportedRun(
        folder=folder,
        manifest=_clean(manifest),
        metrics=metrics,
        metric_names=sorted(names),
        began=began[0],
        ended=ended[0],
        index=index,
    )


def _end(record: AttemptRecord) -> datetime:
    return record.submitted_at + timedelta(seconds=record.duration_sec)


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The content of a message as text: parts that are not text are JSON."""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"] if part["type"] == "text" else dump_json(part).decode() for part in content
    )


def _chat(message: dict[str, Any]) -> dict[str, Any]:
    """Keep of a message the fields that chat messages have everywhere."""
    found = {"role": message["role"], "content": message["content"]}
    for name in ("reasoning_content", "tool_calls", "tool_call_id"):
        if name in message:
            found[name] = message[name]
    if "tool_calls" in found:
        names = ("id", "type", "function")
        found["tool_calls"] = [{name: call[name] for name in names} for call in found["tool_calls"]]
    return found


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, dict):
        return {utf8(name): _clean(each) for name, each in value.items()}
    return [_clean(each) for each in value] if isinstance(value, list) else value
