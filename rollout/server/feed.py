"""The result feed: one streamed response for all the rollouts that a client waits for.

Theory of operation: a `Feed` lives as long as its response. Entries are attached to it by
whoever proves their lease: the request that opens the feed, or an admission that names it.
A change of an attached entry only marks it; the stream writes the *current* state of what is
marked, so a slow reader costs no memory beyond the marks, and a client that opens a new feed
after a broken one gets everything it has not seen. Streaming renews no lease: only opening a
feed and the small renewal request do.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import trio
from attrs import define, field, frozen

from rollout.codec import dump_json
from rollout.errors import FieldProblem, InvalidBodyError
from rollout.rules import SeenState, is_terminal
from rollout.server.asgi import EndlessBody
from rollout.server.entry import Entry, token_digest
from rollout.server.registry import RolloutRegistry

__all__ = [
    "FEED_PATH",
    "MAX_CLAIMS",
    "Feed",
    "FeedHub",
    "FeedStream",
    "LeaseClaim",
    "read_claims",
    "recall_claimed",
]

FEED_PATH = "/rollouts/feed"

_TOKEN_BYTES = 32
_CHUNK_BYTES = 256 * 1024
HEARTBEAT = b"\n"

MAX_CLAIMS = 16 * 1024
"""How many leases a request may claim; so many take some 40 ms to read, and as long to renew."""


@frozen
class LeaseClaim:
    """A lease as a client claims it: rollout, token, and the state that it has seen."""

    rollout_id: str
    token: str = field(repr=False)
    seen: SeenState


def read_claims(body: Any, name: str = "leases") -> list[LeaseClaim]:
    """Read the leases that a request claims in the list of that name.

    Raises:
        InvalidBodyError: It has another form.
    """
    leases = body.get(name) if isinstance(body, dict) else None
    if not isinstance(leases, list) or len(leases) > MAX_CLAIMS:
        raise _problem(name, f"must be a list of at most {MAX_CLAIMS} objects")
    claims: list[LeaseClaim] = []
    for index, item in enumerate(leases):
        rollout_id = item.get("rollout_id") if isinstance(item, dict) else None
        token = item.get("polling_lease_token") if isinstance(item, dict) else None
        if not isinstance(rollout_id, str) or not isinstance(token, str):
            msg = "must have the strings rollout_id and polling_lease_token"
            raise _problem(f"{name}.{index}", msg)
        seen = item.get("seen")
        if seen is not None and not isinstance(seen, str):
            raise _problem(f"{name}.{index}.seen", "must be a string")
        claims.append(LeaseClaim(rollout_id, token, SeenState.from_header(seen) or SeenState()))
    return claims


def _problem(field_name: str, msg: str) -> InvalidBodyError:
    return InvalidBodyError([FieldProblem((field_name,), msg, "type_error")])


@define(eq=False, repr=False)
class Feed:
    """One open feed.

    Attributes:
        answered: Called with every entry whose state was sent, and that state.
        entries: What is attached to it, by id.
        closed: Whether its stream ends after the pending lines.
    """

    answered: Callable[[Entry, SeenState], None]
    entries: dict[str, Entry] = field(factory=dict)
    closed: bool = False
    # The states that its reader has seen; polls are answered apart from them.
    _seen: dict[Entry, SeenState] = field(factory=dict)
    # What they had seen when the lines under way were taken.
    _seen_before: dict[Entry, SeenState] = field(factory=dict)
    _marked: OrderedDict[Entry, None] = field(factory=OrderedDict)
    _taken_over: list[str] = field(factory=list)
    _wake: trio.Event = field(factory=trio.Event)

    def attach(self, entry: Entry, seen: SeenState) -> None:
        """Start to report an entry, beginning with the state that was not seen yet.

        A feed that has reported it so far says that it does so no longer. This one, if it did,
        reports it anew: its reader may have dropped what it was sent.
        """
        if entry.feed is not None and entry.feed is not self:
            entry.feed.lose(entry)
        before = self.entries.get(entry.rollout_id)
        if before is not None and before is not entry:  # forgotten since, and its id used again
            self.detach(before)
        entry.feed = self
        self.entries[entry.rollout_id] = entry
        self._seen[entry] = seen
        if entry.record.has_news(seen):
            self.mark(entry)

    def detach(self, entry: Entry) -> None:
        """Stop reporting an entry."""
        if self._seen.pop(entry, None) is None:
            return
        del self.entries[entry.rollout_id]
        self._marked.pop(entry, None)
        entry.feed = None

    def lose(self, entry: Entry) -> None:
        """Stop reporting an entry that another feed takes over, and send its id to the reader."""
        self.detach(entry)
        self._taken_over.append(entry.rollout_id)
        self._wake.set()

    def mark(self, entry: Entry) -> None:
        """Note that an attached entry has changed."""
        self._marked[entry] = None
        self._wake.set()

    def end(self) -> None:
        """End the stream after the pending lines."""
        self.closed = True
        self._wake.set()

    def close(self) -> None:
        """Detach all entries: the stream is over."""
        self.end()
        for entry in list(self.entries.values()):
            self.detach(entry)

    def take(self) -> tuple[list[bytes], list[tuple[Entry, SeenState]]]:
        """Take the next lines to send, in pieces, and the states that they report."""
        lines: list[bytes] = []
        large: list[bytes] = []
        taken: list[tuple[Entry, SeenState]] = []
        size = 0
        if self._taken_over:
            lines += (dump_json({"taken_over": self._taken_over}), b"\n")
            self._taken_over = []
        while self._marked and size < _CHUNK_BYTES:
            entry, _ = self._marked.popitem(last=False)
            if not entry.record.has_news(self._seen[entry]):
                continue
            line = entry.current_body()
            if len(line) < _CHUNK_BYTES:
                lines += (line, b"\n")
            else:  # the last one, then; put together with the others it would be copied
                large = [line, b"\n"]
            size += len(line)
            taken.append((entry, entry.record.state))
            self._seen_before[entry] = self._seen[entry]
        return ([b"".join(lines)] if lines else []) + large, taken

    def sent(self, taken: Iterable[tuple[Entry, SeenState]]) -> None:
        """Note that these states were sent; an entry that has ended is detached.

        Meanwhile an entry may have moved on, which has marked it again; or it was attached
        again, to this feed or another one, which reports it anew.
        """
        for entry, state in taken:
            if self._seen.get(entry) is not self._seen_before.pop(entry):
                continue
            self._seen[entry] = state
            if is_terminal(state.status):
                self.detach(entry)
            self.answered(entry, state)

    async def wait(self, until: float) -> None:
        """Wait for something to send, but no longer than *until* (trio time)."""
        if self._marked or self._taken_over or self.closed:
            await trio.lowlevel.checkpoint()
            return
        self._wake = trio.Event()
        with trio.move_on_at(until):
            await self._wake.wait()


async def recall_claimed(registry: RolloutRegistry, claims: Iterable[LeaseClaim]) -> set[str]:
    """Bring what is claimed into memory; return the ids of claims with a wrong token.

    Raises:
        StateUnavailableError: The state cannot be read.
    """
    refused = await registry.recall({claim.rollout_id: claim.token for claim in claims})
    await trio.lowlevel.checkpoint()
    return refused


class FeedHub:
    """The open feeds of a server, by their tokens.

    A feed's token is sent once, in its first line, and proves every lease that is attached:
    it was given to who had proved them.

    Attributes:
        heartbeat_sec: The longest silence of a feed, in seconds.
    """

    def __init__(self, registry: RolloutRegistry) -> None:
        self.heartbeat_sec = registry.result_wait_timeout_sec
        self._registry = registry
        registry.on_release.append(self.close_all)
        self._feeds: dict[bytes, Feed] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    def open(self, claims: Iterable[LeaseClaim]) -> tuple[Feed, str, list[str]]:
        """Open a feed for proven leases, and renew them.

        Returns:
            The feed, its token, and the ids of those claims that do not hold: unknown here, or
            with the wrong token.
        """
        feed = Feed(self._registry.answered)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        refused: list[str] = []
        now = trio.current_time()
        for claim in claims:
            entry = self._registry.proven(claim.rollout_id, claim.token)
            if entry is None:
                refused.append(claim.rollout_id)
                continue
            self._registry.renew(entry, now)
            feed.attach(entry, claim.seen)
        self._feeds[token_digest(token)] = feed
        return feed, token, refused

    def find(self, token: str) -> Feed | None:
        """Return the open feed that a token belongs to."""
        # A lookup by digest tells an attacker nothing about the token by its time.
        return self._feeds.get(token_digest(token))

    def renew(self, feed: Feed) -> int:
        """Renew every lease that is attached to a feed; return how many hold."""
        now = trio.current_time()
        return sum(self._registry.renew(entry, now) for entry in list(feed.entries.values()))

    def forget(self, feed: Feed, token: str) -> None:
        """Close and forget a feed whose stream is over; no shutdown waits for its reader."""
        feed.close()
        del self._feeds[token_digest(token)]
        self._registry.recheck_delivery()

    def close_all(self) -> None:
        """End every stream after its pending lines."""
        for feed in list(self._feeds.values()):
            feed.end()


class FeedStream(EndlessBody):
    """The lines of a new feed, which is open for as long as they are sent.

    Args:
        hub: Where the feed is opened.
        claims: The leases of the request.
    """

    def __init__(self, hub: FeedHub, claims: Iterable[LeaseClaim]) -> None:
        self._hub = hub
        self._claims = claims

    async def __aenter__(self) -> AsyncGenerator[bytes, None]:
        await trio.lowlevel.checkpoint()
        self._feed, self._token, refused = self._hub.open(self._claims)
        self._lines = self._write(refused)
        return self._lines

    async def __aexit__(self, *_: object) -> None:
        self._hub.forget(self._feed, self._token)
        await self._lines.aclose()

    async def _write(self, refused: list[str]) -> AsyncGenerator[bytes, None]:
        """Yield the pieces to send; each has been sent when the next one is requested."""
        feed, heartbeat_sec = self._feed, self._hub.heartbeat_sec
        hello = {"feed": self._token, "refused": refused, "heartbeat_sec": heartbeat_sec}
        yield dump_json(hello) + b"\n"
        said_at = trio.current_time()
        while True:
            await feed.wait(said_at + heartbeat_sec)
            pieces, taken = feed.take()
            if not pieces:
                if feed.closed:
                    return
                if trio.current_time() < said_at + heartbeat_sec:
                    continue  # the change was no news for this reader
                pieces = [HEARTBEAT]
            # Writing waits for the reader, and meanwhile marks add up, not messages.
            for piece in pieces:
                yield piece
            feed.sent(taken)
            said_at = trio.current_time()
