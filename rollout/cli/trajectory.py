"""``rollout trajectory show FILE`` and ``rollout trajectory validate FILE...``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from rollout._logs import printable
from rollout.cli.failures import EXIT_FAILED, CommandError
from rollout.cli.options import FILE_PATH, help_alone, json_option, json_option_with
from rollout.cli.terminal import make_console
from rollout.cli.text import not_json, one_line, print_fields, print_json
from rollout.codec import dump_json, parse_json
from rollout.errors import InvalidBodyError, TrajectoryError
from rollout.trajectory import token_totals, trajectory_problems

__all__ = ["command"]

_SOURCE_STYLES = {"system": "bold magenta", "user": "bold cyan", "agent": "bold green"}
_OUTCOME_FIELDS = ("status", "reward", "remove_sample", "label", "error", "metrics", "extra_fields")


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Look at saved trajectories, which are ATIF documents.

    FILE is a path, or - for standard input.
    """
    help_alone(ctx)


@command.command()
@click.argument("file", type=FILE_PATH)
@json_option
def show(file: str, as_json: bool) -> None:
    """Show the trajectory in FILE: what came of it, then step by step."""
    document = _load(file)
    problems = trajectory_problems(document)
    if problems:
        raise TrajectoryError(
            f"{_called(file)}: {problems[0]}"
            + (f"; rollout trajectory validate lists all {len(problems)}" if problems[1:] else ""),
            problems,
        )
    if as_json:
        print_json(document)
        return
    print_fields({name: value for name, value in _summary(document).items() if value is not None})
    console = make_console(highlight=False, markup=False, soft_wrap=True)
    for number, step in enumerate(document["steps"], 1):
        console.print()
        for line in _step_lines(number, step):
            console.print(line)


@command.command(short_help="Check that each FILE is a valid trajectory.")
@click.argument("files", type=FILE_PATH, metavar="FILE...", nargs=-1, required=True)
@json_option_with("Print a JSON object for each file instead.")
def validate(files: tuple[str, ...], as_json: bool) -> None:
    """Check that each FILE is a valid trajectory, and print all that is wrong, a line each.

    Exits with 1 if one is not valid, with 2 if one cannot be read.
    """
    invalid = unreadable = 0
    for file in files:
        try:
            problems = trajectory_problems(_load(file))
        except CommandError as error:
            unreadable += 1
            if as_json:
                print_json({"file": file, "valid": None, "problems": [error.format_message()]})
            else:
                click.echo(error.format_message(), err=True)
            continue
        except TrajectoryError as error:
            problems = [str(error).removeprefix(f"{_called(file)}: ")]
        invalid += bool(problems)
        if as_json:
            print_json({"file": file, "valid": not problems, "problems": problems})
            continue
        for problem in problems:
            click.echo(f"{_called(file)}: {one_line(problem)}")
        if not problems:
            click.echo(f"{_called(file)}: valid")
    if unreadable:
        raise CommandError(f"{unreadable} of {len(files)} files cannot be read")
    if invalid:
        raise CommandError(
            f"{invalid} of {len(files)} files are not valid trajectories", exit_code=EXIT_FAILED
        )


def _called(file: str) -> str:
    return "standard input" if file == "-" else one_line(file)


def _load(file: str) -> Any:
    """Read a file as strict JSON.

    Raises:
        CommandError: It cannot be read.
        TrajectoryError: It is not JSON.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{_called(file)} cannot be read: {reason}") from None
    try:
        return parse_json(data)
    except InvalidBodyError as error:
        raise TrajectoryError(f"{_called(file)}: {not_json(error)}") from None


def _summary(document: dict[str, Any]) -> dict[str, Any]:
    extra = document.get("extra") or {}
    agent = document["agent"]
    totals = document.get("final_metrics") or {}
    prompt, completion = token_totals(document)
    return {
        "rollout": document.get("trajectory_id") or document.get("session_id"),
        "agent": f"{agent['name']} {agent['version']}",
        "model": agent.get("model_name"),
        **{name: extra.get(name) for name in _OUTCOME_FIELDS},
        "steps": len(document["steps"]),
        "prompt tokens": prompt,
        "completion tokens": completion,
        "cost in USD": totals.get("total_cost_usd"),
        "notes": document.get("notes"),
    }


def _step_lines(number: int, step: dict[str, Any]) -> Iterator[Text]:
    source = step["source"]
    notes = [step.get("model_name"), step.get("timestamp"), _usage(step.get("metrics") or {})]
    yield Text.assemble(
        (f"{number} {source}", _SOURCE_STYLES[source]),
        ("".join(f"  {one_line(note)}" for note in notes if note), "dim"),
    )
    yield from _block(step.get("reasoning_content") or "", "  ~ ", "dim italic")
    yield from _block(_said(step["message"]), "  ")
    for call in step.get("tool_calls") or []:
        yield from _block(f"{call['function_name']} {_json(call['arguments'])}", "  > ", "yellow")
        yield from _extra(call, "    ")
    calls = {call["tool_call_id"]: call["function_name"] for call in step.get("tool_calls") or []}
    for result in (step.get("observation") or {}).get("results") or []:
        name = calls.get(result.get("source_call_id"))
        prefix = f"{name}: " if name is not None and len(calls) > 1 else ""
        yield from _block(prefix + _said(result.get("content")), "  < ", "blue")
        yield from _extra(result, "    ")
    yield from _extra(step, "  ")


def _extra(holder: dict[str, Any], indent: str) -> Iterator[Text]:
    for name, value in (holder.get("extra") or {}).items():
        yield Text(f"{indent}{one_line(name)}: {printable(_json(value))}", style="dim")


def _block(text: str, first: str, style: str = "") -> Iterator[Text]:
    for number, line in enumerate(text.splitlines()):
        yield Text((first if number == 0 else " " * len(first)) + printable(line), style=style)


def _said(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        part["text"]
        if part["type"] == "text"
        else f"[{part['type']} {part['source']['media_type']} {part['source']['path']}]"
        for part in content
    )


def _json(value: Any) -> str:
    return value if isinstance(value, str) else dump_json(value).decode("ascii")


def _usage(metrics: dict[str, Any]) -> str:
    names = {"prompt_tokens": "in", "completion_tokens": "out", "cached_tokens": "cached"}
    parts = [f"{metrics[key]} {name}" for key, name in names.items() if key in metrics]
    return f"tokens: {', '.join(parts)}" if parts else ""
