"""Export to an offline run of Weights & Biases, for ``wandb sync``."""

from __future__ import annotations

import os
import re
from itertools import count
from pathlib import Path
from typing import Any

from rollout._files.folders import PRIVATE
from rollout.evaluation.export.placing import beside, exists, unusable
from rollout.evaluation.export.reading import METRIC, ExportedRun, import_extra

__all__ = ["export_wandb"]

_ODD_IN_ID = re.compile(r"[^\w.-]")
_GROUP = "metrics/"
"""The section of the charts of the sample's own metrics; a dot would be a way into an object."""
_TABLE = "attempts"
_TABLE_ROWS = 10_000
"""W&B shows no more of a table."""
_BY_ATTEMPT = ("reward", "passed", "duration_sec", "prompt_tokens", "completion_tokens")


def export_wandb(run: ExportedRun, target: Path, *, replace: bool) -> Path:
    """Write a run as an offline run of W&B into the folder *target*, made if need be.

    Returns:
        The folder of the offline run.

    Raises:
        EvaluationError: wandb is missing, the folder has the run already, or it cannot be
            written.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb = import_extra("wandb", "wandb", "wandb.errors")
    run_id = _ODD_IN_ID.sub("_", str(run.manifest["run_id"]))
    target = target.absolute()
    old = sorted(target.glob(f"offline-run-*-{run_id}"))
    if old and not replace:
        raise exists(old[0])
    with beside(target) as folder:
        try:
            _write(wandb, run, run_id, folder)
        except wandb.errors.Error as error:
            raise unusable(target, error) from error
        finally:
            wandb.teardown()  # it ends W&B's own process
        (made,) = folder.glob(f"wandb/offline-run-*-{run_id}")
        made.chmod(PRIVATE)
        target.mkdir(exist_ok=True)
        for number, each in enumerate(old):
            each.rename(folder / f"old-{number}")
        made.rename(target / made.name)
    return target / made.name


def _write(wandb: Any, run: ExportedRun, run_id: str, folder: Path) -> None:
    settings = wandb.Settings(
        console="off",
        disable_git=True,
        save_code=False,
        silent=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    with wandb.init(
        mode="offline",
        dir=str(folder),
        id=run_id,
        project=_ODD_IN_ID.sub("_", run.dataset)[:128],
        name=run.name,
        job_type="evaluation",
        config=run.manifest,
        settings=settings,
    ) as made:
        columns: list[str] = []
        rows: list[list[Any]] = []
        numbers = count(1)

        def flush() -> None:
            """Log the table with its data in the run's folder alone, so that it can be moved."""
            number = next(numbers)
            key = _TABLE if number == 1 else f"{_TABLE}_{number}"
            table = wandb.Table(columns=columns, data=rows)
            table.bind_to_run(made, key, number)
            made.log({key: table})
            rows.clear()

        for attempt in run.attempts():
            row = attempt.table_row(run.metric_names)
            columns = list(row)
            rows.append(list(row.values()))
            logged = {name: row[name] for name in _BY_ATTEMPT}
            logged |= {_GROUP + name: value for name, value in attempt.metrics().items()}
            made.log({name: float(value) for name, value in logged.items() if value is not None})
            if len(rows) == _TABLE_ROWS:
                flush()
        if rows:
            flush()
        means = {
            _GROUP + name.removeprefix(METRIC): mean for name, (mean, _) in run.means().items()
        }
        made.summary.update({**means, **run.figures(), "complete": run.complete})
