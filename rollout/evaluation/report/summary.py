"""The headline of the report: what one wants to know first, in words and figures."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from attrs import evolve, frozen

from rollout.evaluation.index import STATES
from rollout.evaluation.intervals import LEVEL as _LEVEL
from rollout.evaluation.report.gather import Run
from rollout.evaluation.report.text import number, shown

__all__ = ["Card", "Entry", "Outcome", "Span", "Summary", "summarize"]

_NAMES = {
    "passed": "Passed",
    "below": "Not passed",
    "ungraded": "No reward",
    "removed": "Removed",
    "failure": "Failure",
    "error": "Error",
    "cancelled": "Cancelled",
}
_ALWAYS = ("passed", "below", "failure", "error")
_NONE = "\N{EN DASH}"
_MANY_K = 1_000
_MOST_METRICS = 24


@frozen
class Entry:
    """A name and a value; *full* is the whole of a value that was cut."""

    name: str
    value: str
    full: str | None = None


@frozen
class Span:
    """An interval as a picture: percent of the width."""

    low: float
    width: float
    at: float


@frozen
class Card:
    """A headline figure."""

    name: str
    value: str
    unit: str
    note: str
    span: Span | None = None


@frozen
class Outcome:
    """How many attempts are in a state."""

    state: str
    name: str
    count: int
    shown: str
    share: str


@frozen
class Summary:
    """All that the template needs.

    Attributes:
        kind: What the title is the name of.
        title: What the page is called.
        facts: What was evaluated, in a line.
        notices: What is missing or damaged.
        cards: The headline figures.
        outcomes: Attempts by state.
        figures: Smaller figures.
        metrics: Means of the samples' own metrics.
        inputs: What the run was started with.
        charts: What the script draws beside the attempts themselves.
    """

    kind: str
    title: str
    facts: list[Entry]
    notices: list[str]
    cards: list[Card]
    outcomes: list[Outcome]
    figures: list[Entry]
    metrics: list[Entry]
    inputs: list[Entry]
    charts: dict[str, Any]


def summarize(run: Run) -> Summary:
    """Work out the headline of a run."""
    path = run.part("dataset", "path")
    name = str(path).replace("\\", "/").rstrip("/").rpartition("/")[2] if path else ""
    model = run.part("chat", "model")
    facts = [
        _fact("Dataset", name, path),
        _fact("Attempts", _plan(run)),
        _fact("Started", _day(run.part("created_at"))),
        _fact("Run", run.part("run_id")),
    ]
    return Summary(
        kind="Model evaluation" if model else "Evaluation",
        title=shown(model or name or "Evaluation", 80),
        facts=[fact for fact in facts if fact is not None],
        notices=[shown(notice) for notice in run.notices],
        cards=_cards(run),
        outcomes=_outcomes(run),
        figures=_figures(run),
        metrics=_metrics(run),
        inputs=_inputs(run),
        charts={
            "threshold": number(run.part("run", "pass_threshold")),
            "pass_at": _curve(run.figure("results", "pass_at_k")),
            "pass_hat": _curve(run.figure("results", "pass_hat_k")),
        },
    )


def _fact(name: str, value: Any, full: Any = None) -> Entry | None:
    if value is None or value == "":
        return None
    text = shown(value, 60)
    whole = shown(value if full is None else full)
    return Entry(name, text, whole if whole != text else None)


def _plan(run: Run) -> str | None:
    rows, n = run.rows, run.n
    if rows is None or n is None:
        return None
    return f"{_count(rows)} {'row' if rows == 1 else 'rows'} \N{MULTIPLICATION SIGN} {_count(n)}"


def _day(value: Any) -> str | None:
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".strip()


# --- figures ----------------------------------------------------------------------------------


def _cards(run: Run) -> list[Card]:
    spread = run.overview.rewards or (0.0, 1.0)
    return [
        _estimate("Pass rate", run.figure("results", "pass_rate"), share=True, spread=(0.0, 1.0)),
        _estimate("Mean reward", run.figure("results", "mean_reward"), share=False, spread=spread),
        *_best(run),
    ]


def _estimate(name: str, found: Any, *, share: bool, spread: tuple[float, float]) -> Card:
    found = found if isinstance(found, dict) else {}
    value, low, high = (number(found.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return Card(name, _NONE, "", "nothing to average yet")
    write = _points if share else _decimal
    level, attempts = number(found.get("level")), number(found.get("attempts"))
    counted = ""
    if attempts is not None:
        counted = f" · {_count(attempts)} {'attempt' if attempts == 1 else 'attempts'}"
    unit = "%" if share else ""
    if low is None or high is None:
        return Card(name, write(value), unit, f"no interval{counted}")
    percent = f"{level * 100:.3g}% interval " if level is not None else ""
    return Card(
        name,
        write(value),
        unit,
        f"{percent}{write(low)} to {write(high)}{unit}{counted}",
        _span(value, low, high, *spread),
    )


def _span(value: float, low: float, high: float, first: float, last: float) -> Span | None:
    first, last = min(first, low), max(last, high)
    width = last - first
    if not 0 < width < float("inf"):
        return None
    at, left, right = (100 * (place - first) / width for place in (value, low, high))
    return Span(round(left, 2), round(max(right - left, 0.8), 2), round(min(at, 99.2), 2))


def _best(run: Run) -> list[Card]:
    cards = []
    for key, sign, note in (
        ("pass_at_k", "@", "of rows pass at least once in {k}"),
        ("pass_hat_k", "^", "of rows pass all {k}"),
    ):
        points = _curve(run.figure("results", key))
        if points:
            k, value, low, high = points[-1]
            found = {"value": value, "low": low, "high": high, "level": _LEVEL}
            card = _estimate(f"pass{sign}{_count(k)}", found, share=True, spread=(0.0, 1.0))
            cards.append(evolve(card, note=f"{card.note} · {note.format(k=_count(k))}"))
        else:
            cards.append(Card(f"pass{sign}k", _NONE, "", "too few attempts so far"))
    return cards


def _curve(points: Any) -> list[list[Any]]:
    """Return k, value and the ends of its interval, ``None`` where there is none."""
    curve = []
    for point in points[:_MANY_K] if isinstance(points, list) else []:
        fields = point if isinstance(point, dict) else {}
        k, value, low, high = (number(fields.get(key)) for key in ("k", "value", "low", "high"))
        if k is not None and value is not None:
            curve.append([k, value, low, high])
    return curve


def _outcomes(run: Run) -> list[Outcome]:
    counts = run.overview.states
    total = max(run.overview.attempts, 1)
    return [
        Outcome(
            state,
            _NAMES[state],
            counts[state],
            _count(counts[state]),
            f"{100 * counts[state] / total:.1f}%",
        )
        for state in STATES
        if counts[state] or state in _ALWAYS
    ]


def _figures(run: Run) -> list[Entry]:
    settled = run.figure("timing", "settled")
    settled = settled if isinstance(settled, dict) else {}
    overview = run.overview
    return [
        Entry("Attempts", f"{_count(overview.attempts)} of {_count(run.expected)}"),
        Entry("From first to last", _seconds(overview.elapsed_sec)),
        Entry("Median duration", _seconds(settled.get("median"))),
        Entry("95% end within", _seconds(settled.get("p95"))),
        Entry("Prompt tokens", _tokens(run, "prompt_tokens")),
        Entry("Completion tokens", _tokens(run, "completion_tokens")),
        Entry("Tried again", _count(overview.tries)),
    ]


def _metrics(run: Run) -> list[Entry]:
    """Return the means of the samples' own metrics, but for those that are 0 for all."""
    metrics = run.figure("results", "sample_metrics")
    means = [
        (name, number(metric.get("mean")))
        for name, metric in (metrics.items() if isinstance(metrics, dict) else ())
        if isinstance(metric, dict)
    ]
    return [
        Entry(shown(name.replace("_", " "), 40), _decimal(mean))
        for name, mean in means[:_MOST_METRICS]
        if mean
    ]


def _tokens(run: Run, key: str) -> str:
    total = number(run.figure("results", key, "total"))
    told = number(run.figure("results", key, "attempts"))
    return _count(total) if told else _NONE


def _inputs(run: Run) -> list[Entry]:
    """Everything that the manifest says, by section."""
    found = []
    for section in ("dataset", "server", "chat", "run"):
        part = run.part(section)
        for name, value in list(part.items())[:40] if isinstance(part, dict) else []:
            told = value
            if isinstance(value, dict):
                told = {key: inner for key, inner in value.items() if inner is not None}
            if told is not None and told != {}:
                found.append(Entry(shown(f"{section}.{name}", 80), shown(told, 400)))
    return found


# --- words ------------------------------------------------------------------------------------


def _count(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"  # noqa: PLR2004


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _decimal(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10_000 else f"{value:.4g}"  # noqa: PLR2004


def _seconds(value: Any) -> str:
    seconds = number(value)
    if seconds is None:
        return _NONE
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:  # noqa: PLR2004 - beyond that tenths say nothing
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
