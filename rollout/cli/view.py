"""How ``rollout run`` shows a rollout: its phases as they come, then the result."""

from __future__ import annotations

import json
from functools import partial
from types import TracebackType
from typing import Any, Self

import click
import trio
from rich.console import Console
from rich.status import Status
from rich.text import Text

from rollout._logs import printable
from rollout.cli.bars import can_draw
from rollout.cli.text import one_line, print_fields
from rollout.cli.warning_lines import WarningLines
from rollout.codec import format_timestamp
from rollout.trajectory.build import DETAILS
from rollout.types import RolloutResultResponse, RolloutSample, RolloutStatus

__all__ = ["PhaseView", "print_result"]

_STYLES = {
    RolloutStatus.SUCCESS: "bold green",
    RolloutStatus.FAILURE: "bold red",
    RolloutStatus.CANCELLED: "bold yellow",
}


class PhaseView:
    """Prints one line for every phase, with the time since the request was made.

    On a terminal a spinner says what is being waited for.
    """

    def __init__(self, *, silent: bool) -> None:
        self._console = Console(highlight=False, markup=False, quiet=silent)
        self._spinner: Status | None = None
        self._warnings = WarningLines(partial(click.echo, err=True))
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = trio.current_time()
        self._warnings.__enter__()
        if can_draw(self._console) and not self._console.quiet:
            self._spinner = self._console.status("waiting for admission")
            self._spinner.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._warnings.__exit__(exc_type, exc, traceback)
        if self._spinner is not None:
            self._spinner.stop()

    def show(self, status: RolloutStatus) -> None:
        """Tell of a status that was reached."""
        elapsed = trio.current_time() - self._started
        line = Text.assemble(
            (f"{elapsed:8.2f} s  ", "dim"), (status.value, _STYLES.get(status, ""))
        )
        self._console.print(line)
        if self._spinner is not None:
            self._spinner.update(status.value)


def print_result(result: RolloutResultResponse) -> None:
    """Print a terminal result for people: what became of it, then the conversation."""
    sample = result.sample
    fields: dict[str, Any] = {"rollout": result.rollout_id, "status": result.status.value}
    if sample is not None:
        fields["reward"] = sample.reward
        if sample.remove_sample:
            fields["remove_sample"] = True
    if result.err_category is not None:
        fields["category"] = result.err_category.value
    if result.err_source is not None:
        fields["source"] = result.err_source
    if result.err_message is not None:
        fields["message"] = result.err_message
    if result.agent_started_at is not None:
        fields["agent started"] = format_timestamp(result.agent_started_at)
    if sample is not None:
        fields |= {name: value for name, value in _details(sample).items() if value}
    print_fields(fields)
    if sample is not None and sample.messages:
        _print_conversation(sample)


def _details(sample: RolloutSample) -> dict[str, Any]:
    extra = {name: value for name, value in sample.extra_fields.items() if name != DETAILS}
    return {"label": sample.label, "metrics": sample.metrics, "extra": extra}


def _print_conversation(sample: RolloutSample) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for message in sample.messages:
        rest = dict(message)
        role = one_line(str(rest.pop("role", "message")))
        content = rest.pop("content", None)
        lines = [content if isinstance(content, str) else json.dumps(content)]
        lines += [f"{name}: {json.dumps(value)}" for name, value in rest.items()]
        console.print()
        console.print(Text(role, style="bold"))
        for line in "\n".join(lines).splitlines():
            console.print(Text(f"  {printable(line)}"))
