"""``rollout run URL``: one rollout from the shell."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Self
from uuid import uuid4

import click
import httpx
import trio
from attrs import frozen
from rich.status import Status
from rich.text import Text

from rollout._logs import printable
from rollout.cli.failures import EXIT_FAILED, CommandError, interrupted, run_async
from rollout.cli.interrupts import interrupts
from rollout.cli.options import (
    FILE_PATH,
    api_key_option,
    json_object,
    json_option,
    seconds,
    secret_from_env,
    server_key_from_env,
    url_argument,
)
from rollout.cli.remote import open_client
from rollout.cli.terminal import WarningLines, can_draw, make_console
from rollout.cli.text import not_json, one_line, print_fields, print_json
from rollout.client import RolloutClient, RolloutHandle
from rollout.codec import format_timestamp, parse_json, unstructure
from rollout.errors import InvalidBodyError, RolloutError
from rollout.trajectory.build import DETAILS
from rollout.types import (
    MODEL_ENDPOINT,
    MODEL_KEY,
    RolloutErrorCategory,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)

__all__ = ["PhaseView", "command"]

_ADVICE = {
    RolloutErrorCategory.TIMEOUT: "give it more time, or look at the server's log",
    RolloutErrorCategory.LEASE_EXPIRED: "the server heard nothing from here for too long",
    RolloutErrorCategory.VALIDATION_ERROR: "look at what the request holds",
    RolloutErrorCategory.HTTP_ERROR: "the sandbox provider refused; try again later",
}


@click.command()
@url_argument
@click.option("--chat-url", required=True, help="Chat endpoint of the model, as in .../v1.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option(
    "-m", "--message", "--user", "messages", metavar="TEXT", multiple=True,
    help="User message; repeatable.",
)  # fmt: skip
@click.option(
    "--messages-file",
    type=FILE_PATH,
    metavar="FILE",
    help="Take all messages from a JSON list of objects; - reads stdin.",
)
@click.option("--label", help="What the grader compares with.")
@click.option("--metadata", metavar="JSON", help="Data for workflow and grader, a JSON object.")
@click.option("--no-grade", is_flag=True, help="Run the agent alone.")
@click.option("--id", "rollout_id", metavar="ID", help="Id of the rollout; by default a new UUID.")
@click.option("--agent-timeout-sec", type=seconds, help="Time for the agent, the queue included.")
@click.option("--grader-timeout-sec", type=seconds, help="Time for the grader.")
@click.option("--admission-timeout-sec", type=seconds, help="Time to get admitted.")
@click.option(
    "--llm-api-key-env",
    metavar="NAME",
    help="Environment variable that holds the chat endpoint's API key.",
)
@api_key_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    url: str,
    chat_url: str,
    system: str | None,
    messages: tuple[str, ...],
    messages_file: str | None,
    label: str | None,
    metadata: str | None,
    no_grade: bool,
    rollout_id: str | None,
    agent_timeout_sec: float | None,
    grader_timeout_sec: float | None,
    admission_timeout_sec: float | None,
    llm_api_key_env: str | None,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Run one rollout on the server at URL and print its result.

    Shows the phases as they come; --json prints the result alone, as one JSON object. Ctrl-C
    asks the server to cancel the rollout. Exits with 0 if the rollout succeeded, whatever its
    reward, with 1 if it failed or was cancelled, and with 130 after Ctrl-C.

    \b
    rollout run http://127.0.0.1:8000 --chat-url http://127.0.0.1:9000/v1 \\
        -m "What is 6 * 7?" --label 42
    """  # noqa: D301 - click takes a backspace as the beginning of what it must not wrap
    plan = _Plan(
        url=url,
        api_key=server_key_from_env(api_key_env),
        admission_timeout_sec=admission_timeout_sec,
        own_id=rollout_id is None,
        request={
            "rollout_id": str(uuid4()) if rollout_id is None else rollout_id,
            "initial_messages": _messages(system, messages, messages_file),
            "chat_completions_url": chat_url,
            "llm_api_key": secret_from_env("--llm-api-key-env", llm_api_key_env),
            "label": label,
            "metadata": json_object("--metadata", metadata),
            "grade": not no_grade,
            "agent_timeout_sec": agent_timeout_sec,
            "grader_timeout_sec": grader_timeout_sec,
        },
    )
    result: RolloutResultResponse = run_async(_run, plan, PhaseView(silent=as_json))
    if as_json:
        print_json(unstructure(result))
    else:
        click.echo()
        print_result(result)
    if result.status is not RolloutStatus.SUCCESS:
        raise _failed(result, plan.request)
    ctx.exit(0)


