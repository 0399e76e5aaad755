"""``rollout wait-idle URL``."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import httpx
import trio

from rollout.cli.failures import run_async
from rollout.cli.options import (
    api_key_option,
    json_option,
    seconds,
    server_key_from_env,
    url_argument,
)
from rollout.cli.remote import open_client
from rollout.cli.text import print_fields, print_json
from rollout.client import RolloutClient, RolloutProtocolError

__all__ = ["command"]


@click.command()
@url_argument
@click.option(
    "--timeout-sec", type=seconds, default=120, show_default=True, help="How long to wait."
)
@click.option(
    "--poll-interval-sec",
    type=seconds,
    default=1,
    show_default=True,
    help="How long between two looks.",
)
@click.option(
    "--process-id", metavar="ID", help="The server process that is meant; another one is an error."
)
@api_key_option
@json_option
def command(
    url: str,
    timeout_sec: float,
    poll_interval_sec: float,
    process_id: str | None,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Wait until the rollout server at URL has no active rollout.

    This observes; it does not stop new admissions. Exits with 1 if the time runs out, and with
    2 at once if nothing listens there.
    """
    wait = partial(
        _wait_idle,
        url,
        server_key_from_env(api_key_env),
        timeout_sec=timeout_sec,
        poll_interval_sec=poll_interval_sec,
        process_id=process_id,
    )
    payload = run_async(wait)
    (print_json if as_json else print_fields)(payload)


async def _wait_idle(
    url: str, api_key: str | None, *, timeout_sec: float, **how: Any
) -> dict[str, Any]:
    async with open_client(url, api_key) as client:
        with trio.move_on_after(max(timeout_sec, 0)):
            await _check_that_something_listens(client)
        return await client.wait_idle(timeout_sec=timeout_sec, **how)


async def _check_that_something_listens(client: RolloutClient) -> None:
    try:
        await client.health()
    except httpx.ConnectError:
        raise
    except (httpx.TransportError, RolloutProtocolError):
        return  # `wait_idle` knows which of these it waits out
