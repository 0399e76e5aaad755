"""What checks look at in an answer, as a whole or line by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
from attrs import define

from rollout.simulation.server import Exchange

__all__ = ["FeedDelivery", "news_of"]

_TERMINAL = {"success", "failure", "cancelled"}


def news_of(status: int, body: bytes) -> dict[str, Any]:
    """Pick out of an answer what checks look at."""
    if status != httpx.codes.OK:
        return {}
    try:
        content = json.loads(body)
    except ValueError:
        return {"unreadable": True}
    if not isinstance(content, dict) or "status" not in content:
        return {}
    news = {
        "state": content["status"],
        "started": content.get("agent_started_at"),
        "about": content.get("rollout_id"),
    }
    if content["status"] in _TERMINAL:
        news["category"] = content.get("err_category")
        news["digest"] = hashlib.sha256(body).hexdigest()[:12]
        news["reward"] = (content.get("sample") or {}).get("reward")
    return news


@define(eq=False, repr=False)
class FeedDelivery:
    """Reads the lines of one feed where the server writes them, and where they arrive.

    Attributes:
        feeds: Which rollouts are attached to each open feed, by its token.
        attach: Notes that one is.
        detach: Notes that one is no longer, since its end was told.
        claimed: The rollouts that the feed was opened for.
        exchange: Its request.
    """

    feeds: dict[str, dict[str, None]]
    attach: Callable[[str, str], None]
    detach: Callable[[str, str], None]
    claimed: Mapping[str, str]
    exchange: Exchange
    _token: str = ""
    _rest: bytes = b""

    def written(self, chunk: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        """Say what the server is about to tell, of which rollout."""
        status = self.exchange.status
        if status != httpx.codes.OK:
            yield from ((rollout_id, {"status": status}) for rollout_id in self.claimed)
            return
        for line in chunk.splitlines():
            content = json.loads(line) if line else {}
            if "feed" in content:
                self._token = content["feed"]
                self.feeds[self._token] = {}
                for rollout_id in self.claimed:
                    refused = rollout_id in content["refused"]
                    if not refused:
                        self.attach(self._token, rollout_id)
                    news = {"status": status, "refused": refused}
                    yield rollout_id, news | {"write_sec": self.exchange.write_sec}
            elif "rollout_id" in content:
                news = news_of(status, line)
                if "digest" in news:
                    self.detach(self._token, content["rollout_id"])
                yield content["rollout_id"], {"status": status, **news}

    def arrived(self, chunk: bytes) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Say what a client is told, and of which rollout."""
        status = self.exchange.status
        if status != httpx.codes.OK:
            yield from (("answered", about, {"status": status}) for about in self.claimed)
            return
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            content = json.loads(line) if line else {}
            if "feed" in content:
                for rollout_id in self.claimed:
                    refused = rollout_id in content["refused"]
                    yield "answered", rollout_id, {"status": status, "refused": refused}
            elif "rollout_id" in content:
                yield "told", content["rollout_id"], {"status": status, **news_of(status, line)}

    def close(self) -> None:
        """Forget the feed, since its connection is gone."""
        self.feeds.pop(self._token, None)
