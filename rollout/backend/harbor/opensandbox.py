"""Defaults for Harbor's OpenSandbox environment, and what one may have left behind.

Three of its arguments have defaults that a managed deployment needs otherwise; an argument that
is given wins over all of them. The client's timeout comes from OPENSANDBOX_REQUEST_TIMEOUT_SEC,
since a server may hold the creation of a sandbox until the sandbox runs. The protocol is that of
the domain's scheme. Sandboxes are reached through the server when OPENSANDBOX_RUN_ID says that
this process runs in one itself.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollout._logs import get_logger

if TYPE_CHECKING:
    from rollout.backend.harbor.environment import EnvironmentSpec
    from rollout.backend.harbor.result.facts import TrialError
    from rollout.backend.harbor.trial.plan import TrialPlan

__all__ = ["is_provider_failure", "leftover_note", "tell_statuses", "with_defaults"]

logger = get_logger(__name__)

OPENSANDBOX_IMPORT_PATH = "harbor.environments.opensandbox:OpenSandboxEnvironment"

DOMAIN = "OPENSANDBOX_DOMAIN"
REQUEST_TIMEOUT = "OPENSANDBOX_REQUEST_TIMEOUT_SEC"
RUN_ID = "OPENSANDBOX_RUN_ID"

_DEFAULT_PROTOCOL = "https"
_WHOLE = re.compile(r"[0-9]{1,9}", re.ASCII)
_SCHEME = re.compile(r"(https?)://(?:[^/@]*@)?([^/?#]+.*)", re.IGNORECASE | re.DOTALL)
_SHOWN = 40

_warned: set[str] = set()
"""The values that have been warned of, in this process."""


def with_defaults(kwargs: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments for Harbor's ``OpenSandboxEnvironment``, with our defaults.

    Args:
        kwargs: The arguments that were given; they win, also with a value of ``None``.
        environ: The environment variables.
    """
    found = dict(kwargs)
    if "request_timeout_sec" not in found:
        timeout = _request_timeout_sec(environ.get(REQUEST_TIMEOUT))
        if timeout is not None:
            found["request_timeout_sec"] = timeout
    domain = found.get("domain")
    match = _SCHEME.fullmatch(
        (environ.get(DOMAIN) or "" if domain is None else str(domain)).strip()
    )
    if match is not None:
        found["domain"] = match[2].rstrip("/")
    if found.get("protocol") is None:
        found["protocol"] = _DEFAULT_PROTOCOL if match is None else match[1].lower()
    if "use_server_proxy" not in found and environ.get(RUN_ID):
        found["use_server_proxy"] = True
    return found


def _request_timeout_sec(text: str | None) -> int | None:
    if text is None:
        return None
    value = text.strip()
    if _WHOLE.fullmatch(value) and int(value) > 0:
        return int(value)
    if text not in _warned:
        _warned.add(text)
        logger.warning(
            "%s is ignored: %r is no positive whole number of seconds",
            REQUEST_TIMEOUT,
            text[:_SHOWN],
        )
    return None


# --- what the server answered -----------------------------------------------------------------

_API_ERROR = "SandboxApiException"
_ARGUMENT_ERROR = "InvalidArgumentException"
_NOTE = "OpenSandbox answered HTTP {}"
_TOLD = re.compile(_NOTE.format(r"([0-9]{3})\b"))
_IN_MESSAGE = re.compile(r"\bHTTP ([0-9]{3})\b")
_NO_JSON = "OpenSandbox answered with something else than JSON"
_PROVIDER_STATUSES = frozenset({401, 402, 403, 429, 500, 502, 503, 504})
_CALLS = (
    "start",
    "stop",
    "exec",
    "upload_file",
    "upload_dir",
    "download_file",
    "download_dir",
)


def tell_statuses(environment: Any) -> None:
    """Have the errors of an OpenSandbox environment say which HTTP status the server gave.

    Harbor keeps an error's name, text and traceback. The SDK writes the status into the text
    only if the server gave no message of its own, and where it expects JSON and gets a page of
    some gateway, its error is one of a wrong argument. So what happened is added as a note, which
    a traceback shows. Changes that one object; another environment is left alone.

    Args:
        environment: The environment of a trial that has been created and not run.
    """
    if type(environment).__name__ != "OpenSandboxEnvironment":
        return
    for name in _CALLS:
        setattr(environment, name, _telling(getattr(environment, name)))


def _telling(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return await call(*args, **kwargs)
        except Exception as error:
            note = _note(error)
            if note is not None:
                error.add_note(note)
            raise

    return told


def _note(error: BaseException) -> str | None:
    status = getattr(error, "status_code", None)
    if _API_ERROR in {cls.__name__ for cls in type(error).__mro__} and isinstance(status, int):
        return _NOTE.format(int(status))
    cause = error.__cause__
    if type(error).__name__ == _ARGUMENT_ERROR and isinstance(cause, json.JSONDecodeError):
        return _NO_JSON
    return None


def _status(error: TrialError) -> int | None:
    # The last one is of the error itself, those before it of what it came from.
    told = _TOLD.findall(error.traceback)[-1:] or _IN_MESSAGE.findall(error.message)[:1]
    return int(told[0]) if told else None


def is_provider_failure(error: TrialError) -> bool:
    """Whether an error that a trial recorded is an OpenSandbox server's own, not the agent's.

    Those are refusals with the statuses of authentication, payment, rate limits and failing
    servers, and answers that are no JSON, as gateways give them.
    """
    if error.type == _API_ERROR:
        return _status(error) in _PROVIDER_STATUSES
    return error.type == _ARGUMENT_ERROR and _NO_JSON in error.traceback


# --- what may still run -----------------------------------------------------------------------

_LOST = frozenset(
    {
        "CancelledError",
        "EnvironmentStartTimeoutError",
        "SandboxConnectionException",
        "SandboxTimeoutException",
        "TimeoutError",
    }
)
"""Errors after which nobody knows whether the server made the sandbox that it was asked for."""

_GATEWAY = frozenset({502, 504})
"""Statuses of somebody in between, which do not say what the server did."""

_CREATING = "_create_sandbox"
"""The function of Harbor's environment that asks for one; later calls know whom to stop."""


def leftover_note(
    plan: TrialPlan,
    environment: EnvironmentSpec,
    error: TrialError | BaseException | None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any] | None:
    """Return how to find a sandbox that a server may still hold, ``None`` if there is none.

    A creation that takes longer than the client waits for it leaves its sandbox behind: its
    answer, with the sandbox's id, is never read. The sandbox has what Harbor gave it along, by
    which an operator finds it with a list of sandboxes filtered by metadata.

    Args:
        plan: The trial.
        environment: Where it ran.
        error: What it recorded, or what was raised.
        environ: The environment variables.
    """
    if error is None or not environment.is_opensandbox:
        return None
    if isinstance(error, BaseException):
        lost = type(error).__name__ in _LOST
    else:
        lost = not error.in_verifier and (
            error.type in _LOST
            or (error.type == _API_ERROR and _status(error) in _GATEWAY)
            or (error.type == _ARGUMENT_ERROR and _NO_JSON in error.traceback)
        )
        lost = lost and (not error.traceback or _CREATING in error.traceback)
    if not lost:
        return None
    return {
        "opensandbox": {
            "domain": environment.domain(environ),
            "metadata": {"session_id": session_id(plan.name)},
            "may_still_run": True,
        }
    }


def session_id(trial: str) -> str:
    """Return what Harbor calls a trial's agent environment, also in a sandbox's metadata."""
    return f"{trial}__env"