@frozen(kw_only=True)
class _Plan:
    """What to run, and where.

    Attributes:
        own_id: Whether the id was made here, so that it cannot be somebody else's rollout.
        request: The arguments of `RolloutClient.run_rollout_async`.
    """

    url: str
    api_key: str | None
    admission_timeout_sec: float | None
    own_id: bool
    request: dict[str, Any]


async def _run(plan: _Plan, view: PhaseView) -> RolloutResultResponse:
    handle: RolloutHandle | None = None
    client_for = open_client(
        plan.url, plan.api_key, admission_timeout_sec=plan.admission_timeout_sec
    )
    async with interrupts() as signals, client_for as client:
        with signals.work, view:
            handle = await client.run_rollout_async(**plan.request)
            async with handle.statuses() as statuses:
                async for status in statuses:
                    view.show(status)
            return await handle
        if handle is not None:
            handle.cancel()
        note = "stopped before the rollout was admitted"
        if handle is not None or plan.own_id:
            note = "the server may not have heard of it; the rollout ends with its lease"
            with signals.tidying:
                note = await _cancel(client, plan.request["rollout_id"])
    assert signals.number is not None  # noqa: S101 - only a signal cancels the work
    raise interrupted(signals.number, note)


async def _cancel(client: RolloutClient, rollout_id: str) -> str:
    """Ask the server to cancel the rollout, within the client's five seconds; say what it said."""
    try:
        answer = await client.cancel_rollout(rollout_id)
    except (RolloutError, httpx.TransportError) as error:
        return (
            f"asking the server to cancel rollout {rollout_id} failed "
            f"({type(error).__name__}); it ends with its lease"
        )
    disposition = answer.dispositions.get(rollout_id, "not_found")
    return f"the server was asked to cancel rollout {rollout_id} ({disposition})"


def _failed(result: RolloutResultResponse, request: dict[str, Any]) -> CommandError:
    if result.status is RolloutStatus.CANCELLED:
        line = f"the rollout was cancelled: {result.err_message or 'no reason given'}"
        return CommandError(f"{line}; run it again under a new id", exit_code=EXIT_FAILED)
    category = "" if result.err_category is None else f" ({result.err_category.value})"
    advice = "the server's log says more"
    if result.err_category is not None:
        advice = _ADVICE.get(result.err_category, advice)
    if result.err_source in {MODEL_ENDPOINT, MODEL_KEY}:
        advice = "look at --chat-url, the key and the model's endpoint"
    elif result.err_category is RolloutErrorCategory.VALIDATION_ERROR and request["grade"]:
        advice += "; --no-grade runs the agent alone"
        if request["label"] is None and request["metadata"] is None:
            advice = "give --label or --metadata, or --no-grade to run the agent alone"
    line = f"the rollout failed{category}: {result.err_message or 'no message'}"
    return CommandError(f"{line}; {advice}", exit_code=EXIT_FAILED)


# --- input ----------------------------------------------------------------------------------


def _messages(
    system: str | None, user: tuple[str, ...], messages_file: str | None
) -> list[dict[str, Any]]:
    if messages_file is not None:
        if user or system is not None:
            raise click.UsageError(
                "--messages-file holds all messages; drop --message and --system"
            )
        return _read_messages(messages_file)
    if not user:
        raise click.UsageError("there is no message; give --message TEXT or --messages-file FILE")
    messages = [{"role": "user", "content": text} for text in user]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _read_bytes(name: str) -> bytes:
    with click.open_file(name, "rb") as file:  # which knows that - is stdin
        data: bytes = file.read()
    return data


def _read_messages(name: str) -> list[dict[str, Any]]:
    try:
        value = parse_json(_read_bytes(name))
    except OSError as error:
        raise CommandError(f"--messages-file: {name}: {error.strerror or error}") from None
    except InvalidBodyError as error:
        raise CommandError(f"--messages-file: {name}: {not_json(error)}") from None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CommandError(f"--messages-file: {name} must hold a JSON list of objects")
    return value


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
        self._console = make_console(highlight=False, markup=False, quiet=silent)
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

    def __exit__(self, *_: object) -> None:
        self._warnings.__exit__(None, None, None)
        if self._spinner is not None:
            self._spinner.stop()

    def show(self, status: RolloutStatus) -> None:
        """Show a status that was reached."""
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
    if result.err_phase is not None:
        fields["phase"] = result.err_phase
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
    console = make_console(highlight=False, markup=False, soft_wrap=True)
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
