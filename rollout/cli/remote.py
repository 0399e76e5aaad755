"""A client of the server that a command talks to."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from rollout.client import RolloutClient

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
        InvalidFieldError: The URL, the timeout, or the certificates that the environment names
            cannot be used.
    """
    quiet_http()
    client = RolloutClient(url=url, api_key=api_key, admission_timeout_sec=admission_timeout_sec)
    async with client:
        yield client
