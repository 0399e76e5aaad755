"""One HTTP request, between the ASGI server and the application."""

from __future__ import annotations

from typing import Any

import trio
from quart_trio.asgi import TrioASGIHTTPConnection

from rollout.server.body import receive_into, send_body

__all__ = ["RolloutHTTPConnection"]

_SEND_SEC = 60.0
"""How long a response may take to go out once its handler is cancelled or its peer is gone."""


class RolloutHTTPConnection(TrioASGIHTTPConnection):
    """Reads into an `IncomingBody`, and sends a response to its very end.

    The ASGI server reports a disconnect as soon as the response is complete, while the last
    call to ``send`` is still putting the connection back to its idle state. Quart-Trio takes
    that report as a reason to cancel the handler, `send` included, and the connection would
    then never time out and hold up a shutdown.
    """

    async def handle_messages(  # type: ignore[override]  # as in Quart-Trio
        self, nursery: trio.Nursery, request: Any, receive: Any
    ) -> None:
        """Take what the peer sends; a disconnect cancels the handler."""
        await receive_into(request.incoming, receive, nursery.cancel_scope)

    async def _send_response(self, send: Any, response: Any) -> None:
        async def send_event(event: Any) -> None:
            if event.get("body"):
                await send_body(send, event["body"])
            else:
                await send(event)

        with trio.move_on_after(_SEND_SEC, shield=True):
            await super()._send_response(send_event, response)
