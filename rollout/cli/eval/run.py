"""``rollout eval run CONFIG.toml``."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import trio
from attrs import field, frozen

from rollout._http import is_loopback_host
from rollout.cli.eval.options import config_options, overrides_of, resume_command
from rollout.cli.eval.progress import EvaluationView, forecast_line
from rollout.cli.eval.summary import print_summary, summary_document
from rollout.cli.failures import (
    EXIT_FAILED,
    CommandError,
    force_exit,
    interrupted,
    lost_output,
    run_async,
)
from rollout.cli.interrupts import interrupts
from rollout.cli.options import FILE_PATH, host_of, json_option, log_format_option
from rollout.cli.remote import quiet_http
from rollout.cli.text import one_line, print_json
from rollout.errors import (
    DatasetError,
    EvaluationDamagedError,
    EvaluationError,
    EvaluationStoppedError,
    InvalidBodyError,
)
from rollout.evaluation import EvaluationConfig, EvaluationRun, Forecast, evaluate, load_config
from rollout.evaluation.environment import parse_secrets

if TYPE_CHECKING:
    from rollout.cli.eval.live import LivePage

__all__ = ["command"]


class _Remembering(click.Command):
    """Keeps what it was called with, to say how to go on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them as they are."""
        ctx.obj = list(args)
        return super().parse_args(ctx, args)


@click.command("run", cls=_Remembering)
@click.argument("config", metavar="CONFIG.toml")
@config_options
@click.option("--fresh", is_flag=True, help="Move an earlier run to archive/ and start anew.")
@click.option(
    "--retry-failed", is_flag=True, help="Run attempts again that are on record as failed."
)
@click.option("--no-check", is_flag=True, help="Start without a test call of the model.")
@click.option(
    "--secrets-file",
    metavar="FILE",
    type=FILE_PATH,
    help="Lines NAME=value with the values of secrets and keys; - reads stdin.",
)
@click.option("--yes", is_flag=True, help="Start without a question on a terminal.")
@click.option(
    "--verbose", is_flag=True, help="Show what the app's server and the evaluation log, on stderr."
)
@click.option("--live", is_flag=True, help="Serve the report while the run fills it.")
@click.option(
    "--live-bind",
    metavar="HOST:PORT",
    help="Where; on this machine. A free port of 127.0.0.1 by default.",
)
@json_option
@log_format_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    config: str,
    fresh: bool,
    retry_failed: bool,
    no_check: bool,
    secrets_file: str | None,
    yes: bool,
    verbose: bool,
    live: bool,
    live_bind: str | None,
    as_json: bool,
    log_format: str,
    **values: Any,
) -> None:
    """Run the evaluation that CONFIG.toml describes, or go on with it.

    The model is asked for one token first: a run against a dead endpoint does not begin.
    Options replace values of the config. The output folder decides what is left to do:
    attempts that have ended stay as they are, the others run. Changed inputs are refused.

    On a terminal it first says how many rollouts are left and what they may take, and asks; then
    a bar shows how far the run is. Elsewhere each attempt that ends is a line. With --live a page
    shows the report while it fills. Ctrl-C cancels what is in flight on the server, keeps what
    has ended and says how to go on; a second one ends at once.

    Exits with 0 once every attempt has ended, whatever the rewards and failures, with 1 if the
    run was stopped or attempts were cancelled, with 2 if it could not begin, and with 128 and
    the signal's number if a signal stopped it (130 for Ctrl-C).
    """
    try:
        loaded = load_config(config, overrides_of(values))
    except InvalidBodyError as error:
        raise CommandError(f"{config}: {error}") from None
    plan = _Plan(
        config=loaded,
        fresh=fresh,
        retry_failed=retry_failed,
        check_model=not no_check,
        secrets={} if secrets_file is None else _read_secrets(secrets_file),
        verbose=verbose,
        ask=not yes and not as_json and sys.stdin.isatty(),
        live=_live_address(live_bind) if live or live_bind is not None else None,
        path=ctx.command_path,
        arguments=tuple(ctx.obj),
    )
    quiet_http()
    view = EvaluationView(silent=as_json, json_logs=log_format == "json", verbose=verbose)
    ended: _Ended = run_async(_run, plan, view)
    try:
        _show(ended, plan, as_json=as_json)
    except OSError as error:
        if not lost_output(error):
            raise
        raise _output_lost(error, ended.run, plan) from error
    ctx.exit(0)


@frozen(kw_only=True)
class _Plan:
    """What to run.

    Attributes:
        secrets: Values of secrets and keys by the names of their variables.
        verbose: Whether what the run's server writes is shown.
        ask: Whether the run starts once the user on the terminal says so.
        live: Where the page of the run is served, if it is.
        path: The command that was called.
        arguments: Its arguments.
    """

    config: EvaluationConfig
    fresh: bool
    retry_failed: bool
    check_model: bool
    secrets: dict[str, str] = field(repr=False)
    verbose: bool
    ask: bool
    live: str | None
    path: str
    arguments: tuple[str, ...]

    def resume(self, run: EvaluationRun | None, *, retry_failed: bool = False) -> str:
        """Write the command that goes on; before a run began, it is the same once more."""
        more = ("--retry-failed",) if retry_failed and not self.retry_failed else ()
        return resume_command(
            self.path,
            (*self.arguments, *more),
            begun=run is not None,
            name=self.config.run.name,
        )


@frozen
class _Ended:
    """A run that was left.

    Attributes:
        run: The run.
        stopped: Why it stopped before its end, if it did.
    """

    run: EvaluationRun
    stopped: EvaluationStoppedError | None


async def _run(plan: _Plan, view: EvaluationView) -> _Ended:
    run: EvaluationRun | None = None

    def give_up(number: int) -> None:
        view.close()
        force_exit(number, f"what has ended is kept; go on with: {plan.resume(run)}")

    # What runs on a server would go on there until its leases end, and cost tokens.
    async with interrupts(again=give_up, hang_up=True) as signals, _live(plan, view) as page:
        with signals.work, view:
            if plan.config.run.name is not None:
                view.note(f"run {plan.config.run.name} in {plan.config.run.output}")
            try:
                async with evaluate(
                    plan.config,
                    fresh=plan.fresh,
                    retry_failed=plan.retry_failed,
                    check_model=plan.check_model,
                    secrets=plan.secrets,
                    server_output=partial(_echo, view) if plan.verbose else None,
                    before_start=partial(_announce, plan, view) if view.on_terminal else None,
                ) as run:
                    view.begin(run.progress)
                    if page is not None:
                        page.begin(run)
                    await _follow(run, view, page)
            except EvaluationStoppedError as error:
                if run is None:
                    raise
                return _Ended(run, error)
            except EvaluationError as error:
                if run is None:
                    raise
                raise CommandError(_broken_off(error, run, plan), exit_code=EXIT_FAILED) from error
            except OSError as error:
                if run is None or not lost_output(error):
                    raise
                raise _output_lost(error, run, plan) from error
            return _Ended(run, None)
    assert signals.number is not None  # noqa: S101 - only a signal cancels the work
    note = "no attempt had started" if run is None else _kept(run)
    raise interrupted(signals.number, f"{note}; go on with: {plan.resume(run)}")


def _echo(view: EvaluationView, line: str) -> None:
    view.note(one_line(f"server: {line}"))


async def _announce(plan: _Plan, view: EvaluationView, forecast: Forecast) -> None:
    """Show what is about to run, and ask for leave."""
    line = forecast_line(forecast, most=plan.config.run.until is not None)
    if not plan.ask:
        view.note(line)
    elif not await view.confirm(f"{line}. Start?"):
        raise CommandError("nothing was started")


@asynccontextmanager
async def _live(plan: _Plan, view: EvaluationView) -> AsyncGenerator[LivePage | None, None]:
    """Serve the page of the run, if it is to have one."""
    if plan.live is None:
        yield None
        return
    from rollout.cli.eval.live import live_page  # noqa: PLC0415 - a web server takes a while

    async with live_page(plan.live) as (page, url):
        view.note(f"live report: {url}")
        yield page


def _read_secrets(path: str) -> dict[str, str]:
    label = "stdin" if path == "-" else path
    try:
        with click.open_file(path, encoding="utf-8-sig") as file:
            return parse_secrets(file.read(), label)
    except OSError as error:
        raise CommandError(f"--secrets-file: {label}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--secrets-file: {label} is not UTF-8") from None


def _live_address(bind: str | None) -> str:
    if bind is None:
        return "127.0.0.1:0"
    host = host_of(bind, option="--live-bind")
    if not is_loopback_host(host) or host in {"0.0.0.0", "::"}:  # noqa: S104 - refused
        raise CommandError(
            "--live-bind takes an address of this machine alone, such as 127.0.0.1:8080, since "
            "the page asks for no key; to see it from elsewhere, forward the port with ssh -L"
        )
    return bind


def _broken_off(error: EvaluationError, run: EvaluationRun, plan: _Plan) -> str:
    if isinstance(error, (DatasetError, EvaluationDamagedError)):
        return f"{error}; {_kept(run)}"  # nothing goes on with these
    return f"{error}; {_kept(run)}; once fixed, go on with: {plan.resume(run)}"


def _output_lost(error: OSError, run: EvaluationRun, plan: _Plan) -> CommandError:
    return CommandError(
        f"cannot write the output: {error.strerror}; {_kept(run)}; go on with: {plan.resume(run)}",
        exit_code=EXIT_FAILED,
    )


def _kept(run: EvaluationRun) -> str:
    """Count the attempts on disk of a run that was left."""
    if run.metrics is None:
        return "the records of this run cannot be read again"
    counts = run.metrics.results.attempts
    return f"{counts.settled} of {counts.planned} attempts have ended and are kept"


async def _follow(run: EvaluationRun, view: EvaluationView, page: LivePage | None) -> None:
    try:
        async for record in run:
            view.show(record)
            if page is not None:
                page.move()
    except trio.Cancelled:
        view.stopping()
        raise


def _show(ended: _Ended, plan: _Plan, *, as_json: bool) -> None:
    """Print what came of a run; it is an error if it is not complete."""
    run, progress = ended.run, ended.run.progress
    assert run.metrics is not None  # noqa: S101 - the block of evaluate has been left
    if as_json:
        print_json(
            summary_document(run.folder, run.manifest, run.metrics, resumed=progress.resumed)
        )
    else:
        print_summary(run.folder, run.manifest, run.metrics)
    if ended.stopped is not None:
        # The breaker's line ends with how to resume.
        advice = "" if run.breaker_tripped else "; go on with"
        raise CommandError(
            f"{ended.stopped}{advice}: {plan.resume(run, retry_failed=run.breaker_tripped)}",
            exit_code=EXIT_FAILED,
        )
    if not run.complete:
        left = progress.total - progress.settled
        raise CommandError(
            f"{left} of {progress.total} attempts were cancelled; run them with: "
            f"{plan.resume(run)}",
            exit_code=EXIT_FAILED,
        )
