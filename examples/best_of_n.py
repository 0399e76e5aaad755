"""Best of n: draw samples of one question, keep the best, stop once one is good enough.

Start it with the URLs of the rollout server and of the chat endpoint, and a question::

    python examples/best_of_n.py http://127.0.0.1:8000 http://127.0.0.1:9000/v1 "What is 6 * 7?" 42
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from uuid import uuid4

import trio

from rollout.client import RolloutClient
from rollout.types import RolloutInitRequest, RolloutResultResponse

SAMPLES = 8
AT_A_TIME = 4
GOOD_ENOUGH = 1.0


def requests(chat_url: str, question: str, label: str) -> Iterator[RolloutInitRequest]:
    """Make the requests; each is pulled when there is a place for it, and not before."""
    for number in range(SAMPLES):
        yield RolloutInitRequest(
            rollout_id=f"best-of-n-{uuid4()}",
            initial_messages=[{"role": "user", "content": question}],
            chat_completions_url=chat_url,
            llm_api_key=os.environ.get("ROLLOUT_LLM_API_KEY"),
            label=label,
            metadata={"seed": number},
        )


async def best_of_n(
    server_url: str, chat_url: str, question: str, label: str
) -> RolloutResultResponse | None:
    """Return the result with the highest reward, ``None`` if no sample got one."""
    best: RolloutResultResponse | None = None
    key = os.environ.get("ROLLOUT_SERVER_API_KEY")
    async with (
        RolloutClient(url=server_url, api_key=key) as client,
        client.run_rollouts(
            requests(chat_url, question, label), max_in_flight=AT_A_TIME
        ) as finished,
    ):
        async for _, outcome in finished:
            if isinstance(outcome, Exception):
                print(f"a sample was lost: {outcome}", file=sys.stderr)
            elif reward_of(outcome) > reward_of(best):
                best = outcome
            if reward_of(best) >= GOOD_ENOUGH:
                break  # leaving the block cancels what is still running, on the server too
    return best


def reward_of(result: RolloutResultResponse | None) -> float:
    """Return a result's reward; one without is worse than any that has one."""
    if result is None or result.sample is None or result.sample.reward is None:
        return float("-inf")
    return result.sample.reward


def main() -> int:
    """Run with the command line's arguments; the exit code says whether there is a best one."""
    if len(sys.argv) != 5:
        print("usage: python best_of_n.py SERVER_URL CHAT_URL QUESTION LABEL", file=sys.stderr)
        return 2
    server_url, chat_url, question, label = sys.argv[1:]
    best = trio.run(best_of_n, server_url, chat_url, question, label)
    if best is None or best.sample is None:
        print("no sample got a reward", file=sys.stderr)
        return 1
    print(f"reward {best.sample.reward}: {best.sample.messages[-1]['content']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
