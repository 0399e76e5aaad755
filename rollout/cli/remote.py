"""``rollout health``, ``wait-idle`` and ``cancel``: requests to a server that is running."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import click
import httpx
import trio

from rollout._logs import printable
from rollout.cli.failures import run_async
from rollout.cli.options import (
    api_key_option,
    json_option,
    seconds,
    server_key_from_env,
    url_argument,
)
from rollout.cli.text import print_fields, print_json
from rollout.client import RolloutClient, RolloutProtocolError

__all__ = ["cancel", "health", "open_client", "quiet_http", "wait_idle"]


def quiet_http() -> None:
    """Keep httpx's line for every request off stderr, whatever logging is set up."""
    for name in ("httpx", "httpcore", "httpx2", "httpcore2"):
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


@click.command()
@url_argument
@api_key_option
@json_option
def health(url: str, api_key_env: str | None, as_json: bool) -> None:
    """Print what the rollout server at URL says of itself."""
    payload = run_async(_health, url, server_key_from_env(api_key_env))
    (print_json if as_json else print_fields)(payload)


async def _health(url: str, api_key: str | None) -> dict[str, Any]:
    async with open_client(url, api_key) as client:
        return await client.health()


@click.command()
@url_argument
@click.option("--id", "ids", metavar="ID", multiple=True, help="This rollout; repeatable.")
@click.option("--prefix", help="Every rollout whose id starts with this.")
@click.option("--all", "every", is_flag=True, help="Every rollout.")
@api_key_option
@json_option
def cancel(
    url: str,
    ids: tuple[str, ...],
    prefix: str | None,
    every: bool,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Ask the rollout server at URL to stop rollouts.

    Takes exactly one of --id, --prefix and --all. Asking again is fine: a rollout that is
    unknown or has ended is reported as not_found, which is not a failure. The answer
    acknowledges the request; wait-idle waits for the cleanup.
    """
    if (len(ids) > 0) + (prefix is not None) + every != 1:
        raise click.UsageError("give exactly one of --id, --prefix and --all")
    if prefix == "":
        raise click.UsageError("--prefix must not be empty; --all means every rollout")
    dispositions = run_async(_cancel, url, server_key_from_env(api_key_env), ids, prefix, every)
    if as_json:
        print_json({"dispositions": dispositions})
        return
    for rollout_id, disposition in dispositions.items():
        click.echo(f"{printable(disposition):<17}  {printable(rollout_id)}")
    if not dispositions:
        click.echo("no rollout matches")


async def _cancel(
    url: str, api_key: str | None, ids: tuple[str, ...], prefix: str | None, every: bool
) -> dict[str, str]:
    async with open_client(url, api_key) as client:
        answer = await client.cancel_rollouts(
            ids=list(ids) if ids else None, prefix=prefix, all=every
        )
    return answer.dispositions


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
def wait_idle(
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
