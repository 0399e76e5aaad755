"""``GET /rollout/{rollout_id}/live``: the conversation of one rollout as it unfolds.

A running rollout's recorder has the messages so far, another sample source may show its last
ones, and an encoded result has all of them. What a worker runs is passed on from there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx
import trio
from attrs import frozen

from rollout._json.fit import fit
from rollout._page.conversation import view
from rollout._threads import BODIES, run_off_loop
from rollout.backend.base import ExecutionBackend
from rollout.codec import dump_json, parse_json
from rollout.errors import RolloutError
from rollout.integrations.recording.recorder import ConversationRecorder
from rollout.server.asgi import EndlessBody
from rollout.server.entry import Entry
from rollout.server.live.stream import SILENCE_SEC, UPDATE_SEC
from rollout.server.live.view import LiveView
from rollout.trajectory.build import build_trajectory
from rollout.types import RolloutSample, RolloutStatus

__all__ = ["ConversationStream"]

_MOST_MESSAGES = 100
"""How many messages a sample source is asked for."""

_UNRECORDED = (
    "the calls of its agent are not recorded, so what it says is known once the rollout has ended"
)
_PRIVATE = "its workflow lets nobody watch it, so what it says is known once the rollout has ended"


@frozen
class _Preview:
    """The last messages of a sample source, as JSON, and a note for whoever reads them."""

    messages: list[Any] | None = None
    note: str | None = None


class ConversationStream(EndlessBody):
    """The conversation of one rollout: all of it, then what has changed, up to its end."""

    def __init__(self, live: LiveView, backend: ExecutionBackend, entry: Entry) -> None:
        self._live = live
        self._backend = backend
        self._entry = entry
        self._said: list[Any] = []

    async def __aenter__(self) -> AsyncGenerator[bytes, None]:
        await trio.lowlevel.checkpoint()
        self._stack = AsyncExitStack()
        self._lines = self._write()
        return self._lines

    async def __aexit__(self, *_: object) -> None:
        await self._lines.aclose()
        await self._stack.aclose()

    async def _write(self) -> AsyncGenerator[bytes, None]:
        entry, seen, said_at = self._entry, None, -SILENCE_SEC
        while True:
            preview = await self._preview()
            ended = entry.record.result is not None
            passed_on = None if ended else self._backend.live_conversation(entry.rollout_id)
            state: Any = ended, entry.record.status, passed_on is None, self._revision(), preview
            now = trio.current_time()
            if state != seen or now >= said_at + SILENCE_SEC:
                seen, said_at = state, now
                yield dump_json(await self._update(preview)) + b"\n"
            if ended or self._live.closed.is_set():
                return
            if passed_on is not None:
                try:
                    async for piece in await self._stack.enter_async_context(passed_on):
                        yield piece
                except (RolloutError, httpx.HTTPError):  # its worker is gone, or has not begun
                    await trio.lowlevel.checkpoint()
                await self._stack.aclose()
                self._said, seen = [], None
            with trio.move_on_at(trio.current_time() + UPDATE_SEC):
                await self._live.closed.wait()

    def _recorder(self) -> ConversationRecorder | None:
        context = self._entry.context
        if context is None or not context.preview_enabled:
            return None
        source = context.source or context.gateway_source
        return source if isinstance(source, ConversationRecorder) else None

    def _revision(self) -> tuple[int, int] | None:
        recorder = self._recorder()
        return None if recorder is None else recorder.revision

    async def _preview(self) -> _Preview:
        """Return the last messages of a sample source that is no recorder."""
        context = self._entry.context
        source = None if context is None else context.sample_source
        if context is not None and not context.preview_enabled:
            return _Preview(note=_PRIVATE)
        if context is None or source is None or isinstance(source, ConversationRecorder):
            return _Preview()
        try:
            with trio.fail_after(UPDATE_SEC):
                sample = await source.get_preview(_MOST_MESSAGES)
            if sample is None or not sample.trajectory_messages or not context.preview_enabled:
                return _Preview()
            take = partial(fit, list(sample.trajectory_messages))
            messages, _ = await run_off_loop(take, BODIES)
            truncated = bool(sample.extra_fields.get("_preview_truncated"))
        except Exception as error:  # noqa: BLE001 - users' code may raise anything
            return _Preview(note=f"the preview of its sample source failed: {type(error).__name__}")
        return _Preview(messages, "messages before these are not shown" if truncated else None)

    async def _update(self, preview: _Preview) -> dict[str, Any]:
        """Return the line that says how things stand."""
        entry, recorder = self._entry, self._recorder()
        line: dict[str, Any] = {"now": self._live.time(), "status": entry.record.status}
        sample: RolloutSample | None = None
        if entry.record.result is not None and entry.body is not None:
            make = partial(_of_body, entry.body, entry.rollout_id)
        else:
            prompt = [] if entry.request is None else entry.request.initial_messages
            messages: Any = preview.messages
            if preview.note is not None:
                line["note"] = preview.note
            elif entry.record.status is not RolloutStatus.QUEUED and not (recorder or messages):
                line["note"] = _UNRECORDED
            if recorder is not None:
                line["calls_in_flight"] = recorder.revision[1]
                sample = await recorder.get_sample()
                messages = sample.trajectory_messages
            own = [] if entry.context is None else entry.context.secrets
            make = partial(
                _of_sample, messages or prompt, sample, entry.rollout_id, [*entry.secrets, *own]
            )
        shown = await run_off_loop(make, BODIES)
        steps = shown.pop("steps", [])
        same = 0
        while same < min(len(steps), len(self._said)) and steps[same] == self._said[same]:
            same += 1
        self._said = steps
        return {**line, **shown, "from": same, "steps": steps[same:]}


def _of_sample(
    messages: Any, sample: RolloutSample | None, rollout_id: str, secrets: list[str | None]
) -> dict[str, Any]:
    return view(build_trajectory(messages, rollout_id=rollout_id, sample=sample, secrets=secrets))


def _of_body(body: bytes, rollout_id: str) -> dict[str, Any]:
    said = parse_json(body)["sample"]
    if said is None:
        return {"note": "its result has no sample"}
    sample = RolloutSample(
        messages=[],
        trajectory_messages=None,
        label=said["label"],
        reward=said["reward"],
        metrics=said["metrics"],
        extra_fields=said["extra_fields"],
    )
    return _of_sample(said["messages"], sample, rollout_id, [])
