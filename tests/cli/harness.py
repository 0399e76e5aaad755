"""Servers as processes of their own, and commands called in this one."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollout.cli import main

TESTS = Path(__file__).parents[1]
SERVER_KEY = "cli-test-server-key"

APPS = """
import time

import trio
from rollout import AgentWorkflow
from support import Script, local_backend, make_app


class Stubborn(AgentWorkflow):
    async def run(self, ctx):
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()


class Blocking(AgentWorkflow):
    async def run(self, ctx):
        print("blocking", flush=True)
        time.sleep(600)


app = make_app(local_backend(max_concurrent=1))
locked = make_app(api_key="cli-test-server-key")
blocking = make_app(local_backend(Blocking), watchdog_sec=None)
stubborn = make_app(local_backend(Stubborn))


def factory():
    return make_app()
"""


# Up to click 8.1 the two outputs are mixed unless one asks; later ones cannot be asked.
MIXES = "mix_stderr" in inspect.signature(CliRunner).parameters
RUNNER = CliRunner(mix_stderr=False) if MIXES else CliRunner()


class Cli:
    """Calls commands in this process, without a terminal."""

    def __call__(self, *args: str, stdin: str | bytes | None = None, **env: str) -> Result:
        result = RUNNER.invoke(main, args, input=stdin, env=env, prog_name="rollout")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def fails(self, code: int, *args: str, **options: str) -> str:
        """Call a command that must fail with *code*; return its only line on stderr."""
        result = self(*args, **options)
        assert result.exit_code == code, result.output
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("rollout: ")
        return lines[0]


def command_line(*args: str) -> list[str]:
    return [sys.executable, "-m", "rollout.cli", *args]


def environment(**more: str) -> dict[str, str]:
    """The environment of a command; its output is buffered, as it is for users."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "", **more}


@contextmanager
def serving(
    folder: Path, *args: str, command: Sequence[str] = (), **env: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``rollout serve`` in *folder*; yields the process and the URL that it announces."""
    with subprocess.Popen(
        [*(command or command_line("serve")), *args],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on http"):
                process.kill()
                pytest.fail(f"{line!r}, then: {process.communicate()}")
            yield process, line.split()[-1]
        finally:
            if process.poll() is None:
                process.kill()
