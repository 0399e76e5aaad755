"""Defaults for Harbor's OpenSandbox environment, and what one may have left behind.

Three of its arguments have defaults that a managed deployment needs otherwise; an argument that
is given wins over all of them. The client's timeout comes from OPENSANDBOX_REQUEST_TIMEOUT_SEC,
since a server may hold the creation of a sandbox until the sandbox runs. The protocol is that of
the domain's scheme. Sandboxes are reached through the server when OPENSANDBOX_RUN_ID says that
this process runs in one itself.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.backend.harbor.environment import EnvironmentSpec
    from rollout.backend.harbor.facts import TrialError
    from rollout.backend.harbor.plan import TrialPlan

__all__ = ["leftover_note", "with_defaults"]

logger = logging.getLogger(__name__)

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
    kind = error_name(error)
    trace = getattr(error, "traceback", "")
    if kind not in _LOST or getattr(error, "in_verifier", False):
        return None
    if trace and _CREATING not in trace:
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


def error_name(error: TrialError | BaseException) -> str:
    """Return the bare name of an error's class."""
    return type(error).__name__ if isinstance(error, BaseException) else error.type
