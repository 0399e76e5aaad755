"""A client of the server that a command talks to."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from rollout.cli.failures import CommandError
from rollout.client import RolloutClient

# The first that is set counts.
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

__all__ = ["open_client", "quiet_http"]


def quiet_http() -> None:
    """Keep httpx's line for every request off stderr, whatever logging is set up."""
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


@asynccontextmanager
async def open_client(
    url: str, api_key: str | None, *, admission_timeout_sec: float | None = None
) -> AsyncGenerator[RolloutClient, None]:
    """Own a client for the length of the block.

    Raises:
        InvalidFieldError: The URL or the timeout cannot be used.
        CommandError: The certificates that the environment names cannot be read.
    """
    quiet_http()
    try:
        client = RolloutClient(
            url=url, api_key=api_key, admission_timeout_sec=admission_timeout_sec
        )
    except OSError as error:
        named = next((name for name in _CERTIFICATES if os.environ.get(name)), "the system")
        raise CommandError(
            f"the certificates that {named} names cannot be read: {error}"
        ) from error
    async with client:
        yield client
