"""Export a run to the formats of other tools.

Nothing is changed in the folder of the run. What is written gets its name when it is whole, so
that there is never half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from rollout.errors import EvaluationError
from rollout.evaluation.export.inspect_log import export_inspect
from rollout.evaluation.export.mlflow_store import export_mlflow
from rollout.evaluation.export.parquet import export_parquet
from rollout.evaluation.export.reading import ExportedRun, read_run
from rollout.evaluation.export.wandb_run import export_wandb

__all__ = ["FORMATS", "Export", "export_run"]


@frozen(kw_only=True)
class Export:
    """What was written.

    Attributes:
        target: The file, or the folder.
        unread: Why conversations are missing in it, a line for each.
    """

    target: Path
    unread: tuple[str, ...] = ()


def _suffixed(suffix: str) -> Callable[[ExportedRun], Path]:
    return lambda run: run.folder.absolute().with_name(f"{run.name}{suffix}")


_WRITERS: dict[str, tuple[Callable[..., Path], Callable[[ExportedRun], Path]]] = {
    "parquet": (export_parquet, _suffixed(".parquet")),
    "inspect": (export_inspect, _suffixed(".eval")),
    "mlflow": (export_mlflow, lambda _: Path("mlruns")),
    "wandb": (export_wandb, lambda _: Path("wandb")),
}
"""What writes each format, and where to by default."""

FORMATS = tuple(_WRITERS)
"""What a run can be exported to; each is the name of the extra that it needs."""


def export_run(
    folder: Path, to: str, *, output: Path | None = None, replace: bool = False
) -> Export:
    """Export a run, complete or not, to the format of another tool. Blocking; use a thread.

    Args:
        folder: The folder of the run.
        to: One of `FORMATS`.
        output: The file, or the folder of the store, to write to.
        replace: Whether an earlier export there may be replaced.

    Raises:
        EvaluationError: The folder holds no run, the format's extra is missing, an export is
            there already, or it cannot be written.
        EvaluationDamagedError: A file of the run is damaged.
    """
    if to not in _WRITERS:
        raise EvaluationError(f"{to} is not a format of exports; there are {', '.join(FORMATS)}")
    write, default = _WRITERS[to]
    run = read_run(folder)
    target = write(run, default(run) if output is None else output, replace=replace)
    return Export(target=target, unread=tuple(run.unread))
