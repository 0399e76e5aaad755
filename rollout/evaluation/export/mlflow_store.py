"""Export to an MLflow file store: a run in the experiment that the dataset gives its name.

Theory of operation: the run is made in a store beside, with the addresses that it will have, and
moved into its experiment when it is whole. So runs that the store has already are left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollout._files.folders import PRIVATE
from rollout.codec import format_timestamp
from rollout.errors import EvaluationError
from rollout.evaluation.export.mlflow_traces import milliseconds, write_trace
from rollout.evaluation.export.placing import beside, exists, unusable
from rollout.evaluation.export.reading import METRIC, ExportedAttempt, ExportedRun, import_extra
from rollout.evaluation.folder.layout import METRICS, REPORT, TRAJECTORIES
from rollout.evaluation.folder.manifest import MANIFEST

__all__ = ["export_mlflow"]

_ENVIRONMENT = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # without it, newer ones refuse their file store
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_RUN_ID = "rollout.run_id"
_META = "meta.yaml"
_TABLE = "attempts.json"
_ODD = re.compile(r"[^\w.\- ]")
"""What MLflow or a file system does not take in a name; a slash would make a group."""
_BATCH = 1000
"""MLflow takes no more metrics at once."""
_LONGEST_PARAM = 6000
_LONG = frozenset({"sources", "distributions"})
"""Lists of files and packages; the manifest among the artifacts has them."""
_ATTEMPT = "attempt/"
"""The group of the figures of each attempt."""
_BY_ATTEMPT = ("reward", "passed", "duration_sec", "prompt_tokens", "completion_tokens")


def export_mlflow(run: ExportedRun, target: Path, *, replace: bool) -> Path:
    """Add a run to the MLflow file store in the folder *target*, which is made if need be.

    Returns:
        The folder of the run in the store.

    Raises:
        EvaluationError: MLflow is missing, the store has the run already or cannot be used.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    mlflow = import_extra(
        "mlflow",
        *("mlflow", "mlflow.entities", "mlflow.exceptions", "mlflow.store.tracking.file_store"),
    )
    target = target.absolute()
    try:
        with beside(target) as folder:
            store = _Store(mlflow, run, target, folder / "store")
            old = store.find(replace=replace)
            store.write()
            return store.place(old, folder / "old")
    except mlflow.exceptions.MlflowException as error:
        raise unusable(target, error) from error


