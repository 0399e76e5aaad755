"""GRPO from end to end: a policy in numpy learns sums from the tokens of its own rollouts.

It needs numpy (``pip install numpy``), no key, and some seconds::

    python examples/grpo_training.py

One process has all the parts, which are four in real life. *The endpoint* samples from the policy
and answers as vLLM does, with token ids and log-probabilities. *The agent* asks it twice, and knows
nothing of tokens. *The rollout server* has a gateway, which records them. *The trainer* runs groups
of rollouts, fetches their trajectories, makes arrays of them, and updates the policy while its
calls are paused. Rollouts go on during an update, so some have seen an older version: those that
are too old are left out, and for the others the objective has the ratio to the policy that they
were sampled from (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from typing import Any

import hypercorn.trio
import numpy as np
import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from quart import request
from quart_trio import QuartTrio

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    ConcurrencyConfig,
    Grader,
    GraderContext,
    LocalBackend,
)
from rollout.client import RolloutClient, RolloutGroup
from rollout.errors import TrajectoryUnavailableError
from rollout.gateway import ModelGateway
from rollout.integrations.chat import chat
from rollout.server import create_rollout_server, serve
from rollout.trajectory import Trajectory
from rollout.types import RolloutInitRequest

QUESTIONS = {"6+8": "14", "7+2": "09"}
SAMPLES = 12
GROUPS_PER_UPDATE = 2
GROUPS_AT_A_TIME = 1
"""More of them make better use of an endpoint, and samples that are older when they are used."""

UPDATES = 12
MOST_STALE = 1
"""How many versions older than the policy a rollout's oldest token may be."""

LEARNING_RATE = 10.0
CLIP = 0.2
EPSILON = 1e-6

# --- the policy -----------------------------------------------------------------------------

ROLES = {"user": 256, "assistant": 257}
END = 258
DIGITS = 10
DIGIT = ord("0")


