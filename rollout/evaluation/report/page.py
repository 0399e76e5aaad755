"""Write the report: one HTML file that holds all that it shows.

Theory of operation: the page is markup around three kinds of data. The headline stands in the
markup itself, so that it is there without scripts. The table of attempts is a block of
compressed numbers for each column, which the page reads when it opens. The conversations are
blocks of compressed JSON that are inflated when one is opened.

Attempts are read one at a time, and what is made of them waits in temporary files until it has
its place in the page, so that a run of any length takes little memory.

What a run left behind can hold anything, so nothing of it is ever parsed as markup: Jinja
escapes what stands in the markup, the blocks contain no ``<``, and the script writes text
nodes alone. The content security policy is a second wall: it allows the one script and the one
style sheet of this page by their hashes, and no connection at all.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from rollout._files.atomic import writing_atomic
from rollout._json.text import utf8
from rollout._page.assets import content_policy, read_assets
from rollout._page.conversation import (
    first_prompt,
    label_of,
    last_answer,
    read_document,
    view,
)
from rollout._page.text import clip, embed, line, number, pretty
from rollout.errors import TrajectoryError
from rollout.evaluation.folder.layout import REPORT, TRAJECTORIES
from rollout.evaluation.index import AttemptIndex, state_of
from rollout.evaluation.metrics import EvaluationMetrics
from rollout.evaluation.records import AttemptRecord
from rollout.evaluation.report.columns import Columns, Glance
from rollout.evaluation.report.gather import Attempt, Run, gather
from rollout.evaluation.report.packing import Packer
from rollout.evaluation.report.summary import summarize

__all__ = ["entry_of", "live_page", "write_page", "write_report"]

MAX_PACKED = 128 * 1024 * 1024
"""Bytes of conversations in one page; what comes after that is left in its file."""

_END = b"</body>\n</html>\n"
_PROMPT = 160
_ANSWER = 80
_MESSAGE = 100_000
_PACKAGE = "rollout.evaluation.report"
_SCRIPTS = (
    *("base.js", "keys.js", "data.js", "charts.js", "plots.js"),
    *("table.js", "conversation.js", "attempt.js"),
)
_LAST = "main.js"
_LIVE = "live.js"


def write_report(folder: Path) -> Path:
    """Write ``report.html`` of a run, finished or not. Blocking.

    The file replaces an older one as a whole. Two reports of the same run are the same, byte
    by byte. Memory is a few bytes for each attempt; meanwhile the folder needs room for the
    page twice.

    Args:
        folder: The folder of the run.

    Returns:
        The file.

    Raises:
        EvaluationError: The folder holds no run.
        EvaluationDamagedError: Its journal was replaced while it was read.
        OSError: The file cannot be written.
    """
    return write_page(folder)


def write_page(
    folder: Path, index: AttemptIndex | None = None, metrics: EvaluationMetrics | None = None
) -> Path:
    """Write the report, with index and figures if they are known already. Blocking."""
    path, run = folder / REPORT, gather(folder, index, metrics)
    with ExitStack() as stack:

        def temporary() -> IO[bytes]:
            return stack.enter_context(TemporaryFile(dir=folder))

        columns, packer = Columns(temporary), Packer(temporary(), MAX_PACKED)
        for attempt in run.attempts():
            entry, glance = entry_of(folder / TRAJECTORIES, attempt, room=not packer.full)
            columns.add(attempt, glance, packer.add(entry))
        with writing_atomic(path) as file:
            _write_page(file, run, columns, packer)
    return path


def entry_of(folder: Path, attempt: Attempt, *, room: bool) -> tuple[dict[str, Any], Glance]:
    """Return an attempt as the page shows it: opened, and in its row of the table."""
    record = attempt.record
    entry: dict[str, Any] = {
        "record": _record(record),
        "others": [_record(other) for other in attempt.others],
    }
    glance = Glance()
    if record.trajectory is None:
        entry["note"] = "No conversation of this attempt was kept."
    else:
        try:
            document = read_document(folder, record.trajectory)
            glance = Glance(
                first_prompt(document, _PROMPT),
                line(label_of(document), _ANSWER),
                last_answer(document, _ANSWER),
            )
            if room:
                entry["talk"] = view(document)
            else:
                entry["note"] = (
                    "This report is as large as it may get; the conversation is in its file."
                )
        except TrajectoryError as error:
            entry["note"] = str(error)
    return entry, glance


def _record(record: AttemptRecord) -> dict[str, Any]:
    found = {
        "id": record.rollout_id[:500],
        "retry": number(record.retry),
        "state": state_of(record),
        "superseded": record.superseded,
        "reward": number(record.reward),
        "category": record.reason and clip(record.reason, 200),
        "message": record.err_message and clip(record.err_message, _MESSAGE),
        "submitted": record.submitted_at.isoformat(timespec="milliseconds"),
        "started": record.agent_started_at
        and record.agent_started_at.isoformat(timespec="milliseconds"),
        "duration": number(record.duration_sec),
        "prompt": number(record.prompt_tokens),
        "completion": number(record.completion_tokens),
        "metrics": [
            [clip(str(name), 200), value if number(value) is not None else clip(pretty(value), 500)]
            for name, value in list(record.metrics.items())[:200]
        ],
        "file": record.trajectory and record.trajectory[:300],
    }
    # Not by equality, which takes 0.0 for False.
    return {
        name: value
        for name, value in found.items()
        if not (value is None or value is False or value == [])
    }


def _write_page(file: IO[bytes], run: Run, columns: Columns, packer: Packer) -> None:
    script = read_assets(_PACKAGE, *_SCRIPTS, _LAST)
    file.write(_head(run, columns.head(), script))
    columns.copy_to(file)
    # Before the conversations, so that the page is there while they are still being read.
    file.write(f"<script>{script}</script>\n".encode())
    packer.copy_to(file)
    file.write(_END)


def live_page(run: Run) -> bytes:
    """Return the page of a run that goes on, which asks its own server for all but the headline."""
    script = read_assets(_PACKAGE, *_SCRIPTS, _LIVE, _LAST)
    head = _head(run, Columns.empty(), script, live=True)
    return head + f"<script>{script}</script>\n".encode() + _END


def _head(run: Run, attempts: dict[str, Any], script: str, *, live: bool = False) -> bytes:
    style = read_assets(_PACKAGE, "page.css")
    template = files(_PACKAGE).joinpath("templates", "report.html").read_text(encoding="utf-8")
    environment = Environment(
        loader=DictLoader({"report.html": template}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summary = summarize(run)
    head = environment.get_template("report.html").render(
        summary=summary,
        policy=content_policy(script, style, *(["connect-src 'self'"] if live else [])),
        symbols=Markup(read_assets(_PACKAGE, "symbols.svg")),  # noqa: S704 - ours
        live=live,
        style=Markup(style),  # noqa: S704 - ours, and the policy knows its hash
        data=Markup(  # noqa: S704 - holds no markup
            embed({"charts": summary.charts, "attempts": attempts})
        ),
    )
    return utf8(head).encode("utf-8")
