"""How ``rollout eval run`` shows a run while it goes on."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Iterable
from typing import Self

import click
import trio
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
)
from rich.text import Text

from rollout._logs import get_logger
from rollout.cli.terminal import WarningLines, can_draw, make_console
from rollout.cli.text import one_line
from rollout.evaluation import AttemptOutcome, AttemptRecord, EvaluationProgress, Forecast

__all__ = [
    "OUTCOME_STYLES",
    "EvaluationView",
    "Speed",
    "attempt_line",
    "duration_text",
    "figure_text",
    "forecast_line",
    "rate_text",
    "reward_text",
]

logger = get_logger(__name__)

_BAR_WIDTH = 18
_SMALLEST_FIXED, _LARGEST_FIXED = 5e-4, 1e4
OUTCOME_STYLES = {
    AttemptOutcome.SUCCESS: "green",
    AttemptOutcome.FAILURE: "red",
    AttemptOutcome.ERROR: "red",
    AttemptOutcome.CANCELLED: "yellow",
}
"""The colour of each outcome."""


class EvaluationView:
    """A bar on stderr if that is a terminal; otherwise a line on stdout for each attempt.

    A log that colours are forced upon, and a terminal that cannot move its cursor, get lines.
    Warnings of the library become a line on stderr, above the bar.

    Args:
        silent: Whether to print no lines; the bar is shown all the same.
        json_logs: Whether attempts and warnings are records of the log instead.
        verbose: Whether what is less than a warning is shown as well.
    """

    def __init__(self, *, silent: bool, json_logs: bool = False, verbose: bool = False) -> None:
        self._console = make_console(stderr=True, highlight=False, markup=False)
        self._json_logs = json_logs
        # Rich takes a log for a terminal where FORCE_COLOR is set, as in many a CI.
        self._live = can_draw(self._console) and not json_logs
        self._lines = not self._live and not silent
        self._total = 0
        self._settled = 0
        self._bar = _Bar(self._console) if self._live else None
        self._warnings = WarningLines(self._warn, logging.INFO if verbose else logging.WARNING)

    def __enter__(self) -> Self:
        if not self._json_logs:
            self._warnings.__enter__()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar; may be called again."""
        self._warnings.__exit__(None, None, None)
        if self._bar is not None:
            self._bar.stop()

    def note(self, line: str) -> None:
        """Print a line on stderr, in whatever form that has."""
        if self._json_logs:
            logger.info("%s", line)
        else:
            self._warn(line)

    @property
    def on_terminal(self) -> bool:
        """Whether there is a terminal that a bar is drawn on."""
        return self._live

    async def confirm(self, question: str) -> bool:
        """Ask on stderr, without the bar, and wait for a line on stdin, which is a terminal."""
        if self._bar is not None:
            self._bar.stop()
        click.echo(f"{one_line(question)} [Y/n] ", nl=False, err=True)
        await trio.lowlevel.wait_readable(sys.stdin)  # a terminal has a whole line then
        answer = sys.stdin.readline()
        if self._bar is not None:
            self._bar.start()
        return answer.strip().lower() in {"", "y", "yes"} and answer != ""

    def begin(self, progress: EvaluationProgress) -> None:
        """Follow the progress of a run that starts."""
        self._total, self._settled = progress.total, progress.settled
        before = f"{progress.resumed} of {progress.total} attempts had ended before"
        if self._bar is not None:
            if progress.resumed:
                self._console.print(Text(before))
            self._bar.follow(progress)
        elif self._json_logs and progress.resumed:
            logger.info("%s", before)
        elif self._lines and progress.resumed:
            click.echo(before)

    def show(self, record: AttemptRecord) -> None:
        """Show an attempt that ended."""
        self._settled += record.counts
        if self._bar is not None:
            self._bar.move(self._settled)
        elif self._json_logs:
            logger.info("rollout %s: %s", record.rollout_id, attempt_line(record))
        elif self._lines:
            count = f"[{self._settled:>{len(str(self._total))}}/{self._total}]"
            click.echo(f"{count} {attempt_line(record)}")

    def stopping(self) -> None:
        """Show that the run is being stopped, which can take a moment."""
        if self._bar is not None:
            self._bar.stopping = True

    def _warn(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def forecast_line(forecast: Forecast, *, most: bool) -> str:
    """Describe what is about to run.

    Args:
        forecast: What it may take.
        most: Whether it may stop early.
    """
    line = f"{'up to ' if most else ''}{forecast.rollouts:,} rollout(s)"
    if forecast.prompt_tokens is None or forecast.completion_tokens is None:
        return f"{line}; no attempt on record tells how many tokens"
    line += (
        f", about {_about(forecast.prompt_tokens)} prompt and "
        f"{_about(forecast.completion_tokens)} completion tokens"
    )
    if forecast.cost is not None:
        line += f", about {forecast.cost:,.2f} {forecast.currency or 'in cost'}"
    return f"{line} (by {forecast.attempts:,} attempt(s) on record)"


def _about(tokens: float) -> str:
    """Write a number of tokens with two digits that matter."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def attempt_line(record: AttemptRecord) -> str:
    """Describe how an attempt ended, in one line that is fit for a terminal."""
    line = f"row {record.row} attempt {record.attempt}: {record.outcome.value}"
    if record.removed:
        line += ", removed"
    elif record.reward is not None:
        line += f", reward {reward_text(record.reward)}"
    if record.reason is not None or record.err_message is not None:
        line += f", {record.reason or 'no category'}: {record.err_message or 'no message'}"
    if record.superseded:
        line += " (tried again)"
    return one_line(line)


def reward_text(value: float | None) -> str:
    """Write a reward, or a mean of some."""
    return "-" if value is None else f"{value:.4g}"


def figure_text(value: float | None) -> str:
    """Write a figure of a table with as many decimals as the others."""
    if value is None:
        return "-"
    ordinary = value == 0 or _SMALLEST_FIXED <= abs(value) < _LARGEST_FIXED
    return f"{value:.3f}" if ordinary else f"{value:.4g}"


class _Bar(Progress):
    """Two lines: how far the run is, and what came of it so far.

    Both are drawn by a thread, which reads the run's own progress: single numbers, never the
    collections.
    """

    def __init__(self, console: Console) -> None:
        self.stopping = False
        self._followed: EvaluationProgress | None = None
        self._task: TaskID | None = None
        self._speed: Speed | None = None
        super().__init__(
            SpinnerColumn(),
            # Narrow, so that an echoed ^C starts no new line.
            BarColumn(bar_width=_BAR_WIDTH),
            MofNCompleteColumn(),
            _Pace(self),
            console=console,
            transient=True,
        )
        self._task = self.add_task("", total=None)

    def follow(self, progress: EvaluationProgress) -> None:
        """Show the progress of a run; what had ended before does not count as its speed."""
        if self._task is not None:
            self.remove_task(self._task)
        self._followed = progress
        self._speed = Speed(self.get_time(), progress.settled)
        self._task = self.add_task("", total=progress.total, completed=progress.settled)

    def move(self, settled: int) -> None:
        """Show that so many attempts have ended."""
        if self._task is not None:
            self.update(self._task, completed=settled)
        if self._speed is not None:
            self._speed.move(self.get_time(), settled)

    def pace(self) -> tuple[float | None, float | None]:
        """How many attempts end in a second, and how many seconds it has yet to go."""
        if self._speed is None or self._followed is None:
            return None, None
        now = self.get_time()
        return self._speed.rate(now), self._speed.remaining_sec(now, self._followed.total)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Draw the two lines."""
        # On a narrow terminal a line that wraps would make the two lines jump.
        table = self.make_tasks_table(self.tasks)
        for column in table.columns:
            column.no_wrap, column.overflow = True, "ellipsis"
        yield table
        if self.stopping:
            line = Text("  stopping; once more ends it at once", style="yellow")
        elif self._followed is None:
            line = Text("  getting ready", style="dim")
        else:
            line = _counts(self._followed)
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line


class _Pace(ProgressColumn):
    """How many attempts end in a second, of late, and how long it has yet to go."""

    def __init__(self, bar: _Bar) -> None:
        self._bar = bar
        super().__init__()

    def render(self, task: Task) -> Text:  # noqa: ARG002 - as rich calls it
        rate, remaining_sec = self._bar.pace()
        text = Text(rate_text(rate), style="dim")
        text.append(f" {duration_text(remaining_sec)}", style="progress.remaining")
        return text


def _counts(progress: EvaluationProgress) -> Text:
    line = Text("  ")
    for outcome, style in OUTCOME_STYLES.items():
        count = progress.outcomes[outcome]
        if count or outcome is AttemptOutcome.SUCCESS:
            line.append(f"{count} {outcome.value}", style if count else "dim")
            line.append("  ")
    line.append(f"reward {reward_text(progress.mean_reward)}  ")
    if progress.half_width is not None:
        line.append(f"pass rate ±{progress.half_width:.3f}  ")
    line.append(f"{progress.in_flight} in flight", "dim")
    return line


_WINDOW_SEC = 600.0
_LEAST = 32
"""So many attempts have to end within the window, however long that takes."""
_GRAIN_SEC = 1.0
"""What ends within this time is one step, so that the window holds few of them."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class Speed:
    """Follows a run.

    Args:
        now: When it starts, in seconds of any clock.
        settled: How many attempts had ended before, which say nothing of its speed.
    """

    def __init__(self, now: float, settled: int) -> None:
        self._settled = settled
        # How many had ended when; the first step is where the window begins.
        self._steps = deque([(now, settled)])

    def move(self, now: float, settled: int) -> None:
        """Note how many attempts have ended."""
        steps = self._steps
        self._settled = settled
        if len(steps) > 1 and now - steps[-1][0] < _GRAIN_SEC:
            steps[-1] = (steps[-1][0], settled)
        else:
            steps.append((now, settled))
        while (
            len(steps) > 1 and now - steps[1][0] >= _WINDOW_SEC and settled - steps[1][1] >= _LEAST
        ):
            steps.popleft()

    def rate(self, now: float) -> float | None:
        """How many attempts end in a second; ``None`` before the first one has."""
        begin, before = self._steps[0]
        ended = self._settled - before
        return ended / (now - begin) if ended and now > begin else None

    def remaining_sec(self, now: float, total: int) -> float | None:
        """How long the rest will take at this rate, in seconds; ``None`` if nobody knows."""
        rate = self.rate(now)
        return None if rate is None else max(0, total - self._settled) / rate


def rate_text(rate: float | None) -> str:
    """Write a rate in the unit in which it is a number that one can read."""
    if rate is None:
        return "-/s"
    for unit, seconds in (("s", 1), ("min", _MINUTE)):
        if rate * seconds >= 1:
            return f"{rate * seconds:.1f}/{unit}"
    return f"{rate * _HOUR:.1f}/h"


def duration_text(seconds: float | None) -> str:
    """Write how long something takes, as in 00:07, 1:02:03 or 2d 03:04."""
    if seconds is None:
        return "--:--"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, _MINUTE)
    if whole < _HOUR:
        return f"{minutes:02}:{rest:02}"
    hours, minutes = divmod(minutes, _MINUTE)
    if whole < _DAY:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{whole // _DAY}d {hours % 24:02}:{minutes:02}"
