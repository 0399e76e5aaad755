"""What ``rollout serve`` says of the rollouts that come and end."""

from __future__ import annotations

import pytest
import trio
from support import CHAT_URL, in_process, local_backend, make_app, prompt

from rollout.cli.serve import Activity


async def said(scripts: list[dict], *, one_by_one: bool) -> list[str]:
    """Run rollouts with these scripts, all at once; return what is said until 10 s later."""
    lines: list[str] = []
    app = make_app(local_backend(max_concurrent=None))
    activity = Activity(app.registry, lines.append, every_sec=1, one_by_one=one_by_one)
    async with in_process(app) as client, trio.open_nursery() as nursery:
        nursery.start_soon(activity.run)
        for number, script in enumerate(scripts):
            await client.run_rollout_async(prompt(**script), CHAT_URL, f"r\n{number}", grade=False)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    return lines


async def test_a_few_rollouts_get_a_line_each(autojump_clock):
    assert await said([{"sleep": 2.5}, {"raise": "no"}], one_by_one=True) == [
        r"rollout r\n0: admitted",
        r"rollout r\n1: admitted",
        r"rollout r\n1: failure (agent_error, 0.0 s)",
        r"rollout r\n0: success (2.5 s)",
    ]


@pytest.mark.parametrize("one_by_one", [True, False])
async def test_many_rollouts_are_counted(autojump_clock, one_by_one):
    scripts = [*({"sleep": 2.5} for _ in range(7)), {"raise": "no"}]
    assert await said(scripts, one_by_one=one_by_one) == [
        "rollouts: 8 admitted, 1 ended (1 failure); 7 in flight",
        "rollouts: 0 admitted, 7 ended (7 success); 0 in flight",
    ]


async def test_one_that_still_runs_is_said_at_the_end(autojump_clock):
    lines = await said([{"sleep": 9.5}], one_by_one=False)
    assert lines == [
        "rollouts: 1 admitted, 0 ended; 1 in flight",
        "rollouts: 0 admitted, 1 ended (1 success); 0 in flight",
    ]
