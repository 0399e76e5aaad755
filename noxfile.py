"""Sessions of the project's checks: ``nox -s tests``, ``nox -s lint``, ..."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.default_venv_backend = "venv"

PYPROJECT = nox.project.load_toml("pyproject.toml")
OFFICIAL = "osmosis-ai[server]==0.3.8"
INTEROP_PYTHONS = ["3.12", "3.13", "3.14"]


def _install(session: nox.Session, *groups: str) -> None:
    wanted = nox.project.dependency_groups(PYPROJECT, *groups) if groups else ()
    session.install(".", *wanted)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite; arguments go to pytest."""
    _install(session, "test")
    session.run("pytest", "--ignore=tests/interop", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the library, and of a file that uses its public face."""
    _install(session, "types", "test")
    session.run("mypy")
    session.run("pyright")


def _interop_python() -> str | None:
    """Find a Python that the official package runs on: this one, or one on the PATH."""
    if sys.version_info >= (3, 12):
        return None
    return next((v for v in INTEROP_PYTHONS if shutil.which(f"python{v}")), INTEROP_PYTHONS[0])


@nox.session(python=_interop_python())
def interop(session: nox.Session) -> None:
    """Run against the official package, both ways round (Python 3.12 or newer)."""
    _install(session, "test")
    session.install(OFFICIAL)
    session.run("pytest", "tests/interop", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo as a user would."""
    session.install(".")
    session.run("rollout", "demo", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into docs/_build/html; warnings are errors."""
    _install(session, "docs")
    session.run(
        "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", str(Path("docs/_build/html"))
    )
