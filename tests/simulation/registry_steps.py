"""Do steps to a real registry in one deterministic run, and compare what can be seen after each."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from functools import partial

import trio
from attrs import define, field
from simulation.registry_model import LEASE, OUTCOMES, WAIT
from trio.testing import wait_all_tasks_blocked

from rollout.backend.base import ExecutionBackend
from rollout.context import get_rollout_context
from rollout.errors import (
    AdmissionsClosedError,
    DuplicateRolloutError,
    InvalidLeaseError,
    RolloutCapacityError,
    UnknownRolloutError,
)
from rollout.rules import SeenState
from rollout.server.entry import Entry
from rollout.server.registry import RolloutRegistry
from rollout.types import (
    ExecutionOutcome,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutStatus,
)

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


class Steered(ExecutionBackend):
    """Executions that do what they are told through a channel."""

    def __init__(self, capacity, reports_start):
        self.capacity = capacity
        self.reports_agent_start = reports_start
        self.reserved = set()
        self.channels = {}
        self.modes = {}

    def reserve(self, rollout_id):
        assert rollout_id not in self.reserved
        if len(self.reserved) >= self.capacity:
            return False
        self.reserved.add(rollout_id)
        return True

    def release(self, rollout_id):
        self.reserved.remove(rollout_id)

    async def execute(self, request):
        mode = request.metadata["mode"]
        send, receive = trio.open_memory_channel(math.inf)
        self.channels[request.id] = send
        with trio.CancelScope(shield=mode == "stubborn"):
            async for at, command in receive:
                await trio.sleep_until(at)
                if command in OUTCOMES:
                    return self.outcome(command)
                self.report(command)
        return None

    def report(self, command):
        context = get_rollout_context()
        if command == "start":
            context.mark_agent_started()
        else:
            context.report_status(RolloutStatus(command))

    def outcome(self, command):
        if command == "nonsense":
            return 7
        if command in {"ValueError", "TimeoutError", "SystemExit"}:
            raise {"ValueError": ValueError, "TimeoutError": TimeoutError}.get(command, SystemExit)
        status = "running" if command == "unfinished" else command
        category = RolloutErrorCategory.AGENT_ERROR if command == "failure" else None
        return ExecutionOutcome(workflow=ExecutionResult(status=status, err_category=category))

    def cancel_rollouts(self, ids=None, prefix=None, all=False):
        answers = {"polite": "cancelled_running", "ending": "not_found"}
        return {each: answers[self.modes[each]] for each in ids if self.modes[each] in answers}

    def rollout_status(self, rollout_id):
        return {"status": "success"} if self.modes[rollout_id] == "ending" else None

    def finish_everything(self):
        for channel in self.channels.values():
            channel.close()


@define(eq=False)
class Real:
    """Does the steps to a registry, and tells what can be seen of it."""

    registry: RolloutRegistry
    backend: Steered
    nursery: trio.Nursery
    entries: dict = field(factory=dict)
    tokens: list = field(factory=list)
    polls: dict = field(factory=dict)
    answers: dict = field(factory=dict)
    events: dict = field(factory=dict)

    def observe(self, what, entry):
        self.events.setdefault(entry, []).append(what)
        if what == "admitted":
            self.entries[entry.rollout_id] = entry
        elif what == "forgotten":
            del self.entries[entry.rollout_id]

    def admit(self, rollout_id, mode):
        request = RolloutInitRequest(
            rollout_id=rollout_id,
            initial_messages=[],
            chat_completions_url="http://chat/v1",
            metadata={"mode": mode},
        )
        try:
            _, token = self.registry.admit(request)
        except AdmissionsClosedError:
            return "closed"
        except DuplicateRolloutError:
            return "duplicate"
        except RolloutCapacityError:
            return "full"
        self.backend.modes[rollout_id] = mode
        self.tokens.append(token)
        return "admitted"

    def admit_and_cancel(self, rollout_id, mode):
        outcome = self.admit(rollout_id, mode)
        return self.cancel({"ids": [rollout_id]}) if outcome == "admitted" else outcome

    def command(self, rollout_id, command, at=-math.inf):
        self.backend.channels[rollout_id].send_nowait((at, command))

    def poll(self, rollout_id, number, seen, at=-math.inf):
        token = "no token of this server" if number is None else self.tokens[number]
        scope = trio.CancelScope()
        key = len(self.polls)
        self.polls[key] = scope
        self.nursery.start_soon(self._poll, at, key, scope, rollout_id, token, seen)

    async def _poll(self, at, key, scope, rollout_id, token, seen):
        with scope:
            await trio.sleep_until(at)
            try:
                body = await self.registry.wait_for_result(
                    rollout_id,
                    token,
                    None if seen is None else SeenState(RolloutStatus(seen[0]), seen[1]),
                )
            except UnknownRolloutError:
                self.answers[key] = "unknown"
            except InvalidLeaseError:
                self.answers[key] = "invalid lease"
            else:
                content = json.loads(body)
                assert content["rollout_id"] == rollout_id
                started = content["agent_started_at"]
                self.answers[key] = (
                    content["status"],
                    content["err_category"],
                    None if started is None else seconds(datetime.fromisoformat(started)),
                )
        if scope.cancelled_caught:
            self.answers[key] = "disconnected"

    def disconnect(self, key):
        self.polls[key].cancel()

    def cancel(self, selector):
        return self.registry.cancel(**selector)

    def shut_down(self, how):
        if how == "abandon":
            return sorted(self.registry.abandon())
        return self.registry.stop_all(force=how == "force")

    def admit_while_closed(self, rollout_id):
        self.registry.accepting = False
        try:
            return self.admit(rollout_id, "obedient")
        finally:
            self.registry.accepting = True

    def wait(self):
        """Do nothing."""

    def sight(self):
        return {
            "executing": sorted(self.backend.reserved),
            "rollouts": {
                rollout_id: self.rollout(entry) for rollout_id, entry in self.entries.items()
            },
            "waiting": sorted(self.polls.keys() - self.answers.keys()),
            "answers": self.answers,
        }

    def rollout(self, entry: Entry):
        record = entry.record
        started = record.agent_started_at
        result = record.result
        return (
            str(record.status),
            None if result is None or result.err_category is None else str(result.err_category),
            None if started is None else seconds(started),
            record.lease.deadline if result is None else None,
        )


def seconds(moment):
    return (moment - EPOCH).total_seconds()


@define
class Step:
    """Something to do, and what must come of it.

    Unless it is done `at_once`, everything else that is due at its moment is done before.
    """

    wait: float
    at_once: bool
    what: str
    arguments: tuple
    outcomes: list
    sight: dict

    def __str__(self):
        arguments = ", ".join(map(repr, self.arguments))
        return f"{self.wait:g} s later{' (at once)' * self.at_once}: {self.what}({arguments})"


def difference(expected, seen):
    for name, value in expected.items():
        if name == "answers":
            wrong = value.keys() ^ seen[name].keys()
            wrong |= {
                key for key in value.keys() & seen[name].keys() if seen[name][key] not in value[key]
            }
            if wrong:
                key = min(wrong)
                return f"poll {key}: expected {value.get(key)}, got {seen[name].get(key)}"
        elif seen[name] != value:
            return f"{name}: expected {value}, got {seen[name]}"
    return None


async def execute(steps, model):
    """Do the steps; return what came out differently first, ``None`` if nothing did."""
    backend = Steered(model.capacity, model.reports_start)
    registry = RolloutRegistry(
        backend=backend,
        result_wait_timeout_sec=WAIT,
        polling_lease_timeout_sec=LEASE,
        result_retention_sec=model.retention,
    )
    async with registry.running(), trio.open_nursery() as nursery:
        real = Real(registry, backend, nursery)
        registry.hooks.observers.append(real.observe)
        registry.hooks.wall_clock = lambda: EPOCH + timedelta(seconds=trio.current_time())
        try:
            return await do(steps, real)
        finally:
            backend.finish_everything()
            nursery.cancel_scope.cancel()


async def do(steps, real):
    for count, step in enumerate(steps, start=1):
        act = partial(getattr(real, step.what), *step.arguments)
        if step.at_once and step.what in {"command", "poll"}:
            # Its own task has to wake at the moment, to be in time for whatever is due then.
            act = partial(lambda outcome: outcome, act(at=trio.current_time() + step.wait))
        await trio.sleep(step.wait)
        if not step.at_once:
            await wait_all_tasks_blocked()
        outcome = act()
        await wait_all_tasks_blocked()
        wrong = difference(step.sight, real.sight())
        if outcome not in step.outcomes:
            wrong = f"{step.what}: expected one of {step.outcomes}, got {outcome}"
        if real.registry.lifecycle.active_rollouts != len(step.sight["executing"]):
            wrong = f"{real.registry.lifecycle} while {step.sight['executing']} execute"
        if wrong:
            return "\n".join(["", *map(str, steps[:count]), f"{trio.current_time():g} s: {wrong}"])
    return out_of_order(real.events)


def out_of_order(events):
    """What the observer was told must make sense as a story, too."""
    for entry, told in events.items():
        once = ("admitted", "execution-started", "agent-started", "finished", "execution-ended")
        if any(told.count(what) > 1 for what in (*once, "forgotten")) or told[0] != "admitted":
            return f"{entry.rollout_id}: {told}"
        after = told[told.index("finished") :] if "finished" in told else []
        if {"status", "agent-started"} & set(after):
            return f"{entry.rollout_id} went on after its end: {told}"
        if "forgotten" in told and told[-1] not in {"forgotten", "execution-ended"}:
            return f"{entry.rollout_id} was heard of once it was forgotten: {told}"
    return None
