"""Check that a sandbox reaches the chat endpoint, name it as seen from there, allow its host.

Pure: no name is looked up.

Harbor turns a phase without a network into one with an allowlist as soon as it is given a host,
so nothing is ever added there: an agent in such a sandbox that has to call its model is refused
before its trial starts.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollout._http import is_loopback_host
from rollout.errors import InvalidFieldError

if TYPE_CHECKING:
    from rollout.backend.harbor.environment import EnvironmentSpec
    from rollout.backend.harbor.plan import TrialPlan

__all__ = ["agent_extra_hosts", "chat_host", "chat_url_inside", "check_chat_url"]

_FIELD = "chat_completions_url"
_DOCKER_HOST = "host.docker.internal"


def chat_host(url: str) -> str:
    """Return the host of a chat endpoint, as Harbor's allowlists write it.

    Raises:
        InvalidFieldError: It is not a URL of HTTP or HTTPS, or has no host.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
        if parts.scheme in {"http", "https"} and host:
            host = host.rstrip(".")
            return host if host.isascii() else host.encode("idna").decode("ascii")
    except ValueError:
        pass
    raise InvalidFieldError(_FIELD, "is a URL of HTTP or HTTPS")


def chat_url_inside(url: str, environment: EnvironmentSpec) -> str:
    """Return a chat endpoint's URL as the sandboxes of an environment reach it.

    Docker on macOS runs in a virtual machine, where this machine's loopback has a name of its own.
    Anything else is returned as it is.

    Raises:
        InvalidFieldError: The chat endpoint is not a URL of HTTP or HTTPS.
    """
    if environment.name != "docker" or platform.system() != "Darwin" or not url:
        return url
    if not is_loopback_host(chat_host(url)):
        return url
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    port = "" if parts.port is None else f":{parts.port}"
    return parts._replace(netloc=f"{user}{at}{_DOCKER_HOST}{port}").geturl()


def agent_extra_hosts(plan: TrialPlan, *, agent_on_host: bool = False) -> list[str]:
    """Return what the agent phase's allowlist gets: the chat endpoint's host.

    Nothing without an allowlist, for a phase without a network (also if another step has an
    allowlist), and for an agent whose model calls do not come out of the sandbox.

    Raises:
        InvalidFieldError: The chat endpoint is not a URL of HTTP or HTTPS.
    """
    if not plan.task.allowlisted or plan.task.offline or agent_on_host:
        return []
    url = plan.chat_url
    return [chat_host(url)] if url else []


def check_chat_url(plan: TrialPlan, *, agent_on_host: bool, environment: EnvironmentSpec) -> None:
    """Check that an agent can reach the chat endpoint, as far as that is known beforehand.

    Args:
        plan: The trial.
        agent_on_host: Whether the model is called from this process.
        environment: Where the trial runs.

    Raises:
        InvalidFieldError: It cannot; the message says what helps.
    """
    url = plan.chat_url
    if agent_on_host or not url:
        return
    host = chat_host(url)
    if plan.task.offline:
        raise InvalidFieldError(
            _FIELD,
            f"cannot be reached from the sandbox: the task {plan.task.name} runs its agent "
            "without a network, and that is never widened. Use an agent that calls its model "
            "from the host (such as terminus-2), or give the task network_mode = "
            '"allowlist"; the endpoint\'s host is then added to it',
        )
    if is_loopback_host(host) and not environment.shares_host_network:
        raise InvalidFieldError(
            _FIELD,
            f"is a loopback address, which within a sandbox of {environment.name} leads back "
            "into the sandbox. Serve the model on an address that the sandbox reaches and name "
            "that (with Docker on this machine often host.docker.internal or 172.17.0.1), use "
            "environment='namespace', which shares the network of this machine, or an agent "
            "that calls its model from the host",
        )
