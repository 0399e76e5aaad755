"""The options of ``rollout eval run`` that stand for values of the config."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from attrs import frozen

from rollout.cli.options import seconds

__all__ = ["config_options", "overrides_of", "resume_command"]

F = TypeVar("F", bound=Callable[..., Any])

_FRESH = "--fresh"
_NAME = "--name"
_SECRETS = (
    (re.compile(r"(://)[^/?#\s]*@"), r"\1***@"),
    (re.compile(r"(://[^?#]*[?#]).*", re.DOTALL), r"\1***"),
)
"""What may be secret in a URL: its credentials, and its query."""
_COUNT = click.IntRange(min=1)
_FROM_ZERO = click.IntRange(min=0)


def _workers(value: str) -> int | str:
    """Read a number if it is one; the config refuses what is not ``auto`` then."""
    return int(value) if value.isascii() and value.isdigit() else value


@frozen
class _Override:
    """An option that replaces one value of the config.

    Attributes:
        option: The option.
        section: The section of the value.
        name: Its name there.
        kind: The option's type for click.
        metavar: How help calls its value.
        text: What help says.
    """

    option: str
    section: str
    name: str
    kind: Any
    metavar: str | None
    text: str

    @property
    def parameter(self) -> str:
        """The name of the option's parameter."""
        return self.option.removeprefix("--").replace("-", "_")


_OVERRIDES = (
    _Override("--url", "server", "url", str, "URL", "A rollout server that runs."),
    _Override(
        "--app", "server", "app", str, "MODULE:APP|FILE.py:APP", "One to start for the run."
    ),
    _Override(
        "--workers", "server", "workers", _workers, "N|auto",
        "Run the app's rollouts in so many processes.",
    ),
    _Override(
        "--api-key-env", "server", "api_key_env", str, "NAME",
        "Environment variable that holds the rollout server's API key.",
    ),
    _Override("--chat-url", "chat", "url", str, "URL", "Chat endpoint of the model, as in .../v1."),
    _Override("--model", "chat", "model", str, "NAME", "The model's name."),
    _Override(
        "--llm-api-key-env", "chat", "api_key_env", str, "NAME",
        "Environment variable that holds the chat endpoint's API key.",
    ),
    _Override(
        "--api-base", "chat", "api_base", str, "URL",
        "Through LiteLLM: the provider's URL, where it is not the usual one.",
    ),
    _Override(
        "--model-bind", "chat", "bind", str, "HOST:PORT",
        "Through LiteLLM: where agents' calls come in. A free port of 127.0.0.1 by default.",
    ),
    _Override(
        "--advertise-url", "chat", "advertise_url", str, "URL",
        "Through LiteLLM: the URL under which agents reach that address.",
    ),
    _Override("--dataset", "dataset", "path", str, "FILE", "The dataset: a file, a pattern, or hf://OWNER/NAME."),
    _Override("--limit", "dataset", "limit", _COUNT, None, "Take this many rows at most."),
    _Override("--rows", "dataset", "rows", str, "ROWS", "Take these rows, as in 0-99,150,200-."),
    _Override("--output", "run", "output", str, "DIR", "Folder of the run."),
    _Override(
        "--name", "run", "name", str, "NAME",
        "Name of the run, which is in OUTPUT/NAME then; generated without --output.",
    ),
    _Override("--n", "run", "n", _COUNT, None, "Attempts for each row."),
    _Override("--max-in-flight", "run", "max_in_flight", _COUNT, None, "How many at a time."),
    _Override(
        "--agent-timeout-sec", "run", "agent_timeout_sec", seconds, None,
        "Time for the agent, the queue included.",
    ),
    _Override(
        "--grader-timeout-sec", "run", "grader_timeout_sec", seconds, None, "Time for the grader."
    ),
    _Override(
        "--admission-timeout-sec", "run", "admission_timeout_sec", seconds, None,
        "Time to get an attempt admitted.",
    ),
    _Override(
        "--pass-threshold", "run", "pass_threshold", float, None,
        "The reward from which an attempt passes.",
    ),
    _Override(
        "--retry-setup-failures", "run", "retry_setup_failures", _FROM_ZERO, None,
        "How often to try an attempt again whose agent never started.",
    ),
    _Override(
        "--breaker-failures", "run", "breaker_failures", _FROM_ZERO, None,
        "Stop after this many infrastructure failures in a row; 0 never stops.",
    ),
    _Override(
        "--until", "run", "until", float, "HALF_WIDTH",
        "Stop once the pass rate is known to plus or minus this, as in 0.02.",
    ),
    _Override("--seed", "run", "seed", _FROM_ZERO, None, "Draw the rows in this random order."),
)  # fmt: skip


def config_options(function: F) -> F:
    """Add an option for each value of the config."""
    for override in reversed(_OVERRIDES):
        function = click.option(
            override.option,
            override.parameter,
            type=override.kind,
            metavar=override.metavar,
            help=override.text,
        )(function)
    return function


def overrides_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort the options that were given by section and name."""
    overrides: dict[str, dict[str, Any]] = {}
    for override in _OVERRIDES:
        value = values[override.parameter]
        if value is not None:
            overrides.setdefault(override.section, {})[override.name] = value
    return overrides


def resume_command(
    path: str, arguments: Sequence[str], *, begun: bool, name: str | None = None
) -> str:
    """Write the command that goes on with a run, fit for a shell.

    Args:
        path: The command, as in ``rollout eval run``.
        arguments: What it was called with. What may be secret in a URL is left out.
        name: The run's name, if it has one.
        begun: Whether the run has begun. Then ``--fresh`` is left out, since it would start
            anew.
    """
    kept = [each for each in arguments if each != _FRESH or not begun]
    if name is not None and not any(each.partition("=")[0] == _NAME for each in kept):
        kept += [_NAME, name]
    for pattern, replacement in _SECRETS:
        kept = [pattern.sub(replacement, each) for each in kept]
    return f"{path} {shlex.join(kept)}"
