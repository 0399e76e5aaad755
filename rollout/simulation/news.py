"""What checks look at in an answer, as a whole or line by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

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


class Attachments(Protocol):
    """What is known of the feeds of a network.

    Attributes:
        feeds: Which rollouts are attached to each open feed, by its token.
        opened_by: The request that opened each of those feeds, by its token.
    """

    feeds: dict[str, dict[str, int]]
    opened_by: dict[str, int]

    def attach(self, feed: str, rollout_id: str) -> None:
        """Note that a rollout is attached to a feed, and to no other one."""

    def detach(self, feed: str, rollout_id: str) -> None:
        """Note that a feed told the end of a rollout, which it follows no further."""

    def is_earlier(self, feed: str, rollout_id: str) -> bool:
        """Say whether what a feed tells of an id is about an earlier admission of it."""
        ...


@define(eq=False, repr=False)
class FeedDelivery:
    """Reads the lines of one feed where the server writes them, and where they arrive.

    Attributes:
        attachments: What is attached to which feed.
        claimed: The rollouts that the feed was opened for.
        exchange: Its request.
        request: The number of its request.
    """

    attachments: Attachments
    claimed: Mapping[str, str]
    exchange: Exchange
    request: int
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
                yield from self._opened(content)
            elif "taken_over" in content:
                for rollout_id in content["taken_over"]:
                    yield rollout_id, {"status": status, "taken_over": True}
            elif "rollout_id" in content:
                rollout_id = content["rollout_id"]
                news = news_of(status, line)
                if self.attachments.is_earlier(self._token, rollout_id):
                    news["earlier"] = True
                if "digest" in news:
                    self.attachments.detach(self._token, rollout_id)
                yield rollout_id, {"status": status, **news}

    def _opened(self, hello: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        self._token = hello["feed"]
        self.attachments.feeds[self._token] = {}
        self.attachments.opened_by[self._token] = self.request
        for rollout_id in self.claimed:
            refused = rollout_id in hello["refused"]
            if not refused:
                self.attachments.attach(self._token, rollout_id)
            news = {"status": self.exchange.status, "refused": refused}
            yield rollout_id, news | {"write_sec": self.exchange.write_sec}

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

    def close(self) -> Iterable[str]:
        """Forget the feed, since its connection is gone; return what was attached to it."""
        self.attachments.opened_by.pop(self._token, None)
        return self.attachments.feeds.pop(self._token, {})
