"""Run a few rollouts at a time on a rollout server, and print their rewards.

Start it with the URLs of the server and of the chat endpoint::

    python examples/run_client.py http://127.0.0.1:8000 http://127.0.0.1:9000/v1

Keys, where they are needed, come from ``ROLLOUT_SERVER_API_KEY`` and ``ROLLOUT_LLM_API_KEY``.
"""

from __future__ import annotations

import os
import sys
from uuid import uuid4

import trio

from rollout.client import RolloutClient
from rollout.types import RolloutResultResponse, RolloutStatus

QUESTIONS = {
    "What is 6 * 7?": "42",
    "What is 12 + 30?": "42",
    "What is 9 * 9?": "81",
    "What is 100 - 58?": "42",
    "What is 17 + 4?": "21",
    "What is 8 * 12?": "96",
}
MAX_IN_FLIGHT = 3


async def run_all(server_url: str, chat_url: str) -> dict[str, RolloutResultResponse]:
    """Ask every question, print each result as it comes, and return them all."""
    results: dict[str, RolloutResultResponse] = {}
    in_flight = trio.CapacityLimiter(MAX_IN_FLIGHT)

    async def run_one(client: RolloutClient, question: str, label: str) -> None:
        async with in_flight:
            result = await client.run_rollout(
                initial_messages=[{"role": "user", "content": question}],
                chat_completions_url=chat_url,
                rollout_id=str(uuid4()),
                llm_api_key=os.environ.get("ROLLOUT_LLM_API_KEY"),
                label=label,
                agent_timeout_sec=120,
            )
        results[question] = result
        print(f"{question:20} {describe(result)}")

    async with (
        RolloutClient(
            url=server_url,
            admission_timeout_sec=60,
            api_key=os.environ.get("ROLLOUT_SERVER_API_KEY"),
        ) as client,
        trio.open_nursery() as nursery,
    ):
        for question, label in QUESTIONS.items():
            nursery.start_soon(run_one, client, question, label)
    return results


def describe(result: RolloutResultResponse) -> str:
    """Say in a few words how a rollout ended."""
    if result.status is RolloutStatus.SUCCESS and result.sample is not None:
        return f"reward {result.sample.reward}"
    return f"{result.status}: {result.err_message} ({result.err_category})"


def main() -> int:
    """Run with the command line's arguments; the exit code says whether all succeeded."""
    if len(sys.argv) != 3:
        print("usage: python run_client.py SERVER_URL CHAT_COMPLETIONS_URL", file=sys.stderr)
        return 2
    results = trio.run(run_all, sys.argv[1], sys.argv[2])
    succeeded = [r for r in results.values() if r.status is RolloutStatus.SUCCESS]
    rewards = [r.sample.reward for r in succeeded if r.sample and r.sample.reward is not None]
    if rewards:
        print(f"mean reward {sum(rewards) / len(rewards):.2f} over {len(rewards)} rollouts")
    return 0 if len(succeeded) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
