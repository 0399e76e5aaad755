"""``rollout eval rubric RUBRIC SOURCE...``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import trio
from attrs import frozen
from rich.table import Table

from rollout._page.conversation import read_document
from rollout.cli.eval.summary import counted, print_table
from rollout.cli.failures import EXIT_FAILED, CommandError, run_async
from rollout.cli.options import FILE_PATH, json_option, secret_from_env
from rollout.cli.text import not_json, one_line, print_json
from rollout.codec import parse_json
from rollout.context import RolloutContext
from rollout.errors import InvalidBodyError, RubricError, TrajectoryError
from rollout.evaluation import final_records, read_manifest
from rollout.evaluation.folder.layout import TRAJECTORIES
from rollout.graders.agreement import krippendorff_alpha, mean_absolute_difference
from rollout.graders.rubric import Rubric, RubricResult, judge_messages, load_rubric
from rollout.integrations.chat import share_connections
from rollout.trajectory import trajectory_problems

__all__ = ["command"]

_LINES = frozenset({".jsonl", ".ndjson"})
_SHOWN = ("source", "message", "reasoning_content", "tool_calls", "observation")
"""What a judge sees of a step; figures and token ids are left out."""


@frozen
class _Item:
    id: str
    messages: list[dict[str, Any]]
    reference: str | None


@click.command("rubric", short_help="Have judges rate conversations by a rubric.")
@click.argument("rubric", type=FILE_PATH)
@click.argument("sources", type=FILE_PATH, metavar="SOURCE...", nargs=-1, required=True)
@click.option("--url", help="OpenAI-compatible endpoint of the judges that name none.")
@click.option(
    "--api-key-env", metavar="NAME", help="Environment variable that holds the key for --url."
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="How many conversations are judged at a time.",
)
@json_option
def command(
    rubric: str,
    sources: tuple[str, ...],
    url: str | None,
    api_key_env: str | None,
    concurrency: int,
    as_json: bool,
) -> None:
    """Have the judges of the rubric in the file RUBRIC rate conversations, and print statistics.

    SOURCE is the folder of a run, a saved trajectory (.json), or a file with one object a line
    (.jsonl) that has messages, and perhaps a label and an id. Nothing is changed there. Exits
    with 1 if a conversation could not be judged.
    """
    loaded = load_rubric(rubric)
    _check_endpoint(loaded, url, api_key_env)
    key = secret_from_env("--api-key-env", api_key_env)
    items = [item for source in sources for item in _read(Path(source))]
    if not items:
        raise CommandError("there is no conversation to judge")
    found = run_async(_judge, loaded, items, url, key, concurrency)
    results = [each for each in found if isinstance(each, RubricResult)]
    if as_json:
        print_json(
            {
                "items": [
                    {"id": item.id, **_outcome(each)}
                    for item, each in zip(items, found, strict=True)
                ],
                "statistics": _statistics(loaded, results),
            }
        )
    else:
        _print(_statistics(loaded, results))
    for item, each in zip(items, found, strict=True):
        if isinstance(each, RubricError):
            click.echo(f"{one_line(item.id)}: {one_line(str(each))}", err=True)
    if len(results) < len(items):
        raise CommandError(
            f"{len(items) - len(results)} of {counted(len(items), 'conversation')} could not be "
            "judged",
            exit_code=EXIT_FAILED,
        )


def _check_endpoint(rubric: Rubric, url: str | None, api_key_env: str | None) -> None:
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise CommandError("--url must start with http:// or https://")
        return
    if api_key_env is not None:
        raise CommandError("--api-key-env needs --url, which the key is for")
    for judge in rubric.judges:
        if judge.url is None:
            raise CommandError(f"the judge {judge.name} has no url; give --url")


async def _judge(
    rubric: Rubric, items: Sequence[_Item], url: str | None, key: str | None, concurrency: int
) -> list[RubricResult | RubricError]:
    found: dict[int, RubricResult | RubricError] = {}
    places = iter(range(len(items)))

    async def work() -> None:
        for place in places:
            item = items[place]
            try:
                found[place] = await judge_messages(rubric, item.messages, reference=item.reference)
            except RubricError as error:
                found[place] = error

    endpoint = nullcontext() if url is None else RolloutContext(url, key)
    with endpoint:
        async with share_connections(), trio.open_nursery() as nursery:
            for _ in range(min(concurrency, len(items))):
                nursery.start_soon(work)
    return [found[place] for place in range(len(items))]


def _outcome(found: RubricResult | RubricError) -> dict[str, Any]:
    if isinstance(found, RubricResult):
        return found.to_dict()
    return {"error": {"type": type(found).__name__, "message": str(found)}}


# --- conversations ----------------------------------------------------------------------------


def _read(path: Path) -> Iterator[_Item]:
    """Read the conversations of a source.

    Raises:
        CommandError: A file cannot be read or is not what it should be.
        RolloutError: The same of a run, or of a trajectory.
    """
    if path.is_dir():
        read_manifest(path)
        for record in final_records(path):
            if record.trajectory is not None:
                document = read_document(path / TRAJECTORIES, record.trajectory)
                yield _item_of(document, f"{path}: {record.trajectory}")
        return
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{one_line(str(path))} cannot be read: {reason}") from None
    if path.suffix not in _LINES:
        yield _item_of(_parse(data, str(path)), str(path))
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield _line(_parse(line, f"{path}:{number}"), f"{path}:{number}")


def _parse(data: bytes, place: str) -> Any:
    try:
        return parse_json(data)
    except InvalidBodyError as error:
        raise CommandError(f"{one_line(place)}: {not_json(error)}") from None


def _item_of(document: Any, place: str) -> _Item:
    if problems := trajectory_problems(document):
        raise TrajectoryError(f"{place}: {problems[0]}", problems)
    steps = [{name: step[name] for name in _SHOWN if name in step} for step in document["steps"]]
    label = (document.get("extra") or {}).get("label")
    return _Item(place, steps, label if isinstance(label, str) else None)


def _line(value: Any, place: str) -> _Item:
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise CommandError(f"{one_line(place)}: messages must be a list of objects")
    # The official package's files call the label ground_truth.
    label = value.get("label", value.get("ground_truth"))
    if label is not None and not isinstance(label, str):
        raise CommandError(f"{one_line(place)}: label must be a string or null")
    given = value.get("id")
    return _Item(place if given is None else str(given), messages, label)


# --- statistics -------------------------------------------------------------------------------


def _statistics(rubric: Rubric, results: Sequence[RubricResult]) -> dict[str, Any]:
    return {
        "judged": len(results),
        "score": _spread([each.score for each in results]),
        "criteria": {each.name: _criterion(each.name, results) for each in rubric.criteria},
    }


def _criterion(name: str, results: Sequence[RubricResult]) -> dict[str, Any]:
    units = [[verdict.criteria[name].score for verdict in each.verdicts] for each in results]
    return {
        **_spread([each.criteria[name] for each in results]),
        "alpha": krippendorff_alpha(units),
        "disagreement": mean_absolute_difference(units),
    }


def _spread(scores: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": fmean(scores) if scores else None,
        "std": stdev(scores) if len(scores) > 1 else None,
        "min": min(scores, default=None),
        "max": max(scores, default=None),
    }


def _print(statistics: dict[str, Any]) -> None:
    title = f"{counted(statistics['judged'], 'conversation')} judged"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns = ("mean", "std", "min", "max", "alpha", "disagreement")
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in (*statistics["criteria"].items(), ("score", statistics["score"])):
        cells = (row.get(column) for column in columns)
        table.add_row(one_line(name), *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    print_table(table)
