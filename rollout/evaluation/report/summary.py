"""The headline of the report: what one wants to know first, in words and figures."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from attrs import evolve, frozen

from rollout._page.text import number, shown
from rollout.evaluation.estimators import KEstimate
from rollout.evaluation.index import STATES
from rollout.evaluation.intervals import LEVEL, Estimate
from rollout.evaluation.metrics import TokenCount
from rollout.evaluation.report.gather import Run
from rollout.evaluation.sequential import SEQUENTIAL

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
            **{
                name: [[point.k, point.value, point.low, point.high] for point in curve]
                for name, curve in zip(("pass_at", "pass_hat"), _curves(run), strict=True)
            },
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
    results = None if run.metrics is None else run.metrics.results
    rates, hats = _curves(run)
    rate, mean = (None, None) if results is None else (results.pass_rate, results.mean_reward)
    spread = run.overview.rewards or (0.0, 1.0)
    return [
        _estimate("Pass rate", rate, share=True, spread=(0.0, 1.0)),
        _estimate("Mean reward", mean, share=False, spread=spread),
        _last(rates, "@", "of rows pass at least once in {k}"),
        _last(hats, "^", "of rows pass all {k}"),
    ]


def _estimate(
    name: str, found: Estimate | KEstimate | None, *, share: bool, spread: tuple[float, float]
) -> Card:
    if found is None or found.value is None:
        return Card(name, _NONE, "", "nothing to average yet")
    write, unit = (_points, "%") if share else (_decimal, "")
    counted = ""
    if isinstance(found, Estimate):
        attempts = "attempt" if found.attempts == 1 else "attempts"
        counted = f" · {_count(found.attempts)} {attempts}"
    if found.low is None or found.high is None:
        return Card(name, write(found.value), unit, f"no interval{counted}")
    sequential = isinstance(found, Estimate) and found.method == SEQUENTIAL
    kind = "confidence sequence" if sequential else "interval"
    return Card(
        name,
        write(found.value),
        unit,
        f"{100 * LEVEL:.3g}% {kind} {write(found.low)} to {write(found.high)}{unit}{counted}",
        _span(found.value, found.low, found.high, *spread),
    )


def _span(value: float, low: float, high: float, first: float, last: float) -> Span | None:
    first, last = min(first, low), max(last, high)
    width = last - first
    if not 0 < width < float("inf"):
        return None
    at, left, right = (100 * (place - first) / width for place in (value, low, high))
    return Span(round(left, 2), round(max(right - left, 0.8), 2), round(min(at, 99.2), 2))


def _last(curve: list[KEstimate], sign: str, note: str) -> Card:
    """Make the card of the largest k."""
    if not curve:
        return Card(f"pass{sign}k", _NONE, "", "too few attempts so far")
    k = _count(curve[-1].k)
    card = _estimate(f"pass{sign}{k}", curve[-1], share=True, spread=(0.0, 1.0))
    return evolve(card, note=f"{card.note} · {note.format(k=k)}")


def _curves(run: Run) -> tuple[list[KEstimate], list[KEstimate]]:
    """Return pass@k and pass^k for each k that some row has attempts for."""
    if run.metrics is None:
        return [], []
    results = run.metrics.results
    at, hat = (
        [point for point in curve[:_MANY_K] if point.value is not None]
        for curve in (results.pass_at_k, results.pass_hat_k)
    )
    return at, hat


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
    overview, median, p95, prompt, completion = run.overview, None, None, None, None
    if run.metrics is not None:
        median, p95 = run.metrics.timing.settled.median, run.metrics.timing.settled.p95
        prompt = run.metrics.results.prompt_tokens
        completion = run.metrics.results.completion_tokens
    return [
        Entry("Attempts", f"{_count(overview.attempts)} of {_count(run.expected)}"),
        Entry("From first to last", _seconds(overview.elapsed_sec)),
        Entry("Median duration", _seconds(median)),
        Entry("95% end within", _seconds(p95)),
        Entry("Prompt tokens", _tokens(prompt)),
        Entry("Completion tokens", _tokens(completion)),
        Entry("Tried again", _count(overview.tries)),
    ]


def _metrics(run: Run) -> list[Entry]:
    """Return the means of the samples' own metrics, but for those that are 0 for all."""
    metrics = {} if run.metrics is None else run.metrics.results.sample_metrics
    return [
        Entry(shown(name.replace("_", " "), 40), _decimal(metric.mean))
        for name, metric in list(metrics.items())[:_MOST_METRICS]
        if metric.mean
    ]


def _tokens(count: TokenCount | None) -> str:
    return _count(count.total) if count is not None and count.attempts else _NONE


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


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:  # noqa: PLR2004 - beyond that tenths say nothing
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
