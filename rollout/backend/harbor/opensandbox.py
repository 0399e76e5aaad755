"""Defaults for Harbor's OpenSandbox environment, its errors, and a sandbox it may have left.

Three of its arguments have defaults that a managed deployment needs otherwise; an argument that
is given wins over all of them. The client's timeout comes from OPENSANDBOX_REQUEST_TIMEOUT_SEC,
since a server may hold the creation of a sandbox until the sandbox runs. The protocol is that of
the domain's scheme. Sandboxes are reached through the server when OPENSANDBOX_RUN_ID says that
this process runs in one itself.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rollout._logs import get_logger
from rollout.backend.failures import categorize_exception
from rollout.types import RolloutErrorCategory

__all__ = ["OPENSANDBOX_IMPORT_PATH", "is_provider_failure", "leftover_note", "with_defaults"]

logger = get_logger(__name__)

OPENSANDBOX_IMPORT_PATH = "harbor.environments.opensandbox:OpenSandboxEnvironment"

DOMAIN = "OPENSANDBOX_DOMAIN"
REQUEST_TIMEOUT = "OPENSANDBOX_REQUEST_TIMEOUT_SEC"
RUN_ID = "OPENSANDBOX_RUN_ID"

_DEFAULT_PROTOCOL = "https"
_WHOLE = re.compile(r"[0-9]{1,9}", re.ASCII)
_SCHEME = re.compile(r"(https?)://(?:[^/@]*@)?([^/?#]+.*)", re.IGNORECASE | re.DOTALL)
_SHOWN = 40


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


@functools.cache  # so that each wrong value is warned of once
def _request_timeout_sec(text: str | None) -> int | None:
    if text is None:
        return None
    value = text.strip()
    if _WHOLE.fullmatch(value) and int(value) > 0:
        return int(value)
    logger.warning(
        "%s is ignored: %r is not a positive whole number of seconds",
        REQUEST_TIMEOUT,
        text[:_SHOWN],
    )
    return None


# --- what the server answered -----------------------------------------------------------------

_ARGUMENT_ERROR = "InvalidArgumentException"


def is_provider_failure(error: BaseException) -> bool:
    """Whether an exception is a failure of an OpenSandbox server, not of the agent.

    Those are what `categorize_exception` calls `http_error`, and answers that are no JSON, as
    gateways give them: the SDK takes them for a wrong argument.
    """
    return categorize_exception(error) is RolloutErrorCategory.HTTP_ERROR or _is_not_json(error)


def _is_not_json(error: object) -> bool:
    return type(error).__name__ == _ARGUMENT_ERROR and isinstance(
        getattr(error, "__cause__", None), json.JSONDecodeError
    )


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
"""Errors after which the server may have made the sandbox, or not."""

_GATEWAY = frozenset({502, 504})
"""Statuses of somebody in between, which do not say what the server did."""


def leftover_note(
    trial: str, domain: str | None, errors: Iterable[BaseException | str | None]
) -> dict[str, Any] | None:
    """Describe a sandbox that a server may still hold; ``None`` if it holds none.

    A creation that takes longer than the client waits for it leaves its sandbox behind: its
    answer, with the sandbox's id, is never read. The sandbox has what Harbor gave it along, by
    which an operator finds it with a list of sandboxes filtered by metadata.

    Args:
        trial: The trial's name.
        domain: The server.
        errors: What kept the trial from having a sandbox, by name where that is all there is.
    """
    if not any(map(_leaves_a_sandbox, errors)):
        return None
    return {
        "opensandbox": {
            "domain": domain,
            # What Harbor calls a trial's agent environment.
            "metadata": {"session_id": f"{trial}__env"},
            "may_still_run": True,
        }
    }


def _leaves_a_sandbox(error: BaseException | str | None) -> bool:
    name = error if isinstance(error, str) else type(error).__name__
    return name in _LOST or getattr(error, "status_code", None) in _GATEWAY or _is_not_json(error)
