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
import contextlib
import multiprocessing
import os
import signal
import socket
import stat
import sys
import time
import warnings

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


class Forks(AgentWorkflow):
    # Ends children by a signal, and has one say what it has inherited.
    def run(self, ctx):
        warnings.simplefilter("ignore")  # later Pythons warn about forks beside threads
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join(30)
        with fork.Pool(2) as pool:
            pool.map(abs, range(2))
        found = {"ended": child.exitcode == -signal.SIGTERM, **seen_by_a_child()}
        stdin = os.read(0, 1).decode()
        return [{**found, "stdin": stdin, "internet at the start": AT_THE_START["internet"]}]


AT_THE_START = {}


@contextlib.asynccontextmanager
async def forks_too(app):
    AT_THE_START.update(seen_by_a_child())
    yield


def seen_by_a_child():
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    with receive, send:
        fork.Process(target=_look, args=(send,)).start()
        return receive.recv()


def _look(send):
    sockets = []
    for fd in range(3, 100):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    sockets.append(sock.family != socket.AF_UNIX)
        except OSError:
            pass
    send.send(
        {
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "wakes": signal.set_wakeup_fd(-1),
            "internet": any(sockets),
            "masked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }
    )


app = make_app(local_backend(max_concurrent=1))
forking = make_app(local_backend(Forks), lifespan=forks_too)
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
