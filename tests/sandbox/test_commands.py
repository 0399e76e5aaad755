"""What a command in a sandbox is given, whom it runs as, and what it hands back."""

from __future__ import annotations

import os
import socket

import pytest
from sandbox_support import bash, says, until

from rollout.sandbox import NamespaceError, User

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="other users inside need root outside")


def test_the_environment_of_the_server_stays_out(sandbox, run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    async def main():
        async with sandbox() as box:
            names = {line.split("=")[0] for line in (await says(box, "env")).splitlines()}
            assert names - {"PWD", "SHLVL", "_"} == {
                "PATH", "HOME", "USER", "LOGNAME", "TERM", "LANG",
            }  # fmt: skip
            assert "secret" not in await says(box, "cat /proc/1/environ | tr '\\0' '\\n'")

    run(main)


def test_odd_variables_come_through_as_they_are(sandbox, run):
    odd = {
        "EMPTY": "",
        "with.dot": "1",
        "SPACE IN": "a b",
        "QUOTES": "'; touch /tmp/pwned; $(touch /tmp/pwned) `x` \"",
        "LINES": "a\nb\n",
        "UTF": "é\udcff",
        "-x": "--help",
        "LD_LIBRARY_PATH": "/nonexistent; touch /tmp/pwned",
    }

    async def main():
        async with sandbox() as box:
            said = await box.run(["env", "-0"], env=odd)
            seen = dict(entry.split("=", 1) for entry in said.stdout.split("\0") if entry)
            assert seen["UTF"] == "é\ufffd"
            assert {k: v for k, v in seen.items() if k in odd} == {**odd, "UTF": "é\ufffd"}
            assert await says(box, "ls /tmp") == ""

    run(main)


@pytest.mark.parametrize("env", [{"": "x"}, {"a=b": "x"}, {"a": "\0"}, {"a\0": "x"}])
def test_a_variable_that_cannot_be_is_refused(sandbox, run, env):
    async def main():
        async with sandbox() as box:
            with pytest.raises(NamespaceError, match="environment variable"):
                await bash(box, "true", env=env)

    run(main)


def test_a_command_that_cannot_be_started_says_so(sandbox, run):
    async def main():
        async with sandbox() as box:
            with pytest.raises(NamespaceError, match="cannot be started"):
                await bash(box, "x" * 1_000_000)
            with pytest.raises(NamespaceError, match="cannot be started"):
                await bash(box, "echo \0")
            assert await says(box, "echo ok") == "ok\n"

    run(main)


@needs_root
def test_a_command_can_run_as_another_user(sandbox, run):
    nobody = User(uid=65534, gid=65534, groups=(7, 65534), name="nobody", home="/tmp")

    async def main():
        async with sandbox() as box:
            said = await says(
                box, "id -u; id -g; id -G; echo $HOME; echo x > /dev/stdout", user=nobody
            )
            assert said == "65534\n65534\n65534 7\n/tmp\nx\n"
            assert (await bash(box, "touch /app/x", user=nobody)).return_code != 0
            capabilities = await says(box, "grep CapEff /proc/self/status", user=nobody)
            assert int(capabilities.split()[1], 16) == 0

    run(main)


def test_without_network_there_is_a_loopback_only(sandbox, run):
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            connect = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
            async with sandbox(network=False) as box:
                assert (await bash(box, connect)).return_code != 0
                interfaces = await says(box, "tail -n +3 /proc/net/dev | cut -d: -f1")
                assert "lo" in interfaces.split()
                assert "eth0" not in interfaces
                script = (
                    "import socket as s; a = s.create_server(('127.0.0.1', 0)); "
                    "s.create_connection(a.getsockname()); print('up')"
                )
                assert await says(box, f'python3 -c "{script}"') == "up\n"
            async with sandbox() as box:
                assert (await bash(box, connect)).return_code == 0

    run(main)


def test_output_that_is_no_text_is_decoded_with_replacement(sandbox, run):
    async def main():
        async with sandbox() as box:
            assert await says(box, r"printf 'a\xff\xc3\xa9b'") == "a\ufffdéb"

    run(main)


def test_the_middle_of_long_output_is_left_out(sandbox, run):
    async def main():
        async with sandbox(max_output_bytes=1000) as box:
            said = await says(box, "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo last")
            assert said.startswith("first\n")
            assert said.endswith("last\n")
            assert "bytes left out" in said
            assert len(said) < 1100
            exact = await says(box, "head -c 1000 /dev/zero | tr '\\0' x")
            assert exact == "x" * 1000

    run(main)


def test_a_background_process_outlives_its_command_and_its_output(sandbox, run):
    async def main():
        async with sandbox() as box:
            loop = "while :; do echo noise; echo x > /tmp/alive; sleep 0.01; done"
            assert "started" in await says(box, f"({loop}) & echo started")
            await says(box, "rm -f /tmp/alive")
            await until(box, "[ -e /tmp/alive ]")

    run(main)


def test_tmux_runs_on_between_commands(sandbox, run):
    async def main():
        async with sandbox() as box:
            if (await bash(box, "command -v tmux")).return_code != 0:
                pytest.skip("no tmux on this machine")
            await says(
                box, "tmux new-session -d -s s && tmux send-keys -t s 'touch /tmp/typed' Enter"
            )
            await until(box, "[ -e /tmp/typed ]")

    run(main)