def encode(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The chat template: a byte is a token, and each message has one before and one after it."""
    ids: list[int] = []
    for message in messages:
        ids += [ROLES[message["role"]], *message["content"].encode(), END]
    return [*ids, ROLES["assistant"]]


@define
class Policy:
    """Says two digits, by the question's two digits and the place in the reply."""

    weights: np.ndarray = field(factory=lambda: np.zeros((DIGITS, DIGITS, 2, DIGITS)))
    random: np.random.Generator = field(factory=lambda: np.random.default_rng(0))

    def state(self, before: Sequence[int]) -> tuple[int, int, int]:
        """What decides about the next token, given those before it."""
        left, right = [each - DIGIT for each in before if 0 <= each - DIGIT < DIGITS][:2]
        return left, right, [*before][::-1].index(ROLES["assistant"])

    def log_probs(self, before: Sequence[int]) -> np.ndarray:
        """The log-probability of each digit."""
        logits = self.weights[self.state(before)]
        return logits - np.log(np.exp(logits).sum())

    def sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Draw a reply; returns its tokens and their log-probabilities."""
        said: list[int] = []
        scores: list[float] = []
        for _ in range(2):
            log_probs = self.log_probs([*prompt, *said])
            digit = int(self.random.choice(DIGITS, p=np.exp(log_probs)))
            said.append(DIGIT + digit)
            scores.append(float(log_probs[digit]))
        return said, scores


# --- the endpoint ---------------------------------------------------------------------------


def create_endpoint(policy: Policy) -> QuartTrio:
    """Chat completions as vLLM answers them."""
    app = QuartTrio(__name__)

    @app.post("/v1/chat/completions")
    async def complete() -> dict[str, Any]:
        body = await request.get_json()
        prompt = encode(body["messages"])
        said, scores = policy.sample(prompt)
        tokens = [
            {"token": chr(each), "logprob": score} for each, score in zip(said, scores, strict=True)
        ]
        answer: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": bytes(said).decode()},
            "finish_reason": "stop",
            "logprobs": {"content": tokens} if body.get("logprobs") else None,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
        reply = {"object": "chat.completion", "model": "tiny", "choices": [answer], "usage": usage}
        if body.get("return_token_ids"):
            reply["prompt_token_ids"] = prompt
            answer["token_ids"] = said
        return reply

    return app


# --- the agent ------------------------------------------------------------------------------


class AskTwice(AgentWorkflow):
    """Asks, and asks again; the second reply is the answer."""

    async def run(self, ctx: AgentWorkflowContext) -> None:
        """Return nothing: what the gateway has recorded is the sample."""
        first = await chat(ctx.prompt, model="tiny")
        await chat([*ctx.prompt, first.message, {"role": "user", "content": "?"}], model="tiny")


class RightDigits(Grader):
    """Rewards the share of digits that are right."""

    def grade(self, ctx: GraderContext) -> None:
        """Set the reward: 0, 0.5 or 1."""
        said = ctx.sample.messages[-1]["content"]
        ctx.set_reward(np.mean([a == b for a, b in zip(said, ctx.label, strict=True)]))


# --- the arrays of a step -------------------------------------------------------------------


@define
class TokenSequence:
    """The tokens of a conversation, and which of them the policy said."""

    tokens: list[int] = field(factory=list)
    said: list[bool] = field(factory=list)
    log_probs: list[float] = field(factory=list)
    oldest: int = sys.maxsize

    def add(self, tokens: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Add what the policy was given, or what it said with these log-probabilities."""
        self.tokens += tokens
        self.said += [log_probs is not None] * len(tokens)
        self.log_probs += log_probs if log_probs is not None else [0.0] * len(tokens)


def sequences_of(trajectory: Trajectory) -> list[TokenSequence]:
    """Join the calls of each conversation; a turn that does not go on with the last begins anew."""
    found: list[TokenSequence] = []
    latest: dict[int, TokenSequence] = {}
    for call in trajectory.calls:
        if not call.captured:
            return []  # part of a rollout is no rollout
        sequence = latest.get(call.branch)
        so_far = [] if sequence is None else sequence.tokens
        if sequence is None or call.prompt_token_ids[: len(so_far)] != so_far:
            so_far, sequence = [], TokenSequence()
            latest[call.branch] = sequence
            found.append(sequence)
        sequence.add(call.prompt_token_ids[len(so_far) :])
        sequence.add(call.completion_token_ids, call.logprobs)
        sequence.oldest = min(sequence.oldest, call.policy_version_start)
    return found


@frozen
class Batch:
    """The arrays of a step: a row for each sequence, a column for each token."""

    tokens: np.ndarray
    said: np.ndarray
    log_probs: np.ndarray
    advantages: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[TokenSequence, float]]) -> Batch:
        """Pad sequences to the longest one; each has an advantage."""
        shape = len(rows), max((len(each.tokens) for each, _ in rows), default=0)
        batch = cls(np.zeros(shape, int), np.zeros(shape, bool), np.zeros(shape), np.zeros(shape))
        for row, (each, advantage) in enumerate(rows):
            own = row, slice(len(each.tokens))
            batch.tokens[own], batch.said[own] = each.tokens, each.said
            batch.log_probs[own], batch.advantages[row] = each.log_probs, advantage
        return batch


def advantages(rewards: Sequence[float]) -> np.ndarray:
    """Normalise the rewards of a group: none has an advantage where all are alike."""
    return (np.asarray(rewards) - np.mean(rewards)) / (np.std(rewards) + EPSILON)


def update(policy: Policy, batch: Batch) -> None:
    """Take one step up the gradient of GRPO's clipped objective."""
    gradient = np.zeros_like(policy.weights)
    for row, column in np.argwhere(batch.said):
        before = batch.tokens[row, :column].tolist()
        digit = batch.tokens[row, column] - DIGIT
        log_probs = policy.log_probs(before)
        ratio = np.exp(log_probs[digit] - batch.log_probs[row, column])
        advantage = batch.advantages[row, column]
        if ratio * advantage > np.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage:
            continue  # clipped: the objective is flat there
        slope = -np.exp(log_probs)
        slope[digit] += 1
        gradient[policy.state(before)] += ratio * advantage * slope
    policy.weights += LEARNING_RATE * gradient / max(len(batch.tokens), 1)


# --- the trainer ----------------------------------------------------------------------------


def prompts(chat_url: str) -> Iterator[RolloutInitRequest]:
    """The questions, over and over."""
    for number, (question, label) in enumerate(cycle(QUESTIONS.items())):
        yield RolloutInitRequest(
            rollout_id=f"{number}-{question}",
            initial_messages=[{"role": "user", "content": question}],
            chat_completions_url=chat_url,
            label=label,
        )


