"""What ``run.py --simulation`` runs in place of the tests: simulated workloads alone."""

from __future__ import annotations

import pytest

from rollout.simulation import simulate_workload


@pytest.mark.parametrize("faults", ["none", "mild", "harsh"])
@pytest.mark.parametrize("feed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_invariant_is_violated(seed, feed, faults):
    run = simulate_workload(seed, faults=faults, feed=feed)
    assert run.violations == [], run.violations[0]
