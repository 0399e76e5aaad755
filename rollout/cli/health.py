"""``rollout health URL``."""

from __future__ import annotations

from typing import Any

import click

from rollout.cli.failures import run_async
from rollout.cli.options import api_key_option, json_option, server_key_from_env, url_argument
from rollout.cli.remote import open_client
from rollout.cli.text import print_fields, print_json

__all__ = ["command"]


@click.command()
@url_argument
@api_key_option
@json_option
def command(url: str, api_key_env: str | None, as_json: bool) -> None:
    """Print what the rollout server at URL says of itself."""
    payload = run_async(_health, url, server_key_from_env(api_key_env))
    (print_json if as_json else print_fields)(payload)


async def _health(url: str, api_key: str | None) -> dict[str, Any]:
    async with open_client(url, api_key) as client:
        return await client.health()