@define
class Step:
    """What is gathered for one update."""

    rows: list[tuple[TokenSequence, float]] = field(factory=list)
    rewards: list[float] = field(factory=list)
    groups: int = 0
    stale: int = 0
    missing: int = 0

    async def add(self, client: RolloutClient, group: RolloutGroup, version: int) -> None:
        """Fetch the trajectories of a group, and add those that can be learnt from."""
        done = [each.result for each in group.finished if each.succeeded]
        trajectories: dict[str, Trajectory] = {}

        async def fetch(rollout_id: str) -> None:
            try:
                trajectories[rollout_id] = await client.fetch_trajectory(rollout_id)
            except TrajectoryUnavailableError:
                self.missing += 1

        async with trio.open_nursery() as nursery:
            for each in done:
                nursery.start_soon(fetch, each.rollout_id)
        rewards = [each.sample.reward for each in done]
        for each, advantage in zip(done, advantages(rewards), strict=True):
            if each.rollout_id not in trajectories:
                continue
            for sequence in sequences_of(trajectories[each.rollout_id]):
                if version - sequence.oldest > MOST_STALE:
                    self.stale += 1
                elif advantage:
                    self.rows.append((sequence, advantage))
        self.rewards += rewards
        self.groups += 1


async def train(client: RolloutClient, chat_url: str, policy: Policy) -> list[float]:
    """Update the policy some times; returns the mean reward before each update."""
    version, step, means = 0, Step(), []
    await client.resume_policy(version=version)
    async with client.run_groups(
        prompts(chat_url), samples=SAMPLES, max_in_flight=SAMPLES * GROUPS_AT_A_TIME
    ) as groups:
        async for group in groups:
            await step.add(client, group, version)
            if step.groups < GROUPS_PER_UPDATE:
                continue
            batch = Batch.of(step.rows)
            await client.pause_policy()  # calls that come meanwhile wait
            update(policy, batch)
            version += 1
            await client.resume_policy(version=version)
            means.append(float(np.mean(step.rewards)))
            print(
                f"update {version:2}: mean reward {means[-1]:.2f}, "
                f"{len(batch.tokens):2} sequences, {step.stale} too old, {step.missing} missing"
            )
            step = Step()
            if version == UPDATES:
                break  # leaving the block cancels what is in flight
    return means


# --- all of it in one process ---------------------------------------------------------------


@asynccontextmanager
async def endpoint_of(policy: Policy) -> AsyncGenerator[str, None]:
    """Serve the policy on a free port; yields the URL."""
    config = Config()
    config.bind, config.accesslog, config.errorlog = ["127.0.0.1:0"], None, None
    async with trio.open_nursery() as nursery:
        stop = trio.Event()
        urls = await nursery.start(
            partial(
                hypercorn.trio.serve,
                create_endpoint(policy),
                config,
                shutdown_trigger=stop.wait,
            )
        )
        yield f"{urls[0]}/v1"
        stop.set()


@asynccontextmanager
async def rollout_server(folder: str) -> AsyncGenerator[str, None]:
    """Serve rollouts of the agent, whose files are kept in a folder; yields the URL."""
    slots = ConcurrencyConfig(max_concurrent=SAMPLES * GROUPS_AT_A_TIME)
    backend = LocalBackend(
        workflow=AskTwice,
        workflow_config=AgentWorkflowConfig(name="ask-twice", concurrency=slots),
        grader=RightDigits,
        artifact_root=folder,
    )
    gateway = ModelGateway(capture="tokens")
    app = create_rollout_server(backend=backend, gateway=gateway, configure_logging=False)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, app, bind="127.0.0.1:0", handle_signals=False))
        yield urls[0]
        app.request_shutdown()


async def main() -> list[float]:
    """Train a policy; returns the mean reward before each update."""
    policy = Policy()
    with tempfile.TemporaryDirectory() as folder:
        async with (
            endpoint_of(policy) as chat_url,
            rollout_server(folder) as url,
            RolloutClient(url=url) as client,
        ):
            return await train(client, chat_url, policy)


if __name__ == "__main__":
    trio.run(main)
