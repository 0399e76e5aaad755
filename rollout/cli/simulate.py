"""``rollout simulate``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, define, field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from rollout.cli.failures import EXIT_FAILED, CommandError, interrupted
from rollout.cli.options import is_given, json_option, processors
from rollout.cli.seeds import Recipe, SeedOutcome, run_seeds
from rollout.cli.terminal import LiveBar, draw_table, make_console
from rollout.cli.text import echo_lines, print_json

if TYPE_CHECKING:
    from rollout.simulation import SimulationStats

__all__ = ["FAULTS", "command"]

_LEVELS = ("none", "mild", "harsh")
_MANY = ("seeds", "first_seed", "processes")
_MOST_STORIES = 3
_SEC_PER_HOUR = 3600


FAULTS = {
    "refused": "the connection is refused",
    "lost-before": "lost before the server sees the request",
    "lost-during": "lost while the server works on the request",
    "lost-after": "lost after the server has answered",
    "silence": "the answer never arrives; the read times out",
    "gateway": "a gateway answers 502, 503 or 504",
    "busy": "a gateway answers an admission with 429",
    "truncated": "the body of the answer is cut short",
    "foreign": "the answer is about another rollout",
    "late": "the answer is held back, for up to 35 s",
    "stale": "a cache repeats an old answer",
    "trickle": "the answer comes bit by bit, for up to 350 s",
    "paused": "all processes stand still for a while",
    "server-crashed": "the server, or a worker, is killed, and started again",
    "cut-off": "the network between a worker and the server is cut",
    "drained": "a worker leaves when its rollouts have ended, and comes back",
}
"""Each kind that a summary counts."""


def listed() -> str:
    """Return the faults in two columns, as a paragraph that click leaves as it is."""
    width = max(map(len, FAULTS))
    return "\n".join(["\b", "Faults:", *(f"  {name:<{width}}  {FAULTS[name]}" for name in FAULTS)])


@click.command(epilog=listed())
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="How many seeds to simulate.",
)
@click.option(
    "--first-seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The first of them; the others follow it.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Simulate this seed alone and print its trace."
)
@click.option(
    "--faults",
    type=click.Choice(_LEVELS),
    default="mild",
    show_default=True,
    help="How much goes wrong.",
)
@click.option(
    "--rollouts",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How many rollouts each seed has.",
)
@click.option(
    "--feed", is_flag=True, help="Let batches and the result feed through, not single polls alone."
)
@click.option(
    "--crashes",
    is_flag=True,
    help="Give the server a state, and kill it several times, some by a cut of the power.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Simulate the front of a pool with so many workers, which die and are cut off.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="How many processes simulate; by default one for every processor.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    seeds: int,
    first_seed: int,
    seed: int | None,
    faults: str,
    rollouts: int,
    feed: bool,
    crashes: bool,
    workers: int | None,
    processes: int | None,
    as_json: bool,
) -> None:
    """Simulate rollouts on a network with faults, and check the invariants.

    Client, server and backend are the real ones. The network between them loses, delays and
    garbles requests, processes pause and crash, callers vanish; and time is simulated, so that
    nothing waits. A seed decides everything: the same seed gives the same run.

    Exits with 1 if an invariant does not hold, with what led to it and the command that
    replays it.
    """
    keep_trace = seed is not None
    recipe = Recipe(faults, rollouts, keep_trace, feed=feed, crashes=crashes, workers=workers)
    if seed is not None:
        given = [name for name in _MANY if is_given(ctx, name)]
        if given:
            option = given[0].replace("_", "-")
            raise click.UsageError(f"--seed simulates one seed: drop --{option}")
        tally = _Tally(recipe, range(seed, seed + 1), processes=1)
        _run(tally, silent=as_json)
        _print_replay(tally, as_json=as_json)
    else:
        count = min(processes or processors(), seeds)
        tally = _Tally(recipe, range(first_seed, first_seed + seeds), processes=count)
        _run(tally, silent=as_json)
        _print_run(tally, as_json=as_json)
    tally.conclude()


def _run(tally: _Tally, *, silent: bool) -> None:
    outcomes = run_seeds(tally.seeds, tally.recipe, workers=tally.processes)
    with _signals(tally), closing(outcomes), _LiveProgress(tally, silent=silent) as progress:
        for outcome in outcomes:
            tally.add(outcome)
            progress.changed()


def _print_run(tally: _Tally, *, as_json: bool) -> None:
    if as_json:
        print_json(tally.to_dict())
        return
    if tally.first_bad is not None:
        _print_findings(tally.first_bad, most=_MOST_STORIES)
        click.echo()
    _print_table(tally, make_console(highlight=False))


def _print_replay(tally: _Tally, *, as_json: bool) -> None:
    if tally.last is None:
        return
    events = list(tally.last.trace or ())
    if as_json:
        print_json(tally.to_dict() | {"trace": [asdict(event) for event in events]})
        return
    for event in events:
        echo_lines(str(event))
    _print_findings(tally.last, most=None)
    # What is on stdout is the same every time, so the time that it took is not there.
    _print_table(tally, make_console(highlight=False, stderr=True))


@define(eq=False)
class _Tally:
    """The outcomes of the seeds so far.

    Attributes:
        recipe: What is simulated with each.
        seeds: All that are to be simulated.
        processes: In how many processes.
        done: How many are through.
        stats: What they amounted to, together; ``None`` before the first.
        violations: How many violations they showed.
        errors: How many of them raised.
        bad: How many of them showed a violation or raised.
        last: The last that is through.
        first_bad: The first that showed a violation or raised.
        signal: The signal that ended it all, if one did.
        wall_sec: How long it took until the last seed that is through, in seconds.
    """

    recipe: Recipe
    seeds: Sequence[int]
    processes: int
    done: int = 0
    stats: SimulationStats | None = None
    violations: int = 0
    errors: int = 0
    bad: int = 0
    last: SeedOutcome | None = None
    first_bad: SeedOutcome | None = None
    signal: int | None = None
    wall_sec: float = 0.0
    _began: float = field(factory=time.perf_counter)

    def add(self, outcome: SeedOutcome) -> None:
        """Count what came of one more seed."""
        self.done += 1
        self.last = outcome
        self.wall_sec = time.perf_counter() - self._began
        self.violations += len(outcome.violations)
        self.errors += outcome.error is not None
        self.bad += outcome.bad
        if outcome.bad and self.first_bad is None:
            self.first_bad = outcome
        if outcome.stats is not None:
            self.stats = outcome.stats if self.stats is None else self.stats + outcome.stats

    @property
    def rollouts(self) -> int:
        """How many rollouts were asked for."""
        return 0 if self.stats is None else self.stats.rollouts

    @property
    def rollouts_per_sec(self) -> float:
        """Rollouts per second of wall time."""
        return self.rollouts / self.wall_sec if self.wall_sec else 0.0

    @property
    def simulated_hours(self) -> float:
        """Hours that passed in the simulated worlds."""
        return 0.0 if self.stats is None else self.stats.simulated_sec / _SEC_PER_HOUR

    @property
    def faults(self) -> dict[str, int]:
        """How many faults were injected, by kind, the most frequent first."""
        return {} if self.stats is None else dict(self.stats.faults.most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        bad = self.first_bad
        return {
            "seeds": self.done,
            "first_seed": self.seeds[0],
            "faults": self.recipe.faults,
            "rollouts_per_seed": self.recipe.rollouts,
            "workers": self.recipe.workers,
            "processes": self.processes,
            "rollouts": self.rollouts,
            "requests": 0 if self.stats is None else self.stats.requests,
            "injected": self.faults,
            "simulated_hours": self.simulated_hours,
            "wall_sec": self.wall_sec,
            "rollouts_per_sec": self.rollouts_per_sec,
            "violations": self.violations,
            "errors": self.errors,
            "first_bad": bad
            and {
                "seed": bad.seed,
                "replay": _replay_command(bad.seed, self.recipe),
                "error": bad.error,
                "violations": [asdict(violation) for violation in bad.violations],
            },
        }

    def conclude(self) -> None:
        """Raise the error that the command ends with, if there is one.

        Raises:
            CommandError: A signal ended it, or a seed is bad.
        """
        bad = self.first_bad
        replay = "" if bad is None else _replay_command(bad.seed, self.recipe)
        if self.signal is not None:
            note = f"{self.done} of {len(self.seeds)} seeds were done"
            if bad is not None:
                note += f"; seed {bad.seed} shows a fault: {replay}"
            raise interrupted(self.signal, note)
        if bad is None:
            return
        what = "raises an exception"
        if bad.error is None:
            names = dict.fromkeys(violation.invariant for violation in bad.violations)
            what = f"violates {', '.join(names)}"
        message = f"seed {bad.seed} {what}"
        if len(self.seeds) > 1:
            message += f"; replay it: {replay}"
        raise CommandError(message, exit_code=EXIT_FAILED)


def _replay_command(seed: int, recipe: Recipe) -> str:
    more = (" --feed" if recipe.feed else "") + (" --crashes" if recipe.crashes else "")
    if recipe.workers is not None:
        more += f" --workers {recipe.workers}"
    options = f"--faults {recipe.faults} --rollouts {recipe.rollouts}{more}"
    return f"rollout simulate --seed {seed} {options}"


@contextmanager
def _signals(tally: _Tally) -> Iterator[None]:
    """End the block at SIGINT or SIGTERM."""

    def take(number: int, frame: FrameType | None) -> None:
        del frame
        tally.signal = number
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException:
        if tally.signal is None:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _LiveProgress(LiveBar):
    """A bar on stderr while seeds run, if that is a terminal; gone afterwards."""

    def __init__(self, tally: _Tally, *, silent: bool) -> None:
        self._tally = tally
        super().__init__(
            SpinnerColumn(),
            TextColumn("seeds"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[speed]}"),
            TextColumn("{task.fields[faults]}"),
            expand=True,
            silent=silent,
        )
        self._task = self._bar.add_task("", total=len(tally.seeds), speed="", faults="")

    def changed(self) -> None:
        """Show what came of the seeds so far."""
        tally = self._tally
        self._bar.update(
            self._task,
            completed=tally.done,
            speed=f"{tally.rollouts_per_sec:,.0f} rollouts/s",
            faults=f"[red]{bad} bad" if (bad := tally.bad) else "no violations",
        )


def _print_findings(outcome: SeedOutcome, *, most: int | None) -> None:
    shown = outcome.violations[:most]
    for violation in shown:
        click.echo()
        echo_lines(str(violation))
    if len(shown) < len(outcome.violations):
        rest = len(outcome.violations) - len(shown)
        click.echo(f"\nThe replay shows {rest} more of seed {outcome.seed}.")
    if outcome.error is not None:
        click.echo(f"\nSeed {outcome.seed} raises:\n\n{outcome.error.rstrip()}")


def _print_table(tally: _Tally, console: Console) -> None:
    recipe = tally.recipe
    table = Table(
        title=f"{recipe.rollouts} rollouts a seed, {recipe.faults} faults"
        + (f", {recipe.workers} workers" if recipe.workers else ""),
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("seeds", f"{tally.done:,}")
    table.add_row("rollouts", f"{tally.rollouts:,}")
    table.add_row("requests", f"{tally.stats.requests if tally.stats else 0:,}")
    table.add_section()
    for kind, count in tally.faults.items():
        table.add_row(kind, f"{count:,}", FAULTS.get(kind, ""))
    table.add_section()
    table.add_row("simulated", f"{tally.simulated_hours:,.1f} h")
    table.add_row("elapsed", f"{tally.wall_sec:,.1f} s")
    table.add_row("rollouts per second", f"{tally.rollouts_per_sec:,.0f}")
    table.add_section()
    table.add_row("violations", _count(tally.violations))
    if tally.errors:
        table.add_row("exceptions", _count(tally.errors))
    draw_table(table, console)


def _count(number: int) -> Text:
    return Text(f"{number:,}", style="red" if number else "green")
