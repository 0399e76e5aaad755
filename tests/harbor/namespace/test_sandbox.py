"""Real sandboxes: what is inside, what is not, and how they and their commands end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollout.backend.harbor._namespace import holder as holders
from rollout.backend.harbor._namespace import sandbox as sandboxes
from rollout.backend.harbor._namespace.errors import (
    CommandTimeoutError,
    NamespaceError,
    NamespaceStartError,
)
from rollout.backend.harbor._namespace.layout import check_bind
from rollout.backend.harbor._namespace.processes import MARK, pid_namespace
from rollout.backend.harbor._namespace.sandbox import Sandbox, User

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="other users inside need root outside")


def bash(box, command, **options):
    return box.run(["bash", "-c", command], **options)


async def says(box, command, **options):
    """What a command wrote, which must succeed."""
    result = await bash(box, command, **options)
    assert result.return_code == 0, result
    return result.stdout


async def until(box, condition):
    """Wait inside until a shell condition holds; a FIFO or a file tells, not the time."""
    await says(box, f"until {condition}; do sleep 0.01; done")


# Inside


def test_a_command_gives_its_output_and_its_status(sandbox, run):
    async def main():
        async with sandbox() as box:
            result = await bash(box, "echo out; echo err >&2; exit 3")
            assert (result.stdout, result.stderr, result.return_code) == ("out\n", "err\n", 3)
            assert (await bash(box, "kill -9 $$")).return_code == 137
            assert (await bash(box, "true", cwd="/no/such/folder")).return_code != 0
            assert await says(box, "pwd", cwd="/logs/agent") == "/logs/agent\n"
            assert await says(box, "cat") == ""

    run(main)


def test_the_processes_of_the_host_are_not_there(sandbox, run):
    async def main():
        async with sandbox() as box:
            assert await says(box, "cat /proc/1/comm") == "cat\n"
            seen = (await says(box, "ls /proc")).split()
            pids = [int(name) for name in seen if name.isdecimal()]
            assert 1 in pids
            assert len(pids) < 5
            assert (await bash(box, f"kill -0 {os.getpid()}")).return_code != 0

    run(main)


def test_the_files_of_the_host_are_not_there(sandbox, run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")

    async def main():
        async with sandbox() as box:
            assert (await bash(box, f"cat {secret}")).return_code != 0
            assert (await bash(box, "cat /etc/shadow")).return_code != 0
            assert await says(box, "ls -A /home /root /tmp | grep -v :") == "\n\n"
            assert (await bash(box, "ls /sys/kernel")).return_code != 0
            # The old root is gone, not only out of sight.
            assert str(box.folder) not in await says(box, "cat /proc/mounts")
            assert "/mnt" not in await says(box, "cut -d' ' -f2 /proc/mounts")

    run(main)


@pytest.mark.parametrize(
    "attempt",
    [
        "touch /usr/x",
        "touch /etc/x",
        "echo x >> /etc/passwd",
        "mount -o remount,rw /usr",
        "mount -t tmpfs none /mnt",
        "umount /usr",
        "mknod /tmp/disk b 254 0",
        "echo 1 > /proc/sys/kernel/panic",
        "echo h > /proc/sysrq-trigger",
        "unshare --mount true",
        "unshare --user true",
        "unshare --user --map-root-user --mount --cgroup mount -t cgroup2 none /mnt",
        "chroot / true",
        "nsenter --mount=/proc/1/ns/mnt true",
        "chroot /proc/1/root/../.. test -e /sys/kernel",
        "kill -9 1; sleep 0; ls /proc/1/exe && false",
        "cat /proc/kcore | grep -q .",
    ],
)
def test_root_inside_cannot(sandbox, run, attempt):
    async def main():
        async with sandbox() as box:
            assert (await bash(box, attempt)).return_code != 0
            assert await says(box, "echo still here") == "still here\n"

    run(main)


def test_devices_terminals_and_shared_memory_work(sandbox, run):
    async def main():
        async with sandbox() as box:
            await says(box, "echo x > /dev/null && head -c 4 /dev/urandom | wc -c | grep -q 4")
            await says(
                box, "echo x > /dev/shm/x && cat /dev/shm/x /dev/zero | head -c 9 >/dev/null"
            )
            script = (
                "import pty, os; m, s = pty.openpty(); os.write(s, b'hi'); print(os.read(m, 2))"
            )
            assert await says(box, f'python3 -c "{script}"') == "b'hi'\n"

    run(main)


def test_a_script_may_open_its_output_again(sandbox, run):
    async def main():
        async with sandbox() as box:
            result = await bash(
                box, "echo a; echo b > /dev/stdout; echo c > /dev/stderr; echo d >&2"
            )
            assert (result.stdout, result.stderr) == ("a\nb\n", "c\nd\n")

    run(main)


def test_names_of_hosts_and_users_are_known(sandbox, run):
    async def main():
        async with sandbox() as box:
            assert await says(box, "hostname") == "sandbox\n"
            assert (
                await says(box, "id -un; getent hosts sandbox | grep -c 127.0.0.1") == "root\n1\n"
            )

    run(main)


def test_orphans_do_not_stay_as_zombies(sandbox, run):
    async def main():
        async with sandbox() as box:
            await says(box, "for i in 1 2 3; do (setsid true &) ; done; sleep 0.1")
            assert "Z" not in await says(box, "cat /proc/[0-9]*/stat | cut -d' ' -f3")

    run(main)


def test_what_is_shown_is_read_only_unless_asked(sandbox, run, tmp_path):
    (tmp_path / "sub").mkdir()
    binds = [
        check_bind(tmp_path, "/shown"),
        check_bind(tmp_path / "sub", "/writable", writable=True),
    ]

    async def main():
        async with sandbox(binds=binds) as box:
            assert await says(box, "ls /shown") == "sub\n"
            assert (await bash(box, "touch /shown/x")).return_code != 0
            await says(box, "echo inside > /writable/file")

    run(main)
    assert (tmp_path / "sub/file").read_text() == "inside\n"


# Environment


def test_the_environment_of_the_server_stays_out(sandbox, run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    async def main():
        async with sandbox() as box:
            names = {line.split("=")[0] for line in (await says(box, "env")).splitlines()}
            assert names - {"PWD", "SHLVL", "_"} == {
                "PATH", "HOME", "USER", "LOGNAME", "TERM", "LANG", MARK,
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


# Users and network


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


# Output


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


# Ends of commands

TREE = """
    (setsid sh -c 'echo $$ > /tmp/a; exec sleep 1000' &)
    env -i PATH=$PATH setsid sh -c 'echo $$ > /tmp/b; exec sleep 1000' &
    (trap '' TERM INT HUP; echo x > /tmp/c; sleep 1000) &
    until [ -s /tmp/a ] && [ -s /tmp/b ] && [ -s /tmp/c ]; do sleep 0.01; done
    echo x > /tmp/ready
    sleep 1000
