"""Sessions of the project's checks: ``nox -s tests``, ``nox -s lint``, ..."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.default_venv_backend = "venv"

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)
OFFICIAL = "osmosis-ai[harbor,server]==0.3.8"
HARBOR_VERSIONS = ["0.26.0", "0.24.0", "0.23.0", "0.20.0"]
FRAMEWORKS = {
    "openai-1": ([".", "openai==1.*"], ["tests/integrations/openai"]),
    "openai-2": ([".", "openai==2.*"], ["tests/integrations/openai"]),
    # It brings httpx2, which `chat` uses too.
    "openai-3": (
        [".", "openai==3.*"],
        [
            "tests/integrations/openai",
            "tests/integrations/test_chat.py",
            "tests/integrations/test_endpoint_failures.py",
            "tests/gateway",
        ],
    ),
    "openai-agents": ([".[openai-agents]"], ["tests/integrations/openai_agents"]),
    "strands": ([".[strands]"], ["tests/integrations/strands"]),
    "pydantic-ai": ([".[pydantic-ai]"], ["tests/integrations/pydantic_ai"]),
    "litellm": (
        [".[litellm]", "pyarrow>=17"],
        ["tests/gateway/test_litellm.py", "tests/evaluation/run/test_litellm.py"],
    ),
    "mcp": ([".[mcp]"], ["tests/examples", "-k", "mcp"]),
    "hub": ([".[hub]"], ["tests/evaluation/datasets/test_hub.py"]),
    "exports": ([".[parquet,inspect,mlflow,wandb]", "polars>=1"], ["tests/evaluation/export"]),
}
"""What each installs, and what pytest is told. Each has an environment of its own, since they want
different versions of the OpenAI SDK."""
INTEROP_FROM = (3, 12)
INTEROP_NAMES = ["python3.12", "python3.13", "python3.14", "python3"]


def _install(session: nox.Session, *groups: str) -> None:
    wanted = nox.project.dependency_groups(PYPROJECT, *groups) if groups else ()
    session.install(".", *wanted)


def _run_tests(session: nox.Session) -> None:
    """Run the test suite on this Python."""
    _install(session, "test")
    _pytest(session)


def _pytest(session: nox.Session) -> None:
    session.run(
        "pytest",
        "--numprocesses=auto",
        "--dist=worksteal",  # neighbours share what their module has started
        "--ignore=tests/cluster",
        "--ignore=tests/extras",
        "--ignore=tests/interop",
        "--ignore=tests/trajectory/harbor",
        "--ignore=tests/evaluation/report/browser",
        "--ignore=tests/server/browser",
        *session.posargs,
    )


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite; arguments go to pytest."""
    _run_tests(session)


for _version in PYTHONS:
    # Names of their own: `nox -s tests` is the Python that nox runs on, and nothing else.
    nox.session(python=_version, name=f"tests-{_version}", default=False)(_run_tests)


