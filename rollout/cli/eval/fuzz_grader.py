"""``rollout eval fuzz-grader DATASET --app FILE.py:APP``."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import trio
from attrs import evolve
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn

from rollout.backend import LocalBackend
from rollout.cli.eval.summary import counted
from rollout.cli.failures import EXIT_FAILED, CommandError, interrupted, run_async
from rollout.cli.interrupts import interrupts
from rollout.cli.options import FILE_PATH, is_given, json_option, seconds
from rollout.cli.reference import load_app
from rollout.cli.terminal import LiveBar
from rollout.cli.text import one_line, print_json
from rollout.codec import unstructure
from rollout.evaluation import DatasetConfig, DatasetRow, load_config, open_dataset
from rollout.evaluation.fuzzing import (
    FAMILIES,
    Finding,
    FindingKind,
    FuzzSettings,
    GraderFindings,
    fuzz_grader,
    read_findings,
    replay_findings,
    save_findings,
)

__all__ = ["command"]

_WIDTH = max(map(len, FAMILIES))
_SHOWN_ROWS = 3
"""So many findings of one kind and family are shown."""
_OUTPUT = "grader-findings.json"
_SHOWN = 100
"""Characters of an answer that are shown."""


def listed() -> str:
    """Return the families in two columns, as a paragraph that click leaves as it is."""
    lines = (f"  {name:<{_WIDTH}}  {text}" for name, text in FAMILIES.items())
    return "\n".join(["\b", "Families of answers:", *lines])


@click.command(
    "fuzz-grader", short_help="Look for answers that a grader judges wrongly.", epilog=listed()
)
@click.argument("dataset", type=FILE_PATH, required=False)
@click.option("--app", metavar="FILE.py:APP", help="The application with the grader.")
@click.option(
    "--form",
    default="{answer}",
    show_default=True,
    help="The form of a right answer, with {answer} where the label stands.",
)
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="How many answers of each family are tried.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Decides which answers are tried.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Take this many rows of the dataset at most.",
)
@click.option("--rows", help="Take these rows, as in 0-99,150,200-.")
@click.option(
    "--pass-threshold",
    type=float,
    default=1.0,
    show_default=True,
    help="The reward from which an answer passes.",
)
@click.option(
    "--grader-timeout",
    metavar="SECONDS",
    type=seconds,
    default=10.0,
    show_default=True,
    help="Time for the grader for each answer.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="FAMILY",
    type=click.Choice(list(FAMILIES)),
    help="Leave out a family of answers; may be given several times.",
)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=_OUTPUT,
    show_default=True,
    help="The file for what is found; it must not exist.",
)
@click.option(
    "--replay",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Grade what was found in this file again instead.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    dataset: str | None,
    app: str | None,
    replay: Path | None,
    output: Path,
    limit: int,
    rows: str | None,
    grader_timeout: float,
    as_json: bool,
    **settings: Any,
) -> None:
    """Look for answers that a grader judges wrongly, with the prompts and labels of DATASET.

    Answers that deserve nothing must not pass, right ones in other forms must, and the grader
    must not fail. What is wrong is shrunk to the smallest answer and written to a file that
    --replay, or a test, grades again. No agent runs. Exits with 1 if anything is wrong.

    DATASET may be the config of an evaluation (.toml), for its dataset and its pass threshold.
    """
    if replay is not None:
        given = [name for name in ctx.params if name not in _REPLAYED and is_given(ctx, name)]
        if given:
            raise click.UsageError(f"--replay grades what is in its file: drop {_named(given[0])}")
        _replay(replay, app, as_json=as_json)
        return
    if dataset is None or app is None:
        missing = "DATASET" if dataset is None else "--app"
        raise click.UsageError(f"{missing} is missing; give DATASET with --app, or --replay FILE")
    config, threshold = _dataset(dataset, rows, limit)
    if threshold is not None and not is_given(ctx, "pass_threshold"):
        settings["pass_threshold"] = threshold
    backend, taken = _inputs(app, config, output)
    found = GraderFindings(
        app=app,
        dataset=dataset,
        settings=FuzzSettings(grader_timeout_sec=grader_timeout, **settings),
        complete=False,
        findings=[],
    )
    found = run_async(_fuzz, backend, taken, found, output, as_json)
    if as_json:
        print_json(unstructure(found))
    else:
        _print(found.findings)
        if _without_base(found, taken):
            click.echo(
                "No label passes as it is, so no other form was tried: --form has to be the form "
                "of a right answer, and --pass-threshold its reward."
            )
    if found.findings:
        raise CommandError(
            f"{counted(len(found.findings), 'answer')} judged wrongly; they are in {output}, "
            f"again: rollout eval fuzz-grader --replay {output}",
            exit_code=EXIT_FAILED,
        )


def _without_base(found: GraderFindings, rows: Sequence[DatasetRow]) -> bool:
    """Whether no label of the rows passes."""
    refused = {each.row for each in found.findings if each.family == "label"}
    labelled = {each.index for each in rows if each.label and each.label.strip()}
    return bool(labelled) and labelled <= refused


_REPLAYED = frozenset({"replay", "app", "as_json"})
"""What goes together with ``--replay``."""


def _named(parameter: str) -> str:
    return "DATASET" if parameter == "dataset" else f"--{parameter.replace('_', '-')}"


def _backend(app: str) -> LocalBackend:
    backend = load_app(app).backend
    if not isinstance(backend, LocalBackend) or backend.grader_cls is None:
        raise CommandError(f"{app} has no LocalBackend with a grader, which fuzz-grader needs")
    return backend


def _dataset(path: str, rows: str | None, limit: int) -> tuple[DatasetConfig, float | None]:
    """Return the dataset, and the pass threshold where *path* is the config of an evaluation."""
    if not path.endswith(".toml"):
        return DatasetConfig(path=path, rows=rows, limit=limit), None
    config = load_config(path)
    few = min(limit, config.dataset.limit or limit)
    taken = evolve(config.dataset, rows=rows or config.dataset.rows, limit=few)
    return taken, config.run.pass_threshold


def _inputs(app: str, config: DatasetConfig, output: Path) -> tuple[LocalBackend, list[DatasetRow]]:
    if os.path.lexists(output):
        raise CommandError(f"{output} is there already; name another file with --output")
    if not output.parent.is_dir():
        raise CommandError(f"--output: there is no folder {output.parent}")
    taken = list(open_dataset(config).rows())  # before a file of the user's is imported
    return _backend(app), taken


async def _fuzz(
    backend: LocalBackend,
    rows: Sequence[DatasetRow],
    found: GraderFindings,
    output: Path,
    silent: bool,
) -> GraderFindings:
    def add(finding: Finding) -> None:
        # At once: a grader that holds the interpreter can only be killed.
        found.findings.append(finding)
        save_findings(output, found)

    with _Progress(silent=silent) as progress, _scratch():
        async with interrupts(hang_up=True) as signals:
            with signals.work:
                await fuzz_grader(
                    backend, rows, found.settings, on_family=progress.begin, on_finding=add
                )
                found = evolve(found, complete=True)
                if found.findings:
                    await trio.to_thread.run_sync(save_findings, output, found)
                return found
    assert signals.number is not None  # noqa: S101 - only a signal cancels the work
    count = counted(len(found.findings), "answer")
    note = f"{count} judged wrongly so far, in {output}" if found.findings else "nothing found yet"
    raise interrupted(signals.number, note)


@contextmanager
def _scratch() -> Generator[None, None, None]:
    """Keep what Hypothesis caches on disk out of the current folder."""
    try:
        from hypothesis.configuration import set_hypothesis_home_dir  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        yield  # it is the search that says so
        return
    with TemporaryDirectory(prefix="rollout-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


class _Progress(LiveBar):
    """The family that is tried, on stderr, if that is a terminal."""

    def __init__(self, *, silent: bool) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.fields[family]}"),
            BarColumn(),
            MofNCompleteColumn(),
            silent=silent,
        )
        self._task = self._bar.add_task("", total=len(FAMILIES), family="")

    def begin(self, family: str) -> None:
        """Show that a family is tried."""
        self._bar.update(self._task, completed=list(FAMILIES).index(family), family=family)


def _replay(path: Path, app: str | None, *, as_json: bool) -> None:
    found = read_findings(path)
    backend = _backend(app or found.app)
    wrong = run_async(replay_findings, path, backend)
    if as_json:
        print_json(
            {"replayed": len(found.findings), "findings": [unstructure(each) for each in wrong]}
        )
    else:
        _print(wrong)
        click.echo(f"{len(found.findings) - len(wrong)} of {len(found.findings)} judged rightly")
    if wrong:
        raise CommandError(
            f"{counted(len(wrong), 'answer')} of {path} judged wrongly", exit_code=EXIT_FAILED
        )


# --- what is printed --------------------------------------------------------------------------

_HEADINGS = {
    FindingKind.REWARDED: "Passed, and deserves nothing:",
    FindingKind.REFUSED: "Right, and did not pass:",
    FindingKind.FAILED: "The grader failed:",
}


def _print(findings: Sequence[Finding]) -> None:
    for kind, heading in _HEADINGS.items():
        of_kind = [each for each in findings if each.kind is kind]
        if not of_kind:
            continue
        click.echo(heading)
        for family in FAMILIES:
            alike = [each for each in of_kind if each.family == family]
            for each in alike[:_SHOWN_ROWS]:
                click.echo(f"  {family:<{_WIDTH}}  {_line(each)}")
            if len(alike) > _SHOWN_ROWS:
                click.echo(f"  {family:<{_WIDTH}}  and in {len(alike) - _SHOWN_ROWS} rows more")
    if not findings:
        click.echo("No answer was judged wrongly.")


def _line(finding: Finding) -> str:
    about = f"row {finding.row}, label {_quoted(finding.label)}, "
    about += f"reward {finding.reward}" if finding.error is None else one_line(finding.error)
    return f"{_quoted(finding.answer)}  ({about})"


def _quoted(text: str | None) -> str:
    if text is None:
        return "none"
    if len(text) <= _SHOWN:
        return json.dumps(text)
    return f"{json.dumps(text[:_SHOWN])} and {len(text) - _SHOWN} characters more"