class _Store:
    """The store to add a run to, and the one beside that it is made in."""

    def __init__(self, mlflow: Any, run: ExportedRun, target: Path, made: Path) -> None:
        self._mlflow = mlflow
        self._run = run
        self._target = target
        self._made = made
        self._file_store = mlflow.store.tracking.file_store.FileStore
        self._experiment = ""
        self._run_id = ""

    def find(self, *, replace: bool) -> Path | None:
        """Look the experiment up; return the folder of an earlier export to replace.

        Raises:
            EvaluationError: There is one that is not to be replaced, the experiment was deleted,
                or the folder is not a store.
        """
        if not self._target.exists():
            return None
        if not any(self._target.glob(f"*/{_META}")) and any(self._target.iterdir()):
            raise EvaluationError(
                f"{self._target} is not an MLflow file store; name another folder with --output"
            )
        store = self._file_store(str(self._target))
        experiment = store.get_experiment_by_name(self._run.dataset)
        if experiment is None:
            return None
        if experiment.lifecycle_stage != "active":
            raise EvaluationError(
                f"{self._target}: the experiment {self._run.dataset} is deleted; restore it with "
                "mlflow experiments restore, or name another folder with --output"
            )
        self._experiment = str(experiment.experiment_id)
        wanted = self._run.manifest["run_id"]
        for found in store.search_runs(
            [self._experiment],
            f"tags.`{_RUN_ID}` = '{wanted}'",
            self._mlflow.entities.ViewType.ALL,
        ):
            if not replace:
                raise exists(f"the run {wanted} in {self._target}")
            return self._target / self._experiment / str(found.info.run_id)
        return None

    def write(self) -> None:
        """Make the run beside the store."""
        run, entities = self._run, self._mlflow.entities
        # Addresses are those in the store that the run goes to.
        store = self._file_store(str(self._made), self._target.as_uri())
        if self._experiment:
            folder = self._made / self._experiment
            folder.mkdir()
            shutil.copyfile(self._target / self._experiment / _META, folder / _META)
        else:
            self._experiment = store.create_experiment(run.dataset)
        tags = {
            "mlflow.source.name": str(run.folder.absolute()),
            "mlflow.source.type": "LOCAL",
            "mlflow.loggedArtifacts": json.dumps([{"path": _TABLE, "type": "table"}]),
            _RUN_ID: str(run.manifest["run_id"]),
            "rollout.complete": json.dumps(run.complete),
        }
        made = store.create_run(
            self._experiment,
            "",
            milliseconds(run.began),
            [entities.RunTag(name, value) for name, value in tags.items()],
            run.name,
        )
        self._run_id = made.info.run_id
        store.log_inputs(self._run_id, [self._dataset()])
        names = _names(run.metric_names)
        self._write_attempts(store, names)
        now = milliseconds(run.ended)
        means = {names[name]: mean for name, (mean, _) in run.means().items()}
        figures = means | run.figures()
        store.log_batch(
            self._run_id,
            [entities.Metric(name, value, now, 0) for name, value in figures.items()],
            [entities.Param(name, value) for name, value in _params(run.manifest)],
            [],
        )
        status = entities.RunStatus.FINISHED if run.complete else entities.RunStatus.KILLED
        store.update_run_info(self._run_id, status, now, run.name)

    def place(self, old: Path | None, away: Path) -> Path:
        """Move the run into the store, whose first one may bring its experiment or all of it.

        Args:
            old: The folder of the run to replace.
            away: Where that goes.
        """
        made = self._made / self._experiment / self._run_id
        target = self._target / self._experiment / self._run_id
        made.chmod(PRIVATE)
        (made.parent / "traces").chmod(PRIVATE)
        if not self._target.exists():
            self._made.rename(self._target)
        elif not target.parent.exists():
            made.parent.rename(target.parent)
        else:
            away.mkdir()
            if old is not None:
                old.rename(away / "run")
            for kind in ("datasets", "traces"):
                folder = target.parent / kind
                folder.mkdir(PRIVATE, exist_ok=True)
                for each in (made.parent / kind).iterdir():
                    if (folder / each.name).exists():
                        (folder / each.name).rename(away / each.name)
                    each.rename(folder / each.name)
            made.rename(target)
        return target

    def _dataset(self) -> Any:
        dataset, entities = self._run.manifest["dataset"], self._mlflow.entities
        return entities.DatasetInput(
            entities.Dataset(
                name=self._run.dataset,
                digest=str(dataset.get("digest"))[:36],
                source_type="local",
                source=json.dumps({"uri": str(dataset.get("path"))}),
                profile=json.dumps({"num_rows": dataset["selected"]}),
            ),
            [],
        )

    def _write_attempts(self, store: Any, names: dict[str, str]) -> None:
        """Write the table of attempts, their figures and trajectories, and files of the run."""
        run, entities = self._run, self._mlflow.entities
        artifacts = self._made / self._experiment / self._run_id / "artifacts"
        (artifacts / TRAJECTORIES).mkdir()
        metrics: list[Any] = []
        with (artifacts / _TABLE).open("w", encoding="utf-8") as table:
            for number, attempt in enumerate(run.attempts()):
                cells = attempt.table_row(run.metric_names)
                # What pandas calls the orientation "split".
                head = f'{{"columns": {json.dumps(list(cells))}, "data": [\n'
                table.write(",\n" if number else head)
                table.write(json.dumps([_cell(value) for value in cells.values()]))
                now = milliseconds(attempt.ended_at)
                step = attempt.record.row * run.manifest["run"]["n"] + attempt.record.attempt
                metrics += [
                    entities.Metric(f"{_ATTEMPT}{name}", float(value), now, step)
                    for name, value in _figures(attempt, names)
                    if value is not None
                ]
                write_trace(
                    entities,
                    store,
                    self._made / self._experiment,
                    attempt,
                    experiment=self._experiment,
                    mlflow_run=self._run_id,
                    run_id=str(run.manifest["run_id"]),
                )
                while len(metrics) >= _BATCH:
                    store.log_batch(self._run_id, metrics[:_BATCH], [], [])
                    del metrics[:_BATCH]
                if attempt.messages is not None and attempt.record.trajectory is not None:
                    file = Path(TRAJECTORIES, attempt.record.trajectory)
                    shutil.copyfile(run.folder / file, artifacts / file)
            table.write("]}\n")
        store.log_batch(self._run_id, metrics, [], [])
        for name in (MANIFEST, METRICS, REPORT):
            if (run.folder / name).is_file():
                shutil.copyfile(run.folder / name, artifacts / name)


def _figures(attempt: ExportedAttempt, names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    cells = attempt.cells()
    for name in _BY_ATTEMPT:
        yield name, cells[name]
    for name, value in attempt.metrics().items():
        yield names[METRIC + name], value


def _names(metrics: list[str]) -> dict[str, str]:
    """Give each metric of the samples a name that MLflow takes.

    Raises:
        EvaluationError: Two of them would have the same.
    """
    names = {METRIC + name: METRIC + _ODD.sub("_", name) for name in metrics}
    for first, second in pairwise(sorted(names, key=names.__getitem__)):
        if names[first] == names[second]:
            raise EvaluationError(
                f"the metrics {first!r} and {second!r} would both be {names[first]} in MLflow"
            )
    return names


def _params(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for section in ("dataset", "server", "chat", "run"):
        for name, value in manifest[section].items():
            text = value if isinstance(value, str) else json.dumps(value)
            if value is not None and name not in _LONG:
                yield f"{section}.{name}", text[:_LONGEST_PARAM]


def _cell(value: Any) -> Any:
    return format_timestamp(value) if isinstance(value, datetime) else value
