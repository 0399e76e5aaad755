"""The page on simulation is run, and its tables are those of the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import Phase

from rollout.backend import LocalBackend
from rollout.client import RolloutClient
from rollout.simulation import (
    LEVELS,
    Event,
    Fault,
    SimulatedWorld,
    Violation,
    simulate,
    simulate_workload,
)
from rollout.simulation.invariants import INVARIANTS
from rollout.simulation.run import _LONGEST_PAUSE_SEC
from rollout.workflow import AgentWorkflow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/simulate_harness.py"
PAGE = (ROOT / "docs/simulation.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

STARTED = "result.agent_started_at is not None"


def block(marker: str) -> str:
    (found,) = (code for code in BLOCKS if marker in code)
    return found


def defined_by(code: str, **names: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "documented", **names}
    exec(compile(code, "<documented>", "exec"), namespace)  # the project's own text
    return namespace


@pytest.fixture(scope="module")
def harness() -> dict[str, Any]:
    return defined_by(block("async def run_prompt"))


def mistaken(before: str, after: str) -> dict[str, Any]:
    """The example with a mistake in it."""
    code = EXAMPLE.read_text("utf-8")
    assert code.count(before) == 1
    return defined_by(code.replace(before, after))


def first_failure(harness: dict[str, Any], faults: str, seeds: int) -> str | None:
    """What the check says about the first seed that shows the mistake."""
    for seed in range(seeds):
        run = simulate(harness["scenario"], seed=seed, faults=faults)
        try:
            harness["check"](run)
        except AssertionError as error:
            return str(error)
    return None


# --- the example ------------------------------------------------------------------------------


def test_the_page_shows_the_example():
    assert block("async def run_prompt") == EXAMPLE.read_text("utf-8")


def test_the_simulation_takes_about_thirty_lines():
    code = EXAMPLE.read_text("utf-8")
    simulation = code[code.index("async def scenario") : code.index("if __name__")]
    lines = [line for line in simulation.splitlines() if line.strip()]
    assert len(lines) <= 30


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "50 seeds, and all of it held\n"


@pytest.mark.parametrize("faults", LEVELS)
def test_the_harness_holds_at_every_level(harness, faults):
    endings = set()
    for seed in range(20):
        run = simulate(harness["scenario"], seed=seed, faults=faults)
        harness["check"](run)
        endings |= {ending for _, ending in run.value}
    assert "success" in endings
    assert (endings <= {"success", "failure"}) == (faults == "none")


def test_attempts_are_repeated_at_all(harness):
    """Else the check would hold for nothing."""
    second = set()
    for seed in range(20):
        run = simulate(harness["scenario"], seed=seed, faults="harsh")
        second |= {e.rollout_id for e in run.trace.select("sent") if e.rollout_id.endswith("-1")}
    assert second


def test_a_harness_that_repeats_failures_of_agents_is_caught_at_once():
    assert "was run again" in first_failure(
        mistaken(STARTED, 'result.status == "success"'), "none", 1
    )


def test_a_harness_that_repeats_a_result_is_caught():
    assert "was run again" in first_failure(mistaken(STARTED, "attempt > 0"), "none", 1)


def test_a_harness_that_goes_on_for_longer_is_caught():
    one_more = mistaken("in range(ATTEMPTS):", "in range(4):")
    one_more["ATTEMPTS"] = 1
    assert "-1'" in first_failure(one_more, "harsh", 60)


def test_a_harness_that_forgets_a_prompt_is_caught():
    forgets = mistaken(
        "            endings.append((prompt, type(error)", "            print((prompt, type(error)"
    )
    assert first_failure(forgets, "harsh", 20) is not None


def test_what_the_server_did_cannot_be_promised():
    """As the page says: an agent may have run although the harness was not told."""
    strict = mistaken(
        '{event.rollout_id for event in answered if event.detail.get("started")}',
        '{event.rollout_id for event in run.trace.select("agent-started")}',
    )
    assert "was run again" in first_failure(strict, "harsh", 20)


# --- the other blocks -------------------------------------------------------------------------


def test_a_scripted_fault_meets_the_first_request(harness):
    plan = defined_by(block("lost_answer ="))["lost_answer"]
    run = simulate(harness["scenario"], seed=0, faults=plan)
    harness["check"](run)
    faults = [event.detail["fault"] for event in run.trace.select("sent")]
    assert faults[0] == Fault.LOST_AFTER
    assert set(faults[1:]) == {Fault.NONE}
    (lost,) = run.trace.select("failed")
    assert run.trace.select("server-answered", rollout_id=lost.rollout_id)


def drawn(marker: str, harness: dict[str, Any]) -> Any:
    """A test of the page with fewer examples, which are not shrunk."""
    written = "@settings(max_examples=50, deadline=None)"
    code = block(marker)
    assert code.count(written) == 1
    quick = "@settings(max_examples=10, deadline=None, phases=[Phase.generate])"
    names = {"Phase": Phase, "check": harness["check"], "scenario": harness["scenario"]}
    return defined_by(code.replace(written, quick), **names)[marker.removeprefix("def ")]


def test_the_harness_with_hypothesis(harness):
    drawn("def test_the_harness", harness)()


def test_the_harness_with_hypothesis_finds_a_mistake():
    wrong = mistaken(STARTED, 'result.status == "success"')
    with pytest.raises(AssertionError, match="was run again"):
        drawn("def test_the_harness", wrong)()


def test_the_invariants_with_hypothesis(harness):
    drawn("def test_the_invariants", harness)()


# --- what the page says -----------------------------------------------------------------------


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table with this heading, by their first cell."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_faults_of_the_page_are_those_of_the_levels():
    rows = table("Fault")
    assert rows.keys() == {str(fault) for fault in Fault if fault is not Fault.NONE}
    for name, (_, *shares) in rows.items():
        weights = [LEVELS[level].weights[Fault(name)] for level in ("mild", "harsh")]
        assert shares == [f"{weight * 100:g} %" for weight in weights]


def test_the_other_figures_of_the_levels():
    none, mild, harsh = (LEVELS[name] for name in ("none", "mild", "harsh"))
    assert list(LEVELS) == ["none", "mild", "harsh"]
    text = " ".join(PAGE.split())
    assert (
        f"are up to {none.latency_sec:g} s, {mild.latency_sec:g} s with mild faults and "
        f"{harsh.latency_sec:g} s with harsh ones"
    ) in text
    assert f"for up to {_LONGEST_PAUSE_SEC:g} s" in text
    assert (none.pauses, mild.pauses, harsh.pauses) == (0, 1, 3)
    assert "up to once in a run with mild faults and up to three times with harsh ones" in text
    assert f"in {mild.restarts * 100:g} % and {harsh.restarts * 100:g} % of the runs" in text


def test_the_invariants_of_the_page_are_those_of_the_code():
    assert table("Invariant").keys() == INVARIANTS.keys()


def test_the_members_of_the_world_exist(harness):
    async def scenario(world: SimulatedWorld) -> list[str]:
        names = [re.match(r"\w+", name)[0] for cell in members for name in cell]
        return [name for name in names if not hasattr(world, name)]

    members = [[part.strip("`") for part in cell.split("`, `")] for cell in table("Member")]
    assert len(members) == 6
    assert simulate(scenario, seed=0, faults="none").value == []


def test_whoever_records_is_on_the_page(harness):
    runs = [simulate(harness["scenario"], seed=seed, faults="harsh") for seed in range(5)]
    runs += [simulate_workload(seed, faults="harsh") for seed in range(5)]
    runs.append(simulate_workload(0, rollouts=3, workers=1))
    recorded = {(event.who, event.what) for run in runs for event in run.trace}
    rows = {name.strip("`"): cell for who, cell in table("Who").items() for name in who.split(", ")}
    assert rows.keys() == {who for who, _ in recorded}
    assert {what for who, what in recorded if who in {"client", "network"}} == {
        what for who in ("client", "network") for what in re.findall(r"`([a-z-]+)`", rows[who][0])
    }


def test_a_violation_prints_its_story():
    event = Event(12.5, "server", "admitted", "r1", {"process": 1})
    violation = Violation(invariant="slots", rollout_id="r1", message="too many", story=[event])
    text = str(violation)
    assert all(part in text for part in ("slots", "r1", "too many", "12.500", "admitted"))


def test_a_backend_and_a_client_of_ones_own():
    """As the page says of ``backend=``, ``url`` and ``transport``."""

    class Solve(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> Any:
            return [*ctx.prompt, {"role": "assistant", "content": "42"}]

    async def scenario(world: SimulatedWorld) -> str:
        async with (
            httpx.AsyncClient(transport=world.transport) as http,
            RolloutClient(url=world.url, http_client=http) as client,
        ):
            result = await client.run_rollout(
                [{"role": "user", "content": "6 * 7"}], "http://model.invalid/v1", "a", grade=False
            )
        return result.sample.messages[-1]["content"]

    run = simulate(
        scenario, seed=1, faults="none", backend=lambda trace: LocalBackend(workflow=Solve)
    )
    assert run.value == "42"
    assert run.violations == []
