"""``rollout eval regrade RUN --app FILE.py:APP``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from attrs import frozen

from rollout.backend import LocalBackend
from rollout.cli.eval.show import folder_argument
from rollout.cli.eval.summary import print_summary, summary_document
from rollout.cli.failures import CommandError, interrupted, run_async
from rollout.cli.interrupts import interrupts
from rollout.cli.options import json_option, seconds
from rollout.cli.reference import load_app
from rollout.cli.text import one_line, print_json
from rollout.evaluation import EvaluationMetrics, read_manifest
from rollout.evaluation.regrade import regrade_run

__all__ = ["command"]


@click.command("regrade", short_help="Grade the attempts of RUN again, with another grader.")
@folder_argument("run")
@click.option(
    "--app", required=True, metavar="FILE.py:APP", help="The application with the grader."
)
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder of the new run; RUN-regraded by default.",
)
@click.option(
    "--grader-timeout",
    metavar="SECONDS",
    type=seconds,
    help="Time for the grader; that of RUN by default.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="How many attempts are graded at a time.",
)
@json_option
def command(
    run: Path,
    app: str,
    output: Path | None,
    grader_timeout: float | None,
    max_in_flight: int,
    as_json: bool,
) -> None:
    """Grade the attempts of RUN again, with the grader of another application.

    No agent runs and RUN stays as it is: a new run has the same conversations with new rewards,
    for rollout eval compare. Attempts that failed stay failures, cancelled ones are left out.
    """
    if grader_timeout is not None and grader_timeout <= 0:
        raise click.BadParameter("must be above 0", param_hint="--grader-timeout")
    read_manifest(run)  # before a file of the user's is imported
    backend = load_app(app).backend
    if not isinstance(backend, LocalBackend) or backend.grader_cls is None:
        raise CommandError(f"{app} has no LocalBackend with a grader, which regrade needs")
    plan = _Plan(
        run=run,
        backend=backend,
        app=app,
        output=output or run.absolute().with_name(f"{run.absolute().name}-regraded"),
        grader_timeout_sec=grader_timeout,
        max_in_flight=max_in_flight,
    )
    metrics: EvaluationMetrics = run_async(_regrade, plan)
    manifest: dict[str, Any] = read_manifest(plan.output)
    if as_json:
        print_json(summary_document(plan.output, manifest, metrics))
        return
    print_summary(plan.output, manifest, metrics)
    click.echo(one_line(f"Compare: rollout eval compare {run} {plan.output}"))


@frozen(kw_only=True)
class _Plan:
    """What to grade, with what, and where to."""

    run: Path
    backend: LocalBackend
    app: str
    output: Path
    grader_timeout_sec: float | None
    max_in_flight: int


async def _regrade(plan: _Plan) -> EvaluationMetrics:
    async with interrupts(hang_up=True) as signals:
        with signals.work:
            return await regrade_run(
                plan.run,
                plan.backend,
                app=plan.app,
                output=plan.output,
                grader_timeout_sec=plan.grader_timeout_sec,
                max_in_flight=plan.max_in_flight,
            )
    assert signals.number is not None  # noqa: S101 - only a signal cancels the work
    raise interrupted(signals.number, "nothing was written")
