"""A backend of one's own: each rollout runs in a process that can be killed.

Start it with::

    rollout serve examples/custom_backend.py:app

The process gets the rollout as one JSON object on stdin, and prints its sample as another one.
A remote queue would look the same: submit, tell when the agent starts, wait, cancel.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import trio
from attrs import define, field

from rollout import (
    ExecutionBackend,
    ExecutionOutcome,
    ExecutionRequest,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
    get_rollout_context,
)
from rollout.server import create_rollout_server

WORKER = """
import json, re, sys
task = json.load(sys.stdin)
left, right = map(int, re.findall("[0-9]+", task["prompt"][-1]["content"])[:2])
answer = {"role": "assistant", "content": str(left * right)}
print(json.dumps({"messages": [*task["prompt"], answer]}))
"""


@define
class Running:
    """One execution: its scope, and whether it has its place yet."""

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    started: bool = False


class ProcessBackend(ExecutionBackend):
    """Runs each rollout in a process of its own, some at a time, some more in the queue."""

    reports_agent_start: ClassVar[bool] = True

    def __init__(self, *, command: Sequence[str], max_concurrent: int, max_queued: int) -> None:
        self.command = list(command)
        self.places = max_concurrent + max_queued
        self.slots = trio.CapacityLimiter(max_concurrent)
        self.executions: dict[str, Running] = {}

    def has_capacity(self) -> bool:
        """Whether there is a place, running or waiting."""
        return len(self.executions) < self.places

    def reserve(self, rollout_id: str) -> bool:
        """Take a place from the admission on, so that the count is right before `execute`."""
        if not self.has_capacity():
            return False
        self.executions[rollout_id] = Running()
        return True

    def release(self, rollout_id: str) -> None:
        """Give the place back."""
        del self.executions[rollout_id]

    def cancel_rollouts(
        self, ids: Sequence[str] | None = None, prefix: str | None = None, all: bool = False
    ) -> dict[str, str]:
        """Stop the executions that are meant; `execute` then returns by itself."""
        if all or prefix is not None:
            ids = [each for each in self.executions if each.startswith(prefix or "")]
        dispositions = {}
        for rollout_id in ids or ():
            if (execution := self.executions.get(rollout_id)) is None:
                dispositions[rollout_id] = "not_found"
                continue
            execution.scope.cancel()
            state = "running" if execution.started else "queued"
            dispositions[rollout_id] = f"cancelled_{state}"
        return dispositions

    def health(self) -> dict[str, Any]:
        """Return the counts."""
        running = sum(each.started for each in self.executions.values())
        return {"status": "ok", "running": running, "queued": len(self.executions) - running}

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        """Wait for a slot, run the process, read the sample."""
        execution = self.executions[request.id]
        deadline = trio.current_time() + (
            float("inf") if request.agent_timeout_sec is None else request.agent_timeout_sec
        )
        with execution.scope, trio.CancelScope(deadline=deadline) as in_time:
            async with self.slots:
                execution.started = True
                if (rollout := get_rollout_context()) is not None:
                    rollout.mark_agent_started()
                    await rollout.wait_start_kept()  # the agent may not start before
                return await self._run(request)
        if in_time.cancelled_caught:
            return failure("the process took too long", RolloutErrorCategory.TIMEOUT)
        return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.CANCELLED))

    async def _run(self, request: ExecutionRequest) -> ExecutionOutcome:
        # Cancelling run_process ends the process: SIGTERM, and SIGKILL five seconds later.
        done = await trio.run_process(
            self.command,
            stdin=json.dumps(attrs.asdict(request)).encode(),
            capture_stdout=True,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            return failure(f"exit code {done.returncode}", RolloutErrorCategory.AGENT_ERROR)
        sample = RolloutSample(**json.loads(done.stdout), label=request.label)
        result = ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample)
        if not request.grade:
            return ExecutionOutcome(workflow=result)
        sample.reward = 1.0 if sample.messages[-1]["content"] == request.label else 0.0
        return ExecutionOutcome(workflow=result, grader=result)


def failure(message: str, category: RolloutErrorCategory) -> ExecutionOutcome:
    """Return the outcome of a rollout that has failed."""
    return ExecutionOutcome(
        workflow=ExecutionResult(
            status=RolloutStatus.FAILURE, err_message=message, err_category=category
        )
    )


app = create_rollout_server(
    backend=ProcessBackend(command=[sys.executable, "-c", WORKER], max_concurrent=2, max_queued=100)
)
