"""``rollout cancel URL``."""

from __future__ import annotations

import click

from rollout._logs import printable
from rollout.cli.failures import run_async
from rollout.cli.options import api_key_option, json_option, server_key_from_env, url_argument
from rollout.cli.remote import open_client
from rollout.cli.text import print_json

__all__ = ["command"]


@click.command()
@url_argument
@click.option("--id", "ids", metavar="ID", multiple=True, help="This rollout; repeatable.")
@click.option("--prefix", help="Every rollout whose id starts with this.")
@click.option("--all", "every", is_flag=True, help="Every rollout.")
@api_key_option
@json_option
def command(
    url: str,
    ids: tuple[str, ...],
    prefix: str | None,
    every: bool,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Ask the rollout server at URL to stop rollouts.

    Takes exactly one of --id, --prefix and --all. Asking again is fine: a rollout that is
    unknown or has ended is reported as not_found, and that is no failure. The answer
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
