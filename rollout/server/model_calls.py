"""The routes of the model gateway: calls of agents between ASGI and `rollout.gateway`.

They are open to whoever has the token of a running rollout, so the server's own key is not asked
for. A disconnect cancels the request to the endpoint, at whatever point it is.
"""

from __future__ import annotations

from typing import Any

import trio
from attrs import define, field, frozen
from werkzeug.exceptions import HTTPException

from rollout.backend.base import PolicyControl
from rollout.errors import FieldProblem, InvalidBodyError, InvalidFieldError
from rollout.gateway import ModelGateway
from rollout.gateway.proxy import ModelCall
from rollout.gateway.wire import PREFIX, ModelReply
from rollout.server.asgi import Answer, Call, IncomingBody, Send
from rollout.server.authentication import RefusalLog

__all__ = ["is_model_path", "policy_state", "serve_model_call"]

Headers = list[tuple[bytes, bytes]]


def is_model_path(path: str) -> bool:
    """Whether a path is the gateway's."""
    return path.startswith(f"{PREFIX}/")


async def serve_model_call(gateway: ModelGateway, refusals: RefusalLog, call: Call) -> Answer:
    """Handle a request to the gateway."""
    scope = call.scope
    model_call = gateway.begin(
        scope["method"], scope["path"], scope["query_string"], scope["headers"]
    )
    await trio.lowlevel.checkpoint()
    if isinstance(model_call, ModelReply):
        refusals.note(model_call.status, scope["method"], scope["path"], call.peer)
        return _refuse(model_call)
    content, body = b"", None
    if model_call.has_body:
        try:
            body = await call.read_json()
            content = await call.body.read(None)
        except InvalidBodyError as error:
            problem = error.problems[0]
            return _refuse(model_call.error(400, ": ".join([*map(str, problem.loc), problem.msg])))
        except HTTPException as error:
            return _refuse(model_call.error(error.code or 400, error.description or error.name))
        if not isinstance(body, dict):
            return _refuse(model_call.error(400, "the body must be a JSON object"))
    return _Passed(b"", model_call=model_call, content=content, json=body)


DEFAULT_PAUSE_SEC = 60.0


async def policy_state(policy: PolicyControl, call: Call) -> dict[str, Any]:
    """Pause or resume the policy, or only say how it stands; the path says which.

    Raises:
        InvalidBodyError: The body has another form.
    """
    if call.scope["method"] == "GET":
        return await policy.read()
    body = await call.read_json()
    if not isinstance(body, dict):
        problem = FieldProblem((), "the body must be a JSON object", "type_error")
        raise InvalidBodyError([problem])
    try:
        if call.scope["path"].endswith("/resume"):
            policy.resume(body.get("version"))
            return await policy.read()
        async with call.body.watched():
            timeout_sec = body.get("timeout_sec", DEFAULT_PAUSE_SEC)
            return await policy.pause(body.get("mode", "drain"), timeout_sec)
    except InvalidFieldError as error:
        problem = FieldProblem((error.field,), error.reason, "value_error")
        raise InvalidBodyError([problem]) from None


@frozen
class _Passed(Answer):
    """The answer of an endpoint, which is asked for as soon as this is to be sent."""

    model_call: ModelCall = field(kw_only=True)
    content: bytes = field(kw_only=True, repr=False)
    json: dict[str, Any] | None = field(kw_only=True, repr=False)

    @property
    def streams(self) -> bool:
        """Always; nothing is known of the answer before."""
        return True

    async def stream(self, send: Send, body: IncomingBody) -> None:
        """Ask the endpoint and send what it answers; *body* is that of the request.

        A stream that breaks off is left without its end, so that the connection ends with it.
        """
        writer = _Writer(send)
        async with body.watched():
            reply = await self.model_call.run(self.content, self.json, writer)
        if isinstance(reply, ModelReply):
            length = (b"content-length", b"%d" % len(reply.body))
            await writer.begin(reply.status, [*reply.headers, length])
            await writer.end(reply.body)
        elif reply:
            await writer.end()


@define
class _Writer:
    """Sends the answer to an agent as it comes."""

    _send: Send

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes) -> None:
        """Send a part of the body."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def _refuse(reply: ModelReply) -> Answer:
    return Answer(reply.body, reply.status)
