"""The command group: finds commands lazily and turns errors into exit codes."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import signal
import sys
from typing import Any

import click

from rollout._tasks import sole_error
from rollout.cli.failures import explain, lost_output
from rollout.cli.options import add_formats, help_alone

__all__ = ["main"]

_COMMANDS = {
    "init": "Begin a project: server, dataset, evaluation, tests.",
    "doctor": "Look at what this machine offers to servers and evaluations.",
    "serve": "Serve an application until SIGTERM or SIGINT.",
    "run": "Run one rollout and print its result.",
    "health": "Print what a server says of itself.",
    "wait-idle": "Wait until a server has no active rollout.",
    "cancel": "Ask a server to stop rollouts.",
    "top": "Show what a server does, on a terminal.",
    "demo": "Run rollouts against a scripted model, all on this machine.",
    "eval": "Run evaluations, and look at what came of them.",
    "trajectory": "Look at saved trajectories.",
    "state": "Look at what a server has kept of rollouts.",
    "clean": "Remove the files of old rollouts.",
    "simulate": "Simulate rollouts on a network with faults, and check the invariants.",
}
_PLACES = {"health": "remote:health", "wait-idle": "remote:wait_idle", "cancel": "remote:cancel"}
"""Commands that are not the `command` of a module of their name."""


class _LazyGroup(click.Group):
    """Imports the module of a command when it is needed; the list of commands needs none."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name, _, attribute = _PLACES.get(cmd_name, f"{cmd_name}:command").partition(":")
        module = importlib.import_module(f"rollout.cli.{name}")
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            # So it was while modules were imported, which must not be interrupted half-way.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command: click.Command = getattr(module, attribute)
        add_formats(command)
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{_meant(args[0])}")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command. Standing alone, it ends the process with the exit code."""
        run: Any = super().main
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        _show_any_character()
        try:
            status = run(*args, standalone_mode=False, **extra)
        except BaseException as error:
            plain = sole_error(error)
            if isinstance(plain, SystemExit):  # rich ends the process like this on a closed pipe
                sys.exit(plain.code)
            if lost_output(plain) or lost_output(plain.__cause__):
                _give_up_stdout()
            failure = explain(plain)
            if failure is None:
                raise
            click.echo(f"rollout: {failure.line}", err=True)
            sys.exit(failure.exit_code)
        sys.exit(status if isinstance(status, int) else 0)


def _meant(name: str) -> str:
    near = [known for known in _COMMANDS if len(name) > 1 and known.startswith(name)]
    near = near or difflib.get_close_matches(name, _COMMANDS, n=1)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f", only {', '.join(_COMMANDS)}"


def _show_any_character() -> None:
    """Escape on stdout what its encoding does not have, as stderr does anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _give_up_stdout() -> None:
    """Keep the interpreter from trying again, at its exit, what could not be written."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="trio-rollout", prog_name="rollout")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run LLM agent rollouts over HTTP. To see all of it at work: rollout demo.

    Exit codes: 0 done, 1 what was asked for failed or was cancelled, 2 wrong use or no usable
    answer, 3 rollout serve had to end executions by force, 128 and the signal's number when a
    signal ended it. One line on stderr says what to do.
    """
    help_alone(ctx)


add_formats(main)
