"""What checks look at in an answer, as a whole or line by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
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
    """

    feeds: dict[str, dict[str, int]]

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
    """

    attachments: Attachments
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
                self.attachments.feeds[self._token] = {}
                for rollout_id in self.claimed:
                    refused = rollout_id in content["refused"]
                    if not refused:
                        self.attachments.attach(self._token, rollout_id)
                    news = {"status": status, "refused": refused}
                    yield rollout_id, news | {"write_sec": self.exchange.write_sec}
            elif "rollout_id" in content:
                rollout_id = content["rollout_id"]
                news = news_of(status, line)
                if self.attachments.is_earlier(self._token, rollout_id):
                    news["earlier"] = True
                if "digest" in news:
                    self.attachments.detach(self._token, rollout_id)
                yield rollout_id, {"status": status, **news}

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
        self.attachments.feeds.pop(self._token, None)
