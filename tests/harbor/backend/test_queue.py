"""Trials that go through a caller's own queue of Harbor."""

from __future__ import annotations

import pytest
import trio

from rollout.errors import BackendConfigurationError

pytestmark = pytest.mark.harbor

# The first try of a trial leaves no reward.
TESTS = """\
#!/bin/bash
mkdir -p /logs/verifier
[ -e /state/tried ] && echo 1 > /logs/verifier/reward.txt
touch /state/tried
"""


async def test_its_hooks_and_retries(make_task, make_backend, serving, tmp_path):
    from harbor.models.job.config import RetryConfig
    from harbor.trial.hooks import TrialEvent
    from harbor.trial.queue import TrialQueue

    (tmp_path / "state").mkdir()
    make_task(tests=TESTS)
    seen = []

    async def hook(event):
        seen.append((event.event.name, event.config.trial_name))

    queue = TrialQueue(
        2,
        retry_config=RetryConfig(max_retries=1, min_wait_sec=0, exclude_exceptions=set()),
        hooks={TrialEvent.START: [hook], TrialEvent.END: [hook]},
    )
    mounts = [{"type": "bind", "source": str(tmp_path / "state"), "target": "/state"}]
    backend = make_backend(agent_config=None, orchestrator=queue, mounts=mounts)
    async with serving(backend) as rollouts:
        health = await rollouts.client.health()
        tried_again = await rollouts.run("first")
        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(rollouts.run, name)
    assert health["concurrency"]["max_concurrent"] == 2
    assert (tried_again.err_message, tried_again.sample.reward) == (None, 1.0)
    assert tried_again.agent_started_at is not None
    first = [(event, name) for event, name in seen if name.startswith("first-")]
    assert [event for event, _ in first] == ["START", "END", "START", "END"]
    assert len(seen) == 4 + 3 * 2


async def test_a_queue_is_one_of_harbor_and_of_one_backend(make_task, make_backend):
    from harbor.trial.queue import TrialQueue

    make_task()
    with pytest.raises(BackendConfigurationError, match="orchestrator must be a harbor"):
        make_backend(orchestrator=4)
    queue = TrialQueue(3)
    assert make_backend(max_concurrent=None, orchestrator=queue).max_concurrent == 3
    with pytest.raises(BackendConfigurationError, match="belongs to another HarborBackend"):
        make_backend(orchestrator=queue)
    assert make_backend(max_concurrent=2, orchestrator=TrialQueue(3)).max_concurrent == 2