@nox.session(python=PYTHONS[0], name="tests-lowest", default=False)
def tests_lowest(session: nox.Session) -> None:
    """Run the test suite on the oldest Python, with the oldest of each dependency."""
    own = PYPROJECT["project"]["dependencies"]
    wanted = [*own, *nox.project.dependency_groups(PYPROJECT, "test")]
    session.install(".", *(each.replace(">=", "==") for each in wanted))
    _pytest(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, and that imports go down."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", "--no-logo")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the library, and of a file that uses its public face."""
    _install(session, "types", "test")
    session.run("mypy")
    session.run("pyright")


def _interop_python() -> str | None:
    """Find a Python that the official package and Harbor run on: this one, or one on the PATH.

    A name on the PATH may be a stub of a version manager for a Python that is not active, so
    each candidate has to say its version.
    """
    if sys.version_info >= INTEROP_FROM:
        return None
    question = f"import sys; print(sys.version_info[:2] >= {INTEROP_FROM})"
    for name in INTEROP_NAMES:
        for folder in os.get_exec_path():
            candidate = shutil.which(name, path=folder)
            if candidate is None:
                continue
            answer = subprocess.run(
                [candidate, "-c", question], capture_output=True, text=True, check=False
            )
            if answer.stdout.strip() == "True":
                return candidate
    return None


def _need_interop_python(session: nox.Session) -> None:
    if session.python is None and sys.version_info < INTEROP_FROM:
        session.error(
            f"this session needs Python 3.12 or newer, and there is none: nox runs on "
            f"{sys.version.split()[0]}, and none of {', '.join(INTEROP_NAMES)} on the PATH works"
        )


@nox.session(python=_interop_python())
def interop(session: nox.Session) -> None:
    """Run against the official package, both ways round (Python 3.12 or newer)."""
    _need_interop_python(session)
    _install(session, "test")
    session.install(OFFICIAL)
    session.run("pytest", "tests/interop", *session.posargs)


@nox.session(python=_interop_python())
@nox.parametrize("version", HARBOR_VERSIONS)
def harbor(session: nox.Session, version: str) -> None:
    """Run real Harbor trials, and Harbor's validator on trajectories (Python 3.12 or newer)."""
    _need_interop_python(session)
    wanted = nox.project.dependency_groups(PYPROJECT, "test")
    session.install(
        ".", *wanted, f"harbor=={version}", "opensandbox==1.1.1", "mini-swe-agent==2.4.6"
    )
    folders = ["tests/harbor"]
    if version != "0.20.0":  # whose documents are those of an older format
        folders.append("tests/trajectory/harbor")
    session.run("pytest", *folders, *session.posargs)


@nox.session
@nox.parametrize("framework", list(FRAMEWORKS))
def integrations(session: nox.Session, framework: str) -> None:
    """Run rollouts of a framework, or test what another optional package is for."""
    needs, arguments = FRAMEWORKS[framework]
    wanted = nox.project.dependency_groups(PYPROJECT, "test")
    # Their tests need neither, and frameworks want OpenTelemetry in versions of their own.
    spared = ("pyarrow", "opentelemetry")
    session.install(*needs, *(each for each in wanted if not each.startswith(spared)))
    session.run("pytest", *arguments, *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """Run workers on a Ray cluster of two nodes on this machine; arguments go to pytest."""
    wanted = nox.project.dependency_groups(PYPROJECT, "test")
    try:
        session.install(".[ray]", *wanted)
    except CommandFailed:
        session.skip("Ray cannot be installed here")
    session.run("pytest", "tests/cluster", *session.posargs)


@nox.session
def extras(session: nox.Session) -> None:
    """Ask the resolver which extras go together (needs the network); arguments go to pytest."""
    session.install("uv", *nox.project.dependency_groups(PYPROJECT, "test"))
    session.run("pytest", "tests/extras", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Open the HTML report and the page of a server in headless Chromium, if that is installed."""
    _install(session, "test")
    session.install("playwright>=1.50")
    folders = ["tests/evaluation/report/browser", "tests/server/browser"]
    session.run("pytest", *folders, *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz a server; the long form is `nox -s fuzz -- --inputs 100000 --examples 200`."""
    session.install(".", "schemathesis>=4.32,<5")
    session.run("python", "tests/fuzz/run.py", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """List changes of the core that no test notices; arguments are names, as rollout.rules*."""
    _install(session, "test")
    session.install("mutmut==3.8.1")
    session.run("python", "tests/mutation/run.py", *session.posargs)


@nox.session(python=_interop_python())
def bench(session: nox.Session) -> None:
    """Measure against the official package; arguments go to benchmarks/compare.py."""
    _need_interop_python(session)
    session.install(".", "matplotlib>=3.8")
    # Their own environment, so that neither package decides what the other one runs on.
    official = Path(session.create_tmp()).resolve() / "official"
    python = official / "bin" / "python"
    if not python.exists():
        session.run("python", "-m", "venv", str(official))
        session.run(str(python), "-m", "pip", "install", "-q", OFFICIAL, external=True)
    session.run(
        "python", "benchmarks/compare.py", "--official-python", str(python), *session.posargs
    )


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
