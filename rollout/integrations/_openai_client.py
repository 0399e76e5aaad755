"""A client of the OpenAI SDK over a transport of this package, for either side of a bridge."""

from __future__ import annotations

import importlib
from typing import Any

import httpx

from rollout.errors import IntegrationError
from rollout.integrations._connections import timeouts
from rollout.integrations._watched_calls import NO_KEY, Endpoint

__all__ = ["load_sdk", "make_client"]


def make_client(
    endpoint: Endpoint,
    transport: httpx.AsyncBaseTransport,
    *,
    timeout_sec: float | None,
    max_retries: int,
    **options: Any,
) -> Any:
    """Return an ``openai.AsyncOpenAI`` that knows an endpoint, and nothing of the environment.

    Args:
        endpoint: Where its requests go.
        transport: What sends them.
        timeout_sec: How long to wait for each part of an answer, in seconds.
        max_retries: How often the SDK tries again.
        options: Further arguments of ``openai.AsyncOpenAI``.

    Raises:
        IntegrationError: The SDK is not installed.
    """
    timeout = timeouts(timeout_sec)
    client = load_sdk().AsyncOpenAI(
        api_key=endpoint.api_key or NO_KEY,
        base_url=endpoint.base_url,
        default_query={**endpoint.query, **options.pop("default_query", {})} or None,
        http_client=httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False),
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