"""


def others(box_numbers):
    """Processes in a pid namespace that live, but for the first, as `stat` shows them."""
    number, first = box_numbers
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal() or pid_namespace(int(path.name)) != number:
            continue
        with contextlib.suppress(OSError):
            line = (path / "stat").read_text()
            if int(path.name) != first and line.rpartition(")")[2].split()[0] not in "ZX":
                found.append(line[:60])
    return found


def numbers(box):
    return box._holder.pid_namespace, box._holder.pid


def test_a_timeout_kills_all_that_the_command_started(sandbox, run):
    async def main():
        async with sandbox() as box:
            with pytest.raises(CommandTimeoutError, match="timed out after 1 seconds") as caught:
                await bash(box, TREE, timeout_sec=1)
            assert not isinstance(caught.value, TimeoutError)
            assert others(numbers(box)) == []
            assert await says(box, "echo ok") == "ok\n"

    run(main)


def test_a_timeout_spares_what_other_commands_started(sandbox, run):
    async def main():
        async with sandbox() as box:
            await says(box, "sleep 1000 & echo $! > /tmp/kept")
            with pytest.raises(CommandTimeoutError):
                await bash(box, "sleep 1000", timeout_sec=0.05)
            await says(box, "kill -0 $(cat /tmp/kept)")

    run(main)


def test_a_timeout_kills_a_process_that_keeps_forking(sandbox, run):
    async def main():
        async with sandbox() as box:
            with pytest.raises(CommandTimeoutError):
                await bash(box, "f() { sleep 0.001; f & }; f; f; sleep 1000", timeout_sec=0.3)
            assert others(numbers(box)) == []

    run(main)


def test_a_cancellation_kills_all_that_the_command_started(sandbox, run):
    async def main():
        async with sandbox() as box:
            task = asyncio.create_task(bash(box, TREE))
            await until(box, "[ -s /tmp/ready ]")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert others(numbers(box)) == []

    run(main)


def test_a_command_cancelled_at_any_step_leaves_nothing(sandbox, run):
    async def main():
        async with sandbox() as box:
            for steps in range(40):
                task = asyncio.create_task(bash(box, "sleep 1000"))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert others(numbers(box)) == []
            assert box._commands == set()
            assert await says(box, "echo ok") == "ok\n"

    run(main)


def test_stop_ends_commands_that_run(sandbox, run):
    async def main():
        async with sandbox() as box:
            task = asyncio.create_task(bash(box, "echo x > /tmp/ready; sleep 1000"))
            await until(box, "[ -s /tmp/ready ]")
            await box.stop()
            with pytest.raises(NamespaceError, match="ended while"):
                await task

    run(main)


def test_stop_while_commands_start(sandbox, run):
    async def main():
        async with sandbox() as box:
            tasks = [asyncio.create_task(bash(box, "sleep 1000")) for _ in range(8)]
            for _ in range(3):
                await asyncio.sleep(0)
            await box.stop()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} == {NamespaceError}

    run(main)


# Start and stop


def test_a_stopped_sandbox_runs_nothing_and_starts_no_more(sandbox, run):
    async def main():
        async with sandbox() as box:
            folder = box.folder
            assert "running" in repr(box)
            await asyncio.gather(box.stop(), box.stop())
            await box.stop()
            assert not folder.exists()
            assert "stopped" in repr(box)
            with pytest.raises(NamespaceError, match="does not run"):
                await bash(box, "true")
            with pytest.raises(NamespaceStartError, match="once"):
                await box.start()

    run(main)


def test_a_sandbox_that_was_never_started_can_be_stopped(run):
    async def main():
        box = Sandbox()
        await box.stop()
        assert box.folder is None
        with pytest.raises(NamespaceError):
            await bash(box, "true")

    run(main)


def test_stop_can_leave_the_folder(sandbox, run):
    async def main():
        async with sandbox() as box:
            await says(box, "echo kept > /app/file")
            await box.stop(remove=False)
            assert (box.root / "app/file").read_text() == "kept\n"

    run(main)


def test_stop_removes_whatever_was_made(sandbox, run):
    async def main():
        async with sandbox() as box:
            await says(
                box,
                "cd /app && mkdir -p closed/deep && touch closed/file"
                r" && chmod 000 closed/deep closed"
                r" && printf x > $'\xff\n*' && mkfifo pipe && ln -s / loop && touch -- -rf",
            )
            # Deeper than a path may be long.
            deep = "import os\nfor _ in range(2000): os.mkdir('d' * 10); os.chdir('d' * 10)"
            assert (await box.run(["python3", "-c", deep], cwd="/app")).return_code == 0

    run(main)


def test_stop_does_not_remove_what_links_lead_to(sandbox, run, tmp_path):
    (tmp_path / "host").write_text("host")

    async def main():
        async with sandbox(binds=[check_bind(tmp_path, "/shown", writable=True)]) as box:
            await says(box, f"ln -s {tmp_path} /app/link; ln -s /shown /app/other")

    run(main)
    assert (tmp_path / "host").read_text() == "host"


def test_a_start_cancelled_at_any_step_leaves_nothing(namespaces, nothing_left, run, tmp_path):
    async def main():
        cancelled = 0
        for steps in (*range(12), 20, 40, 80, 160, 320, 640):
            box = Sandbox(parent=tmp_path)
            task = asyncio.create_task(box.start())
            for _ in range(steps):
                await asyncio.sleep(0)
            cancelled += task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await box.stop()
            assert list(tmp_path.iterdir()) == []
            assert not box.is_running
        assert cancelled > 10

    run(main)


def test_stop_during_the_start_ends_it_without_cancelling_the_caller(namespaces, run, tmp_path):
    async def main():
        for steps in (1, 2, 3, 5, 10, 50):
            box = Sandbox(parent=tmp_path)
            task = asyncio.create_task(box.start())
            for _ in range(steps):
                await asyncio.sleep(0)
            await box.stop()
            with pytest.raises(NamespaceStartError, match="stopped while"):
                await task
            assert list(tmp_path.iterdir()) == []

    run(main)


def test_a_cancelled_stop_still_removes_everything(sandbox, run):
    async def main():
        async with sandbox() as box:
            folder = box.folder
            task = asyncio.create_task(box.stop())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not folder.exists()
            assert not box.is_running

    run(main)


def test_the_reason_of_a_failed_start_is_told(namespaces, run, monkeypatch, tmp_path):
    monkeypatch.setattr(sandboxes, "prepare_root", lambda *_: [holders_bind()])

    def holders_bind():
        from rollout.backend.harbor._namespace.layout import Bind

        return Bind(source="/no/such/folder", target="/app")

    async def main():
        with pytest.raises(NamespaceStartError, match="/no/such/folder"):
            await Sandbox(parent=tmp_path).start()
        assert list(tmp_path.iterdir()) == []

    run(main)


def test_what_unshare_says_and_what_to_enable_is_told(namespaces, run, monkeypatch, tmp_path):
    refused = tmp_path / "unshare"
    refused.write_text(
        "#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1"
    )
    refused.chmod(0o755)
    found = {**holders.find_tools(), "unshare": str(refused)}
    monkeypatch.setattr(sandboxes, "find_tools", lambda: found)

    async def main():
        with pytest.raises(NamespaceStartError, match="Operation not permitted") as caught:
            await Sandbox().start()
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(NamespaceStartError, match="max_user_namespaces"):
            await Sandbox().start()
        assert "CAP_SYS_ADMIN" in str(caught.value) or not ROOT

    run(main)


def test_missing_programs_are_named(run, monkeypatch):
    monkeypatch.setattr(holders, "PATH", "/nonexistent")

    async def main():
        with pytest.raises(NamespaceStartError, match=r"nsenter, .* Install util-linux"):
            await Sandbox().start()

    run(main)


def test_other_systems_are_refused(run, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")

    async def main():
        with pytest.raises(NamespaceStartError, match="Linux only"):
            await Sandbox().start()

    run(main)


def test_a_parent_that_does_not_exist_is_a_failed_start(run, tmp_path):
    async def main():
        with pytest.raises(NamespaceStartError, match="No such file"):
            await Sandbox(parent=tmp_path / "missing").start()

    run(main)


def test_the_end_of_the_first_process_is_noticed(sandbox, run):
    async def main():
        async with sandbox() as box:
            os.kill(box._holder.pid, 9)
            await box._holder.process.wait()
            with pytest.raises(NamespaceError, match="has ended"):
                await bash(box, "true")

    run(main)


DYING = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from rollout.backend.harbor._namespace.sandbox import Sandbox

    async def main():
        box = Sandbox(parent=Path(sys.argv[1]))
        await box.start()
        await box.run(["bash", "-c", "setsid sleep 1000 & exit"])
        print(box._holder.pid_namespace, box._holder.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
"""


def test_the_death_of_the_server_ends_its_sandboxes(namespaces, nothing_left, tmp_path):
    script = textwrap.dedent(DYING)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -9
    number, pid = map(int, done.stdout.split())
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        import select

        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(60_000)
        os.close(descriptor)
    assert others((number, pid)) == []


def test_many_sandboxes_at_a_time(sandbox, run):
    async def one(index):
        async with sandbox() as box:
            await says(box, f"echo {index} > /app/me")
            return await says(box, "cat /app/me; ls /app | wc -l")

    async def main():
        said = await asyncio.gather(*map(one, range(10)))
        assert said == [f"{index}\n1\n" for index in range(10)]

    run(main)
