"""Environments that go wrong where a test wants them to; Harbor makes them by import path."""

from __future__ import annotations

import asyncio

from rollout.backend.harbor.namespace import (
    NamespaceEnvironment,
    NamespaceError,
    NamespaceStartError,
)

reached = None
"""What an environment calls where it goes wrong; a test sets it."""


_waited_for = []
"""Keeps what hangs, as the loop keeps a task that waits for a provider's answer."""


async def _for_ever():
    event = asyncio.Event()
    _waited_for.append(event)
    await event.wait()


class HangingStart(NamespaceEnvironment):
    """Starts, and never says that it has."""

    async def start(self, force_build):
        await super().start(force_build)
        reached()
        try:
            await _for_ever()
        except asyncio.CancelledError:
            await super().stop(delete=True)
            raise


class DeafStart(NamespaceEnvironment):
    """Hangs while it starts, and answers a cancellation with an error of its own."""

    async def start(self, force_build):
        reached()
        try:
            await _for_ever()
        except asyncio.CancelledError:
            raise NamespaceStartError("the provider went away") from None


class FailingStart(NamespaceEnvironment):
    """Cannot be started."""

    async def start(self, force_build):
        raise NamespaceStartError("there is no room for another sandbox")


class HangingStop(NamespaceEnvironment):
    """Stops, and never says that it has."""

    async def stop(self, delete):
        await super().stop(delete)
        reached()
        await _for_ever()


class FailingStop(NamespaceEnvironment):
    """Stops, and says that it has not."""

    async def stop(self, delete):
        await super().stop(delete)
        raise NamespaceError("the provider does not answer")
