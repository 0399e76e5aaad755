"""The ASGI lifespan of a rollout server.

Quart-Trio's own lifespan gives background tasks five seconds and goes on serving after they
have failed. Here a failure of the server's own tasks ends the lifespan with an error, so that
the ASGI server stops instead of answering for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from quart_trio.asgi import TrioASGILifespan

from rollout._tasks import sole_error

if TYPE_CHECKING:
    from rollout.server.app import RolloutServer

__all__ = ["RolloutLifespan"]


class RolloutLifespan(TrioASGILifespan):
    """Enters `RolloutServer.serving` at startup and leaves it at shutdown."""

    app: RolloutServer

    async def __call__(self, receive: Any, send: Any) -> None:
        """Run one lifespan."""
        await receive()
        stage = "startup"
        try:
            async with self.app.serving():
                await send({"type": "lifespan.startup.complete"})
                stage = "shutdown"
                await receive()
        except trio.Cancelled:
            raise
        except BaseException as error:
            plain = sole_error(error)
            if isinstance(plain, trio.Cancelled | BaseExceptionGroup) and not isinstance(
                plain, ExceptionGroup
            ):
                raise
            message = f"{type(plain).__name__}: {plain}"
            await send({"type": f"lifespan.{stage}.failed", "message": message})
        else:
            await send({"type": "lifespan.shutdown.complete"})
