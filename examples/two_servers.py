"""A harness that drives two rollout servers: balances, and goes on when one of them dies.

Start it with the URL of the chat endpoint and those of the servers::

    python examples/two_servers.py http://127.0.0.1:9000/v1 http://127.0.0.1:8000 http://127.0.0.1:8001

A rollout is tried again only if no agent has started: ``agent_started_at`` is null. Once one
has, tokens are spent, and a second try would be a different experiment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from uuid import uuid4

import httpx
import trio
from attrs import define, field

from rollout.client import RolloutClient, RolloutPollTimeoutError, RolloutProtocolError
from rollout.types import RolloutResultResponse

LOST = (httpx.TransportError, RolloutPollTimeoutError, RolloutProtocolError)
NEVER_ADMITTED = (httpx.ConnectError, httpx.ConnectTimeout, RolloutProtocolError)
SHUTTING_DOWN = 503
ATTEMPTS = 4
QUESTIONS = {f"What is {n} * {n + 1}?": str(n * (n + 1)) for n in range(2, 12)}


class NoServerLeftError(Exception):
    """Every server is gone."""


@define(eq=False)
class Server:
    """One server, as the harness sees it.

    Attributes:
        client: Asks it.
        in_flight: How many rollouts it has from us.
        alive: Whether it has answered so far.
    """

    client: RolloutClient
    in_flight: int = 0
    alive: bool = True


@define(eq=False)
class Harness:
    """Spreads rollouts over servers."""

    servers: list[Server]
    chat_url: str
    results: dict[str, RolloutResultResponse | Exception] = field(factory=dict)

    async def run(self, question: str, label: str) -> None:
        """Run one question to its end, and keep what came of it."""
        try:
            self.results[question] = await self._try(question, label)
        except (*LOST, NoServerLeftError) as error:
            self.results[question] = error

    async def _try(self, question: str, label: str) -> RolloutResultResponse:
        result = None
        for _ in range(ATTEMPTS):
            server = self._least_loaded()
            server.in_flight += 1
            try:
                result = await self._attempt(server, question, label)
            finally:
                server.in_flight -= 1
            if result is not None and result.agent_started_at is not None:
                return result
        if result is None:
            raise NoServerLeftError(f"{ATTEMPTS} attempts were lost")
        return result

    async def _attempt(
        self, server: Server, question: str, label: str
    ) -> RolloutResultResponse | None:
        """Run one attempt; ``None`` if the server was lost before its agent had started."""
        handle = None
        try:
            handle = await server.client.run_rollout_async(
                initial_messages=[{"role": "user", "content": question}],
                chat_completions_url=self.chat_url,
                rollout_id=str(uuid4()),
                llm_api_key=os.environ.get("ROLLOUT_LLM_API_KEY"),
                label=label,
            )
            return await handle
        except LOST as error:
            if isinstance(error, RolloutProtocolError) and error.status_code != SHUTTING_DOWN:
                raise  # it lives, and does not want this request
            server.alive = False
            if handle is None and not isinstance(error, NEVER_ADMITTED):
                raise  # it may have been admitted, and its agent may run
            seen = handle.latest_result if handle is not None else None
            if seen is not None and seen.agent_started_at is not None:
                raise
            return None

    def _least_loaded(self) -> Server:
        alive = [server for server in self.servers if server.alive]
        if not alive:
            raise NoServerLeftError("no server answers any longer")
        return min(alive, key=lambda server: server.in_flight)


async def run_all(
    chat_url: str, server_urls: Iterable[str], questions: Mapping[str, str]
) -> dict[str, RolloutResultResponse | Exception]:
    """Run all questions at once; return a result, or the error that it was lost with, for each."""
    key = os.environ.get("ROLLOUT_SERVER_API_KEY")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                RolloutClient(url=url, api_key=key, admission_timeout_sec=60)
            )
            for url in server_urls
        ]
        harness = Harness([Server(client) for client in clients], chat_url)
        async with trio.open_nursery() as nursery:
            for question, label in questions.items():
                nursery.start_soon(harness.run, question, label)
    return harness.results


def main() -> int:
    """Run with the command line's arguments; the exit code says whether nothing was lost."""
    if len(sys.argv) < 3:
        print("usage: python two_servers.py CHAT_URL SERVER_URL...", file=sys.stderr)
        return 2
    results = trio.run(run_all, sys.argv[1], sys.argv[2:], QUESTIONS)
    lost = [question for question, result in results.items() if isinstance(result, Exception)]
    for question, result in results.items():
        print(f"{question:20} {result if isinstance(result, Exception) else result.status}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
