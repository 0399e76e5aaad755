"""Sample groups for GRPO: several samples of each prompt, and their advantages.

Start it with the URLs of the rollout server and of the chat endpoint::

    python examples/grpo_groups.py http://127.0.0.1:8000 http://127.0.0.1:9000/v1

The advantage of a sample is its reward, normalised within its group:
``(r - mean) / (std + eps)`` (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300). A group whose
rewards are all alike has no advantages to learn from, and is dropped.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from uuid import uuid4

import trio
from attrs import frozen

from rollout.client import RolloutClient
from rollout.types import RolloutInitRequest, RolloutSample

PROMPTS = {f"What is {left} * {right}?": str(left * right) for left in (6, 7) for right in (8, 9)}
SAMPLES = 8
ENOUGH = 6
"""How many samples of a group have to be done; the slowest ones are cancelled."""

GROUPS_AT_A_TIME = 4
EPSILON = 1e-6


@frozen
class Group:
    """The samples of one prompt, each with its advantage."""

    prompt: str
    samples: Sequence[RolloutSample]
    advantages: Sequence[float]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Normalise the rewards of a group; the deviation is that of the group itself."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]


async def sample_group(
    client: RolloutClient, chat_url: str, prompt: str, label: str
) -> Group | None:
    """Draw the samples of one prompt; return nothing where they are all alike, or too few."""
    requests = [
        RolloutInitRequest(
            rollout_id=f"grpo-{uuid4()}",
            initial_messages=[{"role": "user", "content": prompt}],
            chat_completions_url=chat_url,
            llm_api_key=os.environ.get("ROLLOUT_LLM_API_KEY"),
            label=label,
            metadata={"seed": number},
        )
        for number in range(SAMPLES)
    ]
    done = await client.first_successes(requests, ENOUGH)
    if done.failures:  # which are no samples of reward 0: they say nothing about the policy
        print(f"{prompt} {len(done.failures)} failed", file=sys.stderr)
    samples = [rollout.result.sample for rollout in done]
    rewarded = [each for each in samples if each is not None and each.reward is not None]
    rewards = [each.reward for each in rewarded if each.reward is not None]
    if len(set(rewards)) < 2:
        return None
    return Group(prompt, rewarded, advantages(rewards))


async def sample_groups(server_url: str, chat_url: str, prompts: Mapping[str, str]) -> list[Group]:
    """Sample all prompts, a few groups at a time; return the groups that can teach something."""
    groups: list[Group] = []
    limiter = trio.CapacityLimiter(GROUPS_AT_A_TIME)

    async def one(client: RolloutClient, prompt: str, label: str) -> None:
        async with limiter:
            group = await sample_group(client, chat_url, prompt, label)
        if group is not None:
            groups.append(group)

    async with (
        RolloutClient(url=server_url, api_key=os.environ.get("ROLLOUT_SERVER_API_KEY")) as client,
        trio.open_nursery() as nursery,
    ):
        for prompt, label in prompts.items():
            nursery.start_soon(one, client, prompt, label)
    return groups


def main() -> int:
    """Run with the command line's arguments."""
    if len(sys.argv) != 3:
        print("usage: python grpo_groups.py SERVER_URL CHAT_COMPLETIONS_URL", file=sys.stderr)
        return 2
    groups = trio.run(sample_groups, sys.argv[1], sys.argv[2], PROMPTS)
    for group in groups:
        print(f"{group.prompt:20}", " ".join(f"{value:+.2f}" for value in group.advantages))
    print(f"{len(groups)} of {len(PROMPTS)} groups have right and wrong samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
