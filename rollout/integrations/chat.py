"""One call of the rollout's model, without an SDK.

`chat` sends messages to the endpoint of the rollout that runs here and returns the reply, over
httpx alone, or httpx2 where it is installed. It is recorded like the calls of
`rollout.integrations.openai`, in the same recorder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from attrs import field, frozen

from rollout._endpoint_failures import is_refusal, mark_error
from rollout._redaction import redact
from rollout.errors import IntegrationError
from rollout.integrations.recording.calls import Answer, error_message, parse, read_body
from rollout.integrations.recording.recorder import (
    MAIN,
    ConversationRecorder,
    current_rollout_on_trio,
    get_recorder,
    recorder_of,
)
from rollout.integrations.recording.streams import Events, StreamedAnswer
from rollout.integrations.transport.connections import (
    fastest_library,
    share_connections,
    timeouts,
)
from rollout.integrations.transport.recording import BODY, Endpoint, RecordingTransport

__all__ = ["ChatReply", "ConversationRecorder", "chat", "get_recorder", "share_connections"]

_OK = range(200, 300)


@frozen(kw_only=True)
class ChatReply:
    """The answer of the model.

    Attributes:
        message: Its message in chat form, as the next call's history takes it.
        finish_reason: Why it ended.
        usage: Tokens, as the endpoint counted them; empty if it named none.
        model: The model that answered.
        id: The endpoint's id of the answer.
        body: The whole answer; empty for a stream.
    """

    message: dict[str, Any]
    finish_reason: str | None = None
    usage: dict[str, Any] = field(factory=dict)
    model: str | None = None
    id: str | None = None
    body: dict[str, Any] = field(factory=dict, repr=False)

    @property
    def text(self) -> str:
        """The text of the message, empty if it has none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


async def chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    model: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    conversation: str = MAIN,
    record: bool = True,
    timeout_sec: float | None = 600.0,
    **options: Any,
) -> ChatReply:
    """Send a chat completion to the endpoint of the rollout that runs here.

    Nothing is tried again: wrap it in a retry library of your choice where that is wanted.
    A cancellation closes the connection, and the call is recorded as interrupted.

    Args:
        messages: The history.
        model: The model's name.
        tools: The tools that it may call.
        conversation: The name of the conversations that the call belongs to; see
            `rollout.integrations.openai.rollout_client`.
        record: Whether to record the call.
        timeout_sec: How long to wait for each part of the answer, in seconds; ``None`` for as
            long as it takes.
        options: Further fields of the request, such as ``temperature``. Of several choices
            (``n``) the first is returned. With ``stream=True`` the answer comes as a stream, for
            an endpoint that does nothing else, and is put together.

    Raises:
        IntegrationError: No rollout is running here, or the endpoint answered with an error
            (its status is the error's ``status_code``) or with something else than a reply.
        SampleSourceError: The rollout has a sample source of another kind.
        httpx.TransportError: The endpoint cannot be reached, or did not answer in time.
    """
    context = current_rollout_on_trio()
    endpoint = Endpoint.of_rollout(context)
    recorder = recorder_of(context, ConversationRecorder) if record else None
    transport = RecordingTransport(endpoint, recorder, conversation=conversation)
    body = {"model": model, "messages": list(messages), **options}
    if body.get("stream"):
        body.setdefault("stream_options", {"include_usage": True})
    if tools is not None:
        body["tools"] = list(tools)
    headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
    library = fastest_library()
    timeout = timeouts(timeout_sec, library)
    async with library.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as http:
        try:
            response = await http.post(
                f"{endpoint.base_url}/chat/completions",
                params=endpoint.query or None,
                headers=headers,
                json=body,
                extensions={BODY: body},
            )
        except library.RequestError as error:
            if library is httpx:
                raise
            raise _as_httpx(error) from error
    return _reply(response, context.secrets)


def _as_httpx(error: Any) -> Exception:
    """Return an exception of httpx2 as that of httpx with the same name."""
    request = httpx.Request(error.request.method, str(error.request.url))
    same: Exception = getattr(httpx, type(error).__name__)(str(error), request=request)
    return same


def _reply(response: httpx.Response, secrets: list[str | None]) -> ChatReply:
    status = response.status_code
    if status not in _OK:
        said = error_message(parse(response.content)) or httpx.codes.get_reason_phrase(status)
        refused = IntegrationError(
            redact(f"the model's endpoint answered {status}: {said}", secrets),
            status_code=status,
        )
        if is_refusal(status):
            mark_error(refused)
        raise refused
    streamed = response.headers.get("content-type", "").startswith("text/event-stream")
    if streamed:
        body, answer = {}, _assembled(response.content)
    else:
        body = parse(response.content)
        answer = read_body(body, "chat")
    if not answer.choices or (streamed and answer.error is not None):
        unusable = IntegrationError(
            redact(f"the model's endpoint answered {status}, but {answer.error}", secrets),
            status_code=status,
        )
        if streamed or not isinstance(body, dict):  # a page of some other server, say
            mark_error(unusable)
        raise unusable
    choice = answer.choices[0]
    return ChatReply(
        message=choice.messages[0],
        finish_reason=choice.finish_reason,
        usage=answer.usage or {},
        model=answer.model,
        id=answer.response_id,
        body=body,
    )


def _assembled(stream: bytes) -> Answer:
    """Put the answer together that a stream has brought."""
    events, answer = Events(), StreamedAnswer("chat")
    for event in [*events.feed(stream), events.rest()]:
        if event:
            answer.add(event)
    return answer.answer(ended=True)
