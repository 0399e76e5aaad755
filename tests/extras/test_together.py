"""Which extras go together is what the page says. A dry run of the resolver: it needs a network."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("uv", reason="the resolver is uv, which nox -s extras installs")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/frameworks.md").read_text("utf-8")
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
APART = [set(pair) for pair in re.findall(r"^\| `([\w-]+)` \| `([\w-]+)` \|", PAGE, re.MULTILINE)]


def resolve(extras: set[str]) -> subprocess.CompletedProcess[str]:
    wanted = [option for extra in sorted(extras) for option in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "pyproject.toml", *wanted]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_page_names_extras_that_there_are():
    assert APART
    assert all(pair < EXTRAS for pair in APART)


@pytest.mark.parametrize("pair", APART, ids=lambda pair: "-".join(sorted(pair)))
def test_a_pair_that_the_page_names_does_not_resolve(pair):
    assert "No solution found" in resolve(pair).stderr


@pytest.mark.parametrize("extra", sorted(set().union(*APART)))
def test_all_that_it_does_not_name_resolve_together(extra):
    """With each extra that has an exception; what resolves as a whole resolves in pairs."""
    apart = set().union(*(pair for pair in APART if extra in pair)) - {extra}
    done = resolve(EXTRAS - apart)
    assert done.returncode == 0, done.stderr
