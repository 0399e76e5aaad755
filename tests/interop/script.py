"""What both systems share: scripted user code, gates to hold it at, a record of the traffic.

Nothing in here knows which event loop it runs on. Each side hands in its own event class, so
that the same workflow and grader run under the official package and under this one, and the
tests can wait for a place in them instead of sleeping.
"""

from __future__ import annotations

import builtins
import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

CHAT_URL = "http://127.0.0.1:9/v1"
WAIT_SEC = 0.5
LEASE_SEC = 60.0


class Gates:
    """Named places at which user code stops until it is let through.

    Args:
        event: The event class of this side.
        shield: Makes a context in which a cancelled task can still wait.
    """

    def __init__(
        self, event: Callable[[], Any], shield: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._event = event
        self.shield = shield
        self._arrived: dict[str, Any] = defaultdict(event)
        self._open: dict[str, Any] = defaultdict(event)
        self._all_open = False

    async def hold(self, name: str) -> None:
        """Stop here until `release`."""
        self._arrived[name].set()
        if not self._all_open:
            await self._open[name].wait()

    async def reached(self, name: str) -> None:
        """Wait until somebody stops at the gate."""
        await self._arrived[name].wait()

    def release(self, name: str) -> None:
        """Let everybody through, now and later."""
        self._open[name].set()

    def let_through(self, name: str) -> None:
        """Let those through who wait now; the gate is shut for who comes later."""
        self._open[name].set()
        self._arrived[name], self._open[name] = self._event(), self._event()

    def open_all(self) -> None:
        """Hold nobody any longer."""
        self._all_open = True
        for event in self._open.values():
            event.set()


async def follow(script: dict[str, Any], gates: Gates) -> None:
    """Do what a script says: ``hold``, then ``raise``; on cancellation hold at ``cleanup``."""
    if "hold" in script:
        try:
            await gates.hold(script["hold"])
        except BaseException:
            if "cleanup" in script:
                with gates.shield():
                    await gates.hold(script["cleanup"])
            raise
    if "raise" in script:
        kind, text = script["raise"]
        raise getattr(builtins, kind)(text)


async def answer(ctx: Any, gates: Gates) -> list[dict[str, Any]]:
    """Run a workflow: follow the script in the first message, then answer 42."""
    script = ctx.prompt[0].get("script", {})
    await follow(script, gates)
    return [*ctx.prompt, {"role": "assistant", "content": script.get("answer", "42")}]


async def compare(ctx: Any, gates: Gates) -> None:
    """Run a grader: follow the script in the metadata, then compare answer and label."""
    script = (ctx.metadata or {}).get("grader", {})
    await follow(script, gates)
    if script.get("silent"):
        return
    ctx.sample.metrics["length"] = 2
    ctx.sample.metrics["broken"] = float("nan")
    ctx.sample.remove_sample = script.get("remove", False)
    ctx.set_reward(1.0 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)


class Traffic:
    """Event hooks for an ``httpx.AsyncClient`` that record every answer.

    Args:
        event: The event class of this side.
        gates: Where polls are held.
        poll_gate: The gate that every poll has to pass before it is sent, if any.
    """

    def __init__(self, event: Callable[[], Any], gates: Gates, poll_gate: str | None) -> None:
        self._event = event
        self._gates = gates
        self._poll_gate = poll_gate
        self._answers: list[dict[str, Any]] = []
        self._changed = event()

    def watch(self, http: Any) -> None:
        """Record what *http* receives from here on."""
        http.event_hooks = {"request": [self._on_request], "response": [self._on_response]}

    async def answered(
        self, route: str, count: int = 1, status_code: int | None = None
    ) -> list[dict[str, Any]]:
        """Wait for that many answers of a route (the last segment of its path)."""
        while True:
            found = [
                answer
                for answer in self._answers
                if answer["route"] == route and status_code in {None, answer["status_code"]}
            ]
            if len(found) >= count:
                return found
            await self._changed.wait()

    async def _on_request(self, request: Any) -> None:
        if self._poll_gate is not None and request.url.path.endswith("/result"):
            await self._gates.hold(self._poll_gate)

    async def _on_response(self, response: Any) -> None:
        content = await response.aread()
        self._answers.append(
            {
                "route": response.request.url.path.rsplit("/", 1)[-1],
                "status_code": response.status_code,
                "headers": dict(response.headers),
                "body": json.loads(content),
            }
        )
        self._changed.set()
        self._changed = self._event()
