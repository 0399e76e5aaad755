"""The OpenAI SDK inside of a rollout, natively on trio; needs the extra ``openai``.

`rollout_client` makes a client of the SDK that is bound to the endpoint and the key of the rollout
that runs here, and that records what is said over it::

    class Solve(AgentWorkflow):
        async def run(self, ctx):
            client = rollout_client()
            await client.chat.completions.create(model="policy", messages=ctx.prompt)
            # The recorded conversation is the sample.

`sync_rollout_client` does so for plain functions. See the page about the OpenAI SDK for what counts
as one conversation.
"""

# mypy: disable-error-code="import-not-found"
# Where the SDK is missing, pyright takes this very file for it.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rollout.context import RolloutContext
from rollout.errors import IntegrationError
from rollout.integrations.recording.recorder import (
    MAIN,
    ConversationRecorder,
    current_rollout_on_trio,
    get_recorder,
    recorder_of,
)
from rollout.integrations.transport.connections import share_connections
from rollout.integrations.transport.openai_client import load_sdk, make_client
from rollout.integrations.transport.recording import Endpoint, RecordingTransport
from rollout.integrations.transport.threads import ThreadTransport, TrioSide

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

__all__ = [
    "ConversationRecorder",
    "get_recorder",
    "rollout_client",
    "share_connections",
    "sync_rollout_client",
]

with suppress(IntegrationError):  # the functions raise it
    load_sdk()  # here, at startup: in a rollout it would hold the event loop for a second


def rollout_client(
    *,
    conversation: str = MAIN,
    record: bool = True,
    timeout_sec: float | None = 600.0,
    max_retries: int = 2,
    stream_usage: bool = True,
    **options: Any,
) -> AsyncOpenAI:
    """Return a client of the OpenAI SDK for the rollout that runs here.

    It costs well below a millisecond, so make one wherever it is needed; all clients of a rollout
    share its recorder. Nothing has to be closed. It belongs to the trio run that it was made in.

    Deadlines are cancel scopes, as everywhere: when the rollout's time is over or it is
    cancelled, the call that is under way ends and its connection is closed.

    Args:
        conversation: The name of the conversations that its calls belong to. One of ``"main"``
            becomes the sample, unless `ConversationRecorder.choose` says otherwise.
        record: Whether to record the calls; ``False`` for a judge, or beside another
            framework's sample source.
        timeout_sec: How long to wait for each part of an answer, in seconds; ``None`` for as
            long as it takes.
        max_retries: How often the SDK tries again after 408, 409, 429, 5xx and lost
            connections.
        stream_usage: Whether to ask for the usage of streams, for endpoints that cannot
            (``stream_options``), say ``False``.
        options: Further arguments of ``openai.AsyncOpenAI``, such as ``default_headers``.

    Raises:
        IntegrationError: No rollout is running here, or the SDK is not installed.
        InvalidFieldError: An option is the rollout's to decide, or has another name here.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    context = current_rollout_on_trio()
    transport = _transport(context, conversation, record=record, stream_usage=stream_usage)
    client: AsyncOpenAI = make_client(
        transport.endpoint, transport, timeout_sec=timeout_sec, max_retries=max_retries, **options
    )
    return client


def sync_rollout_client(
    *,
    conversation: str = MAIN,
    record: bool = True,
    timeout_sec: float | None = 600.0,
    max_retries: int = 2,
    stream_usage: bool = True,
    **options: Any,
) -> OpenAI:
    """Return a synchronous client of the OpenAI SDK for the rollout that runs here.

    For plain functions, which run in a worker thread::

        class Solve(AgentWorkflow):
            def run(self, ctx):
                sync_rollout_client().chat.completions.create(model="policy", messages=ctx.prompt)

    Otherwise it is like `rollout_client`, and shares recorder and connections with it. It may
    be used in threads that the workflow starts itself.

    When the rollout's time is over or it is cancelled, the call that is under way ends within
    a moment, its connection is closed, and `trio.Cancelled` comes out of it: let that through.
    A pause before a retry is slept to its end.

    Args:
        conversation: The name of the conversations that its calls belong to.
        record: Whether to record the calls.
        timeout_sec: How long to wait for each part of an answer, in seconds; ``None`` for as
            long as it takes.
        max_retries: How often the SDK tries again.
        stream_usage: Whether to ask for the usage of streams.
        options: Further arguments of ``openai.OpenAI``.

    Raises:
        IntegrationError: This is not a worker thread of trio, no rollout is running here, or the
            SDK is not installed.
        InvalidFieldError: An option is the rollout's to decide, or has another name here.
        SampleSourceError: The rollout has a sample source of another kind.
    """
    trio_side = TrioSide()
    context = current_rollout_on_trio(threads=True)
    transport = _transport(context, conversation, record=record, stream_usage=stream_usage)
    client: OpenAI = make_client(
        transport.endpoint,
        ThreadTransport(transport, trio_side),
        timeout_sec=timeout_sec,
        max_retries=max_retries,
        **options,
    )
    return client


def _transport(
    context: RolloutContext, conversation: str, *, record: bool, stream_usage: bool
) -> RecordingTransport:
    load_sdk()  # before the recorder is registered
    recorder = recorder_of(context, ConversationRecorder) if record else None
    endpoint = Endpoint.of_rollout(context)
    return RecordingTransport(
        endpoint, recorder, conversation=conversation, stream_usage=stream_usage
    )
