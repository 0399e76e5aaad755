"""A client of the OpenAI SDK over a transport of this package, for either side of a bridge."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import httpx

from rollout.errors import IntegrationError, InvalidFieldError
from rollout.integrations.transport.connections import fastest_library, timeouts
from rollout.integrations.transport.recording import BODY, NO_KEY, Endpoint

__all__ = ["load_sdk", "make_client"]

_NOT_OPTIONS = {
    "timeout": "must be given as timeout_sec; with_options(timeout=...) takes it for single calls",
    "base_url": "is the rollout's endpoint; with_options(base_url=...) asks another, unrecorded",
    "api_key": "is the rollout's key; with_options(api_key=...) sends another one",
    "http_client": "is the one that records; build an openai client of your own around yours",
}


def make_client(
    endpoint: Endpoint,
    transport: httpx.AsyncBaseTransport | httpx.BaseTransport,
    *,
    timeout_sec: float | None,
    max_retries: int,
    **options: Any,
) -> Any:
    """Return a client of the SDK that knows an endpoint, and nothing of the environment.

    Args:
        endpoint: Where its requests go.
        transport: Sends them. Over a synchronous one the client is an ``openai.OpenAI``, else an
            ``openai.AsyncOpenAI``.
        timeout_sec: How long to wait for each part of an answer, in seconds.
        max_retries: How often the SDK tries again.
        options: Further arguments of ``openai.AsyncOpenAI``.

    Raises:
        IntegrationError: The SDK is not installed.
        InvalidFieldError: An option is the rollout's to decide, or has another name here.
    """
    for name, why in _NOT_OPTIONS.items():
        if name in options:
            raise InvalidFieldError(name, why)
    sdk = load_sdk()
    library = _library(sdk)
    timeout = timeouts(timeout_sec, library)
    make, http = _noting_bodies(sdk.OpenAI), library.Client
    if isinstance(transport, httpx.AsyncBaseTransport):
        make, http = _noting_bodies(sdk.AsyncOpenAI), library.AsyncClient
    client = make(
        api_key=endpoint.api_key or NO_KEY,
        base_url=endpoint.base_url,
        default_query={**endpoint.query, **options.pop("default_query", {})} or None,
        http_client=http(transport=transport, timeout=timeout, trust_env=False),
        timeout=timeout,
        max_retries=max_retries,
        **options,
    )
    # The SDK takes these from the environment. They are for its maker's endpoint, not for this.
    if "organization" not in options:
        client.organization = None
    if "project" not in options:
        client.project = None
    return client


def _library(sdk: Any) -> Any:
    """Return the fastest HTTP library whose clients the SDK takes."""
    return fastest_library() if hasattr(sdk, "DefaultHttpx2Client") else httpx


@cache
def _noting_bodies(client: Any) -> Any:
    """Return a class of clients whose requests hold what their bodies were made of, see `BODY`."""

    def build_request(self: Any, options: Any, **more: Any) -> Any:
        request = client._build_request(self, options, **more)  # noqa: SLF001 - the only place
        parts = [options.json_data, options.extra_json]
        if isinstance(parts[0], dict):
            request.extensions[BODY] = {k: v for part in parts for k, v in (part or {}).items()}
        return request

    parts = {"_build_request": build_request, "__module__": client.__module__}
    return type(client.__name__, (client,), parts)


def load_sdk() -> Any:
    """Import the SDK; before anything of a rollout is touched.

    Raises:
        IntegrationError: It is not installed.
    """
    try:
        return importlib.import_module("openai")
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise IntegrationError(
            'the OpenAI SDK is not installed: pip install "trio-rollout[openai]"'
        ) from None
