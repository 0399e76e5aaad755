"""Options that commands share, and how keys get in: by the name of a variable, never as text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from rollout._checks import check_api_key, is_variable_name
from rollout._logs import JSONFormatter, configure_logging
from rollout.cli.failures import CommandError
from rollout.cli.text import PLAIN, not_json
from rollout.codec import parse_json
from rollout.context import get_rollout_context
from rollout.errors import InvalidBodyError, InvalidFieldError

__all__ = [
    "FILE_PATH",
    "add_formats",
    "api_key_option",
    "help_alone",
    "host_of",
    "is_given",
    "json_object",
    "json_option",
    "json_option_with",
    "log_as_json",
    "log_format_option",
    "processors",
    "seconds",
    "secret_from_env",
    "server_key_from_env",
    "url_argument",
]

F = TypeVar("F", bound=Callable[..., Any])

FILE_PATH = click.Path(readable=False)
"""A path that a shell completes; the command itself says what is wrong with the file."""

_HIGHEST_PORT = 65_535
_PORT = re.compile(r"[0-9]{1,5}")


def seconds(value: str) -> float:
    """Read a finite number of seconds, as the type of an option.

    Raises:
        click.BadParameter: It is not a finite number.
    """
    try:
        number = float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number of seconds") from None
    if not math.isfinite(number):
        raise click.BadParameter("must be a finite number of seconds")
    return number


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def help_alone(ctx: click.Context) -> None:
    """Print the help of a group that was called without a command."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether a parameter was given, and does not have its default."""
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT


def url_argument(function: F) -> F:
    """Add the argument ``URL``, the base URL of a rollout server."""
    return click.argument("url", callback=_with_scheme)(function)


def _with_scheme(ctx: click.Context, param: click.Parameter, url: str) -> str:
    """Refuse an address alone, which is what people type."""
    del ctx, param
    address = url.rpartition("@")[2]  # what is before may be a password
    if address and "://" not in url:
        raise CommandError(f"url must start with http:// or https://, as in http://{address}")
    return url


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """Read the JSON object that *option* gives; ``None`` without one.

    Raises:
        CommandError: It is anything else.
    """
    if text is None:
        return None
    try:
        value = parse_json(text.encode("utf-8", "surrogatepass"))
    except InvalidBodyError as error:
        raise CommandError(f"{option}: {not_json(error)}") from None
    if not isinstance(value, dict):
        raise CommandError(f"{option} must be a JSON object")
    return value


def json_option(function: F) -> F:
    """Add ``--json``."""
    return json_option_with("Print one JSON object instead.")(function)


def json_option_with(text: str) -> Callable[[F], F]:
    """Add ``--json`` with a help of its own."""
    return click.option("--json", "as_json", is_flag=True, callback=_json, help=text)


def _json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Take ``--json`` of a command, or of a group before it."""
    return _noted(ctx, param, value) or _JSON in ctx.meta


def _noted(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Note a format for the command and those below."""
    if value:
        ctx.meta[_JSON if param.name == "as_json" else PLAIN] = True
    return value


_JSON = f"{__name__}.json"
_FORMATS = (
    click.Option(
        ["--json", "as_json"],
        is_flag=True,
        expose_value=False,
        callback=_noted,
        help="Have the command print JSON, as its own --json does.",
    ),
    click.Option(
        ["--plain"],
        is_flag=True,
        expose_value=False,
        callback=_noted,
        help="Print without colours, bars and boxes, and break no lines.",
    ),
)


def add_formats(command: click.Command) -> None:
    """Add ``--json`` and ``--plain`` to a group and all below it; a command has its own --json."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_formats(each)
    wanted = _FORMATS if isinstance(command, click.Group) else _FORMATS[1:]
    command.params += [option for option in wanted if option not in command.params]


def api_key_option(function: F) -> F:
    """Add ``--api-key-env``."""
    return click.option(
        "--api-key-env",
        metavar="NAME",
        help="Environment variable that holds the rollout server's API key.",
    )(function)


def log_format_option(function: F) -> F:
    """Add ``--log-format``, which sets up the log before the command starts."""
    return click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        callback=_set_up_log,
        help="How the log on stderr is written; json: one object a line.",
    )(function)


def _set_up_log(ctx: click.Context, param: click.Parameter, value: str) -> str:
    del ctx, param
    log_as_json(value == "json")
    return value


def log_as_json(wanted: bool) -> bool:
    """Write the log as JSON from now on, if that is wanted; return whether it is."""
    if wanted:
        configure_logging(JSONFormatter(_current_rollout))
    return wanted


def _current_rollout() -> str | None:
    context = get_rollout_context()
    return context.rollout_id if context is not None and context.rollout_id else None


def host_of(bind: str, *, forms: str = "HOST:PORT or [IPV6]:PORT", option: str = "--bind") -> str:
    """Return the host of the address that ``--bind`` gives.

    Args:
        bind: The address.
        forms: The forms that it may have, for the error.
        option: The option that gives it, likewise.

    Raises:
        CommandError: It is malformed.
    """
    host, _, port = bind.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if host in {"", "unix"} or "/" in bind or (":" in host and not in_brackets):
        raise CommandError(f"{option} takes {forms}, not {bind!r}")
    if not (_PORT.fullmatch(port) and int(port) <= _HIGHEST_PORT):
        raise CommandError(f"{option}: the port must be a number from 0 to {_HIGHEST_PORT}")
    return host.strip("[]")


def secret_from_env(option: str, name: str | None) -> str | None:
    """Read the variable that *option* names; ``None`` without a name.

    Raises:
        CommandError: The name is not that of a variable (it may be the key itself, so it is
            not repeated), or the variable is unset or blank.
    """
    if name is None:
        return None
    if not is_variable_name(name):
        raise CommandError(f"{option} takes the name of an environment variable, not a key")
    value = os.environ.get(name)
    if value is None:
        raise CommandError(
            f"the environment variable {name} is not set; export it, or drop {option}"
        )
    if not value.strip():
        raise CommandError(f"the environment variable {name} is empty; set it, or drop {option}")
    return value


def server_key_from_env(name: str | None) -> str | None:
    """Read the server's API key from the variable that ``--api-key-env`` names.

    Raises:
        CommandError: There is no such key, or it cannot be sent in a header.
    """
    value = secret_from_env("--api-key-env", name)
    try:
        return check_api_key(value)
    except InvalidFieldError as error:
        raise CommandError(f"the key in the environment variable {name} {error.reason}") from None
