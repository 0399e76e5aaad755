"""Real sandboxes: what is inside, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sandbox_support import bash, says

from rollout.sandbox import Bind


def test_a_command_gives_its_output_and_its_status(sandbox, run):
    async def main():
        async with sandbox() as box:
            result = await bash(box, "echo out; echo err >&2; exit 3")
            assert (result.stdout, result.stderr, result.return_code) == ("out\n", "err\n", 3)
            assert (await bash(box, "kill -9 $$")).return_code == 137
            assert (await bash(box, "true", cwd="/no/such/folder")).return_code != 0
            assert await says(box, "pwd", cwd="/var/log") == "/var/log\n"
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


NODES = [Path("/dev", name) for name in ("null", "zero", "full", "urandom", "random", "tty")]


@pytest.mark.parametrize(
    "attempt",
    [
        "chmod 640 /dev/zero",
        "chown 1 /dev/full",
        "touch -d 2001-01-01 /dev/urandom",
        "chmod 640 /proc/timer_list",
        "python3 -c 'import os; os.fchmod(0, 0o640)'",
        "chmod 640 /proc/version",
        "echo 0 > /proc/mtrr",
    ],
)
def test_root_inside_changes_nothing_of_the_host(sandbox, run, attempt):
    def found():
        nodes = [(path, path.stat()) for path in NODES if path.exists()]
        return [(path, node.st_mode, node.st_uid, node.st_mtime) for path, node in nodes]

    async def main():
        async with sandbox() as box:
            assert (await bash(box, attempt)).return_code != 0
            await says(box, "echo x > /dev/null; echo x >> /dev/zero; head -c 1 /dev/urandom")

    before = found()
    try:
        run(main)
        assert found() == before
    finally:
        if os.geteuid() == 0:
            for path, mode, uid, _ in before:
                path.chmod(mode & 0o7777)
                os.chown(path, uid, -1)


def test_no_program_of_the_host_gets_the_memory_of_a_process_that_crashes(sandbox, run):
    """As `core_pattern` may say; a size of one byte is what keeps the kernel from it."""

    async def main():
        async with sandbox() as box:
            script = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
            assert await says(box, f"python3 -c '{script}'") == "(1, 1)\n"
            crash = "import os; os.kill(os.getpid(), 11)"
            assert (await bash(box, f"cd /app; python3 -c '{crash}'")).return_code == 139
            assert await says(box, "ls -A /app") == ""

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
        Bind(tmp_path, "/shown"),
        Bind(tmp_path / "sub", "/writable", writable=True),
    ]

    async def main():
        async with sandbox(binds=binds) as box:
            assert await says(box, "ls /shown") == "sub\n"
            assert (await bash(box, "touch /shown/x")).return_code != 0
            await says(box, "echo inside > /writable/file")

    run(main)
    assert (tmp_path / "sub/file").read_text() == "inside\n"
