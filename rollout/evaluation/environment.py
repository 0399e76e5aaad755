"""Secrets of a run's own server: their values come from outside of the config."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from rollout._checks import is_variable_name
from rollout._redaction import is_too_short
from rollout.errors import EvaluationError
from rollout.evaluation.config import EvaluationConfig

__all__ = ["parse_secrets", "secrets_of"]

_EXPORT = re.compile(r"export\s+")
_QUOTES = "\"'"


def parse_secrets(text: str, label: str) -> dict[str, str]:
    """Read lines of ``NAME=value``, as dotenv files have them; no message repeats a line.

    A value may stand in quotes, and a line may begin with ``export``. Nothing is expanded.

    Args:
        text: The lines.
        label: How a message calls the file.

    Raises:
        EvaluationError: A line is not ``NAME=value``, and neither blank nor a comment.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = _EXPORT.sub("", line.strip(), count=1)
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in stripped.partition("="))
        if not equals or not is_variable_name(name):
            raise EvaluationError(f"{label}, line {number}: must be NAME=value, on one line")
        if len(value) > 1 and value[0] == value[-1] and value[0] in _QUOTES:
            value = value[1:-1]
        values[name] = value
    return values


def secrets_of(config: EvaluationConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Collect the values of the secrets that a config names.

    Args:
        config: The config.
        given: Values by name; the environment has those that are missing.

    Raises:
        EvaluationError: A value is missing, or could not be blanked out.
    """
    values = {name: given.get(name) or os.environ.get(name, "") for name in config.secrets.required}
    missing = [name for name, value in values.items() if not value.strip()]
    if missing:
        raise EvaluationError(
            f"secrets.required: there is no value for {', '.join(missing)}; set the variable, or "
            "put it into a file for --secrets-file"
        )
    for name, value in values.items():
        if "\0" in value:
            raise EvaluationError(f"secrets.required: the value of {name} has a NUL character")
        if is_too_short(value):
            raise EvaluationError(
                f"secrets.required: the value of {name} is too short to be blanked out in logs "
                "and trajectories; if it is not a secret, put it into [env]"
            )
    return values
