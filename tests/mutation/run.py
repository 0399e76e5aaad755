"""Mutation testing of the core by mutmut: which one-line changes does no test notice?

``[tool.mutmut]`` in pyproject.toml says which modules are changed and which tests run.
equivalent.txt lists the changes that no test can notice; every other one is to be killed.
Results are kept in the folder mutants: a second run continues, and repeats what has changed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from mutmut.__main__ import collect_source_file_mutation_data, run
from mutmut.configuration import config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code

HERE = Path(__file__).parent
LEAST_SCORE = 0.95
KILLED = {"killed", "timeout", "segfault", "suspicious"}
FIRST_TESTS = 40


class QuickestFirst(PytestRunner):
    """Runs the quickest tests of a mutant first, as most mutants fail many tests."""

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        ordered = sorted(tests, key=lambda name: (state().duration_by_test[name], name))
        first, rest = ordered[:FIRST_TESTS], ordered[FIRST_TESTS:]
        code = super().run_tests(mutant_name=mutant_name, tests=first)
        return code or (super().run_tests(mutant_name=mutant_name, tests=rest) if rest else 0)


def described(mutant: str, path: Path) -> str:
    """A mutant's function and its changed lines, which stay the same when other code moves."""
    function = re.sub(r"\.x_?ǁ?", ".", mutant.partition("__mutmut_")[0]).replace("ǁ", ".")
    lines = get_diff_for_mutant(mutant, path=path).splitlines()[2:]
    before, after = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return f"{function}: {before} => {after}"


def equivalents() -> list[re.Pattern[str]]:
    """The lines of equivalent.txt without their reasons; ``…`` stands for anything."""
    lines = (HERE / "equivalent.txt").read_text("utf-8").splitlines()
    listed = [line.rpartition("  # ")[0] for line in lines if line and not line.startswith("#")]
    return [re.compile(re.escape(line).replace("…", ".*")) for line in listed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run, such as 'rollout.rules*'")
    parser.add_argument("--max-children", type=int, default=None)
    parser.add_argument("--simulation", action="store_true", help="run simulated workloads alone")
    options = parser.parse_args()
    if options.simulation:
        config().pytest_add_cli_args_test_selection = ["tests/mutation/by_simulation.py"]
    children = ["--max-children", str(options.max_children)] if options.max_children else []
    sys.modules["mutmut.workers.isolation"].PytestRunner = QuickestFirst
    run.main([*children, *options.names], standalone_mode=False)

    patterns = equivalents()
    killed, survivors, equivalent = 0, [], 0
    for data, mutant, _ in collect_source_file_mutation_data(mutant_names=options.names)[0]:
        status = status_by_exit_code[data.exit_code_by_key[mutant]]
        if status in KILLED:
            killed += 1
            continue
        line = described(mutant, data.path)
        if any(pattern.fullmatch(line) for pattern in patterns):
            equivalent += 1
        else:
            survivors.append(f"{status}: {mutant.rpartition('__mutmut_')[2]} {line}")
    click.echo("\n".join(sorted(survivors)))
    score = killed / max(killed + len(survivors), 1)
    click.echo(
        f"{killed} killed, {len(survivors)} survived, {equivalent} equivalent: "
        f"{score:.1%} killed of those that are not equivalent"
    )
    return int(score < LEAST_SCORE)


if __name__ == "__main__":
    sys.exit(main())
