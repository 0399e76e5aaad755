"""Workers that somebody else has started: a list of URLs, and DNS names that are looked up again.

Theory of operation: an address with a number, a loopback name, a TLS name or a path is one worker.
The host of any other ``http`` URL is a name, and each address that the name has is a worker. Names
are looked up every few seconds. An address that is new joins; one that is gone is drained, since a
cluster takes a server out of its name before it stops it. A lookup that fails changes nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import trio
from attrs import define, field

from rollout._files.atomic import reason_of
from rollout._http import is_loopback_host
from rollout._logs import get_logger
from rollout.client.http import check_url
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.pool.source import Workers, WorkerSource
from rollout.pool.worker import UNIX, Worker, WorkerAddress

__all__ = ["ListedWorkers"]

logger = get_logger(__name__)

LOOKUP_SEC = 5.0


@define(eq=False)
class _Name:
    """A URL whose host is a name.

    Attributes:
        url: The URL.
        host: The name.
        port: Its port.
        workers: The workers at its addresses, by URL.
        failed: Whether the last lookup failed.
    """

    url: str
    host: str
    port: int
    workers: dict[str, Worker] = field(factory=dict)
    failed: bool = False


class ListedWorkers(WorkerSource):
    """Workers at URLs.

    Args:
        urls: ``http://host:port``, ``https://host:port`` or ``unix:/path``, each of them once.
        api_key: Their key.

    Raises:
        BackendConfigurationError: The list is empty, or one of them cannot be used.
    """

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None) -> None:
        if not urls:
            raise BackendConfigurationError("workers must not be empty: name a URL at least")
        self._api_key = api_key
        self._fixed: list[WorkerAddress] = []
        self._names: list[_Name] = []
        seen: set[str] = set()
        for given in urls:
            try:
                address = self._address(given)
            except InvalidFieldError as error:
                raise BackendConfigurationError(
                    f"worker {len(seen) + 1} of the list: {error}"
                ) from None
            if address.name in seen:
                raise BackendConfigurationError(f"worker {address.name} is listed twice")
            seen.add(address.name)
            host, port = _name_to_look_up(address.url)
            if host is None:
                self._fixed.append(address)
            else:
                self._names.append(_Name(address.url, host, port))

    def _address(self, url: Any) -> WorkerAddress:
        name = url
        if not isinstance(url, str) or not url.startswith(UNIX):
            check_url(url)
            url = url.rstrip("/")
            parts = urlsplit(url)
            name = parts.netloc.rpartition("@")[2] + parts.path
        return WorkerAddress(name, url, self._api_key)

    async def run(self, workers: Workers) -> None:
        """Have the workers join, and look names up again until cancelled."""
        for address in self._fixed:
            workers.join(address)
        async with trio.open_nursery() as nursery:
            for name in self._names:
                nursery.start_soon(self._follow, name, workers, nursery)
        await trio.lowlevel.checkpoint()

    async def _follow(self, name: _Name, workers: Workers, nursery: trio.Nursery) -> None:
        while True:
            found = await _look_up(name)
            if found is not None:
                self._compare(name, found, workers, nursery)
            await trio.sleep(LOOKUP_SEC)

    def _compare(
        self, name: _Name, found: list[str], workers: Workers, nursery: trio.Nursery
    ) -> None:
        for number in found:
            host = f"[{number}]" if ":" in number else number
            url = urlsplit(name.url)._replace(netloc=_replaced(name, host)).geturl()
            label = f"{host}:{name.port} ({name.host})"
            name.workers[number] = workers.join(WorkerAddress(label, url, self._api_key))
        for number, worker in name.workers.items():
            if number not in found and not worker.draining and worker.lost is None:
                workers.drain(worker)
                nursery.start_soon(_remove, worker, workers)


async def _remove(worker: Worker, workers: Workers) -> None:
    """Remove a worker once it is drained, unless its address has come back before."""
    await workers.drained(worker)
    if worker.draining:
        workers.lose(worker, "its name has this address no longer")


async def _look_up(name: _Name) -> list[str] | None:
    """Return the addresses of a name; ``None`` if they cannot be found at the moment."""
    try:
        found = await trio.socket.getaddrinfo(name.host, name.port, type=trio.socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if not name.failed:
            why = reason_of(error) if isinstance(error, OSError) else str(error)
            logger.warning("workers at %s: the name cannot be looked up: %s", name.host, why)
        name.failed = True
        return None
    name.failed = False
    # A server that has addresses of both kinds is one worker.
    for wanted in (trio.socket.AF_INET, trio.socket.AF_INET6):
        numbers = [str(where[0]) for family, *_, where in found if family == wanted]
        if numbers:
            return list(dict.fromkeys(numbers))
    return []


def _replaced(name: _Name, host: str) -> str:
    user, at, _ = urlsplit(name.url).netloc.rpartition("@")
    return f"{user}{at}{host}:{name.port}"


def _name_to_look_up(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme != "http" or host is None or is_loopback_host(host):
        return None, 0  # TLS checks the name, so its addresses cannot be used
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host, parts.port or 80
    return None, 0
