"""Every broken variant of the rules is found, by the check of the rule that it breaks."""

from __future__ import annotations

from collections import Counter

import pytest
import simulation.broken_admissions
import simulation.broken_answers
import simulation.broken_bulk
import simulation.broken_client
import simulation.broken_feed
import simulation.broken_phases
import simulation.broken_pool
import simulation.broken_rollouts
import simulation.broken_server
import simulation.broken_state  # noqa: F401 - they register their mutants
from simulation.mutants import MUTANTS, Mutant

from rollout.simulation.invariants import INVARIANTS

SEEDS = 40
LEAST_MUTANTS = 2


def find(mutant: Mutant, seeds: range):
    """The first violation of the mutant's invariant, or None."""
    with mutant.applied():
        for seed in seeds:
            for violation in mutant.run(seed).violations:
                if violation.invariant == mutant.invariant:
                    return seed, violation
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant):
    found = find(mutant, range(SEEDS))
    assert found is not None, f"survived {SEEDS} seeds: {mutant.line}"
    seed, violation = found
    assert violation.story, "a violation comes with its story"
    assert mutant.run(seed).violations == [], "the healthy product fails too"


def test_every_invariant_has_mutants():
    count = Counter(mutant.invariant for mutant in MUTANTS)
    assert count.keys() == INVARIANTS.keys()
    assert min(count.values()) >= LEAST_MUTANTS


def test_mutants_have_names_of_their_own_and_say_what_they_break():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.line.endswith(".") for mutant in MUTANTS)
