"""The program that becomes the first process of a sandbox.

`unshare` runs this file with a bare interpreter in fresh namespaces. It turns the prepared folder
into the root, reports ``ready``, and becomes ``cat`` on its standard input: the first process ends
when the other side of that pipe closes, and the kernel then kills everything else inside. A server
that dies, however it dies, therefore takes its sandboxes along.

The report goes to standard output, in two lines: its pid (as the host counts), ``ready``. What
fails is named on standard error. Only the standard library, no import of the package.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

__all__ = ["main"]

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2

SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NODEV = 1, 4

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PROC_HIDDEN = ("kcore", "keys", "timer_list", "latency_stats", "sched_debug", "kmsg")

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise the error of the last call into the C library, with its subject."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount, see ``mount(2)``."""
    check(
        libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
        f"mount {kind or 'bind'} {source} at {target}",
    )


def set_attributes(target: str, attributes: int) -> None:
    """Set attributes of a mount and of all mounts below it, keeping those that are set."""
    arguments = struct.pack("QQQQ", attributes, 0, 0, 0)
    check(
        libc.syscall(
            ctypes.c_long(SYS_MOUNT_SETATTR),
            ctypes.c_int(AT_FDCWD),
            os.fsencode(target),
            ctypes.c_uint(AT_RECURSIVE),
            arguments,
            ctypes.c_size_t(len(arguments)),
        ),
        f"mount_setattr {target} (Linux 5.12 or newer is needed)",
    )


def bind(source: str, target: str, *, writable: bool) -> None:
    """Show a folder or file of the host, with what is mounted below it."""
    mount(source, target, None, MS_BIND | MS_REC)
    set_attributes(target, ATTR_NODEV | (0 if writable else ATTR_RDONLY))


def mount_devices(root: str, shared: int) -> None:
    """Fill ``/dev``: harmless devices of the host, terminals and shared memory of its own."""
    dev = f"{root}/dev"
    mount("tmpfs", dev, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=1m")
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}"):  # noqa: PTH110 - a bare interpreter starts faster
            os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            mount(f"/dev/{name}", f"{dev}/{name}", None, MS_BIND)
            # Writing still works; what would change the host's node does not.
            set_attributes(f"{dev}/{name}", ATTR_RDONLY)
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}", 0o755)  # noqa: PTH102
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666")
    # It is the host's memory, and nobody's process is charged with it.
    mount("tmpfs", f"{dev}/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={shared}")
    links = {
        "ptmx": "pts/ptmx",
        "fd": "/proc/self/fd",
        "stdin": "/proc/self/fd/0",
        "stdout": "/proc/self/fd/1",
        "stderr": "/proc/self/fd/2",
    }
    for name, target in links.items():
        os.symlink(target, f"{dev}/{name}")  # noqa: PTH211


def mount_processes(root: str, shared: int) -> None:
    """Mount ``/proc`` for the processes inside, read-only: its switches are the whole machine's."""
    proc = f"{root}/proc"
    mount("proc", proc, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    limit_shared_memory(f"{proc}/sys/kernel", shared)
    for name in PROC_HIDDEN:
        path = f"{proc}/{name}"
        if os.path.exists(path):  # noqa: PTH110
            mount("/dev/null", path, None, MS_BIND)
    # All of it: most files there are the whole machine's, the permissions of each included.
    set_attributes(proc, ATTR_RDONLY)


def limit_shared_memory(switches: str, shared: int) -> None:
    """Limit System V shared memory, which belongs to this namespace."""
    try:
        with open(f"{switches}/shmall", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(str(shared // os.sysconf("SC_PAGE_SIZE")))
    except PermissionError:
        # Before Linux 6.7 only the host's root may; the file is then the host's own.
        return


def raise_loopback() -> None:
    """Bring up the only interface of a network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def change_root(root: str, outer: str) -> None:
    """Make a folder the root and unmount the old one.

    The root of the mount namespace becomes an empty folder around it. A process whose root is
    another one than its mount namespace's cannot make a user namespace, in which it would have
    all capabilities and could mount what is the whole machine's, such as control groups.
    """
    mount("tmpfs", outer, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=64k")
    os.mkdir(f"{outer}/root")  # noqa: PTH102
    mount(root, f"{outer}/root", None, MS_MOVE)
    os.chdir(outer)
    check(libc.pivot_root(b".", b"."), f"pivot_root {outer}")
    check(libc.umount2(b".", MNT_DETACH), "unmount of the old root")
    os.chroot("/root")
    os.chdir("/")


def main(plan: dict[str, Any]) -> None:
    """Set up the namespaces as planned, report it, and become the process that waits.

    Args:
        plan: ``root``, ``outer`` (an empty folder), ``mounts`` (source, target, writable),
            ``hostname``, ``loopback``, ``shared`` (bytes of shared memory).
    """
    # The host's /proc is still mounted, and counts as the host does.
    print(os.readlink("/proc/self"), flush=True)  # noqa: PTH115, T201
    root = plan["root"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount(root, root, None, MS_BIND)
    set_attributes(root, ATTR_NODEV)
    for source, target, writable in plan["mounts"]:
        bind(source, root + target, writable=writable)
    mount_devices(root, plan["shared"])
    socket.sethostname(plan["hostname"])
    if plan["loopback"]:
        raise_loopback()
    # In a user namespace /proc may be mounted only while the host's is still in sight.
    mount_processes(root, plan["shared"])
    change_root(root, plan["outer"])
    print("ready", flush=True)  # noqa: T201
    # Orphans inside become children of this process, which has to reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    quiet = os.open("/dev/null", os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    # Not `execvp`, which imports a module that is out of reach by now.
    os.execv("/bin/cat", ["cat"])  # noqa: S606


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        print(error.strerror or error, file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(1)
