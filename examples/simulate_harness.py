"""Simulate a harness: rollouts that are tried again as long as no agent has run."""

from __future__ import annotations

import logging

import httpx
import trio

from rollout.client import RolloutClient, RolloutPollTimeoutError, RolloutProtocolError
from rollout.simulation import RolloutPlan, SimulatedWorld, Simulation, simulate
from rollout.types import RolloutResultResponse

ATTEMPTS = 4
PROMPTS = ("add", "divide", "multiply", "negate", "root", "round", "square", "subtract")
LOST = (httpx.TransportError, RolloutPollTimeoutError, RolloutProtocolError)


async def run_prompt(
    client: RolloutClient, prompt: str, agent_sec: float
) -> RolloutResultResponse | None:
    """Run a prompt: the harness that is tested. Each attempt has an id of its own."""
    for attempt in range(ATTEMPTS):
        name = f"{prompt}-{attempt}"
        plan = RolloutPlan(rollout_id=name, agent_sec=agent_sec, agent_timeout_sec=30)
        try:
            handle = await client.run_rollout_async(**plan.arguments())
        except LOST:
            continue  # not admitted; or it was, and ends with its lease, as nobody polls it
        result = await handle
        if result.agent_started_at is not None:
            return result
    return None


async def scenario(world: SimulatedWorld) -> list[tuple[str, str]]:
    """Run all prompts at once on a server with four slots; return how each of them ended."""
    endings: list[tuple[str, str]] = []

    async def run_one(client: RolloutClient, prompt: str) -> None:
        try:
            result = await run_prompt(client, prompt, world.generator.uniform(5, 25))
        except LOST as error:
            endings.append((prompt, type(error).__name__))
        else:
            endings.append((prompt, str(result.status) if result else "out of attempts"))

    async with world.client() as client, trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            nursery.start_soon(run_one, client, prompt)
    return endings


def check(run: Simulation[list[tuple[str, str]]]) -> None:
    """Say what has to hold for this harness, whatever goes wrong in its world."""
    assert run.violations == [], f"seed {run.seed}: {run.violations[0]}"
    assert sorted(prompt for prompt, _ in run.value) == sorted(PROMPTS)
    sent, answered = run.trace.select("sent"), run.trace.select("answered")
    tried = {event.rollout_id for event in sent if event.detail["route"] == "admit"}
    ran = {event.rollout_id for event in answered if event.detail.get("started")}
    for prompt in PROMPTS:
        attempts = sorted(name for name in tried if name.startswith(f"{prompt}-"))
        assert 1 <= len(attempts) <= ATTEMPTS, attempts
        assert not ran.intersection(attempts[:-1]), f"{prompt} was run again"


if __name__ == "__main__":
    logging.getLogger("rollout").setLevel(logging.ERROR)  # every retry is logged
    for seed in range(50):
        check(simulate(scenario, seed=seed, faults="harsh"))
    print("50 seeds, and all of it held")
