"""``rollout demo --serve-chat``: the chat endpoint of the scripted or the real model, alone."""

from __future__ import annotations

import ipaddress

import click
import trio

from rollout._tasks import sole_error
from rollout.cli.failures import EXIT_USAGE, CommandError, run_async
from rollout.cli.interrupts import interrupts
from rollout.cli.options import secret_from_env
from rollout.demo.arithmetic import ScriptedModel
from rollout.demo.chat import chat_server, create_chat_app
from rollout.demo.model import RealModel, model_server

__all__ = ["DEFAULT_BIND", "serve_chat"]

DEFAULT_BIND = "127.0.0.1:9000"
"""Where it listens by default."""

_SLOTS = 8
_HIGHEST_PORT = 65_535


def serve_chat(model: ScriptedModel | RealModel, bind: str, api_key_env: str | None) -> None:
    """Serve the endpoint until SIGINT or SIGTERM; one line on stdout says where.

    Raises:
        CommandError: It cannot listen there, or there is no key although it would listen for
            other machines.
    """
    host = _host(bind)
    key = secret_from_env("--api-key-env", api_key_env)
    if key is None and not _is_loopback(host):
        raise CommandError(
            f"--bind {bind} is open to other machines, so it needs a key: name the variable "
            "that holds it with --api-key-env"
        )
    if isinstance(model, RealModel):
        run_async(_serve_real, model, host, int(bind.rpartition(":")[2]), key)
    else:
        run_async(_serve, model, bind, key)


async def _serve_real(model: RealModel, host: str, port: int, key: str | None) -> None:
    async with interrupts() as signals:
        with signals.work:
            async with model_server(model, slots=_SLOTS, api_key=key, host=host, port=port) as url:
                click.echo(f"listening on {url}/v1")
                await trio.sleep_forever()


async def _serve(model: ScriptedModel, bind: str, key: str | None) -> None:
    try:
        async with (
            interrupts() as signals,
            chat_server(create_chat_app(model, key, vary=True), bind) as url,
        ):
            click.echo(f"listening on {url}/v1")
            with signals.work:
                await trio.sleep_forever()
    except BaseExceptionGroup as group:
        plain = sole_error(group)
        if isinstance(plain, OSError):
            raise CommandError(
                f"cannot listen on {bind}: {plain.strerror or plain}; choose another address "
                "with --bind (port 0 takes a free one)",
                exit_code=EXIT_USAGE,
            ) from None
        raise


def _host(bind: str) -> str:
    host, _, port = bind.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if not host or "/" in host or (":" in host and not in_brackets):
        raise CommandError(f"--bind takes HOST:PORT or [IPV6]:PORT, not {bind!r}")
    if not (port.isascii() and port.isdigit() and int(port) <= _HIGHEST_PORT):
        raise CommandError(f"--bind: the port must be a number from 0 to {_HIGHEST_PORT}")
    return host.strip("[]")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
