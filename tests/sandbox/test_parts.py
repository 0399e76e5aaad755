"""Parts that are tested without a sandbox: output, users, processes, work that is finished."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import subprocess

import pytest

from rollout.sandbox import NamespaceError, User, _process_tree, find_user
from rollout.sandbox._output import Output
from rollout.sandbox._process_tree import find_marked, new_mark, pid_namespace
from rollout.sandbox._subprocesses import finish

# Output


async def written(output, *chunks):
    for chunk in chunks:
        await asyncio.to_thread(os.write, output.writer, chunk)


def test_output_is_kept_up_to_its_limit(run):
    async def main():
        output = Output(10)
        await written(output, b"01234", b"56789")
        assert output.collect() == "0123456789"
        output.close()

    run(main)


@pytest.mark.parametrize("size", [11, 17, 25, 1000])
def test_the_beginning_and_the_end_of_more_are_kept(run, size):
    text = "".join(chr(ord("a") + index % 26) for index in range(size))

    async def main():
        output = Output(10)
        await written(output, *(text[index : index + 7].encode() for index in range(0, size, 7)))
        expected = f"{text[:5]}\n[... {size - 10} bytes left out ...]\n{text[-5:]}"
        assert output.collect() == expected
        output.close()

    run(main)


def test_later_output_is_dropped_and_stops_nobody(run):
    async def main():
        output = Output(10)
        await written(output, b"first")
        assert output.collect() == "first"
        await written(output, bytes(1_000_000))
        assert output.is_open
        output.close_writer()
        assert output.collect() == "first"
        assert not output.is_open
        output.close()

    run(main)


# Users

PASSWD = {
    name: pwd.struct_passwd((name, "x", uid, gid, "", home, "/bin/sh"))
    for name, uid, gid, home in [
        ("root", 0, 0, "/root"),
        ("alice", 1000, 1001, "/home/alice"),
        ("odd", 1002, 1002, "relative"),
    ]
}


@pytest.fixture
def users(monkeypatch):
    numbers = {entry.pw_uid: entry for entry in PASSWD.values()}
    monkeypatch.setattr(pwd, "getpwnam", PASSWD.__getitem__)
    monkeypatch.setattr(pwd, "getpwuid", numbers.__getitem__)
    monkeypatch.setattr(os, "getgrouplist", lambda _, gid: [gid, 10])


ALICE = User(uid=1000, gid=1001, groups=(10, 1001), name="alice", home="/home/alice")


@pytest.mark.parametrize(
    ("wanted", "user"),
    [
        (None, User()),
        ("root", User()),
        (0, User()),
        ("alice", ALICE),
        (1000, ALICE),
        ("1000", ALICE),
        ("odd", User(uid=1002, gid=1002, groups=(10, 1002), name="odd", home="/")),
        (77, User(uid=77, gid=77, groups=(), name="77", home="/tmp")),
    ],
)
def test_users_are_found_by_name_and_number(users, wanted, user):
    assert find_user(wanted) == user


@pytest.mark.parametrize("wanted", ["nosuch", "", "-1", -1, 2**32 - 1, "1:1", "٣"])
def test_other_users_are_refused(users, wanted):
    with pytest.raises(NamespaceError, match="no user"):
        find_user(wanted)


@pytest.mark.parametrize("wanted", ["nosuch", "-1", "1:1", "a\0"])
def test_other_users_are_refused_by_the_system_too(wanted):
    with pytest.raises(NamespaceError, match="no user"):
        find_user(wanted)


# Processes


def test_marked_processes_are_found_with_their_children():
    mark = new_mark()
    with subprocess.Popen(
        ["prlimit", f"--rttime={mark}", "--", "bash", "-c", "env -i prlimit --rttime=1 cat; true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        namespace = pid_namespace(os.getpid())
        found, _ = find_marked(namespace, mark, spare=0)
        assert len(found) == 2
        assert process.pid in found
        assert find_marked(namespace, mark, spare=process.pid)[0] == []
        assert find_marked(namespace + 1, mark, spare=0) == ([], True)
        process.stdin.close()
    assert find_marked(namespace, mark, spare=0)[0] == []


def test_a_process_that_another_one_left_behind_while_it_was_looked_for_is_found(monkeypatch):
    """The list of processes is taken, then its last one starts the next one and ends."""
    with subprocess.Popen(["true"]) as ended:
        pass
    namespace = pid_namespace(os.getpid())
    mark = new_mark()
    command = ["prlimit", f"--rttime={mark}", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        lists = iter([[ended.pid], [ended.pid, process.pid]])
        with monkeypatch.context() as patched:
            patched.setattr(_process_tree, "_pids", lambda: next(lists))
            assert find_marked(namespace, mark, spare=0) == ([process.pid], True)
        # Where that does not end, it is said.
        with monkeypatch.context() as patched:
            numbers = itertools.count(2**23)  # beyond all numbers of processes
            patched.setattr(_process_tree, "_pids", lambda: [next(numbers)])
            assert find_marked(namespace, mark, spare=0) == ([], False)
        process.stdin.close()


# Work that is finished


def test_work_is_finished_before_a_cancellation_is_raised(run):
    async def main():
        may_end = asyncio.Event()
        done = []

        async def work():
            await may_end.wait()
            done.append("work")
            return "value"

        async def abandon(value):
            done.append(value)

        task = asyncio.create_task(finish(work(), abandon=abandon))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["work", "value"]

    run(main)


def test_work_gives_its_result_or_its_error(run):
    async def main():
        async def value():
            return 1

        async def error():
            raise KeyError("x")

        assert await finish(value()) == 1
        with pytest.raises(KeyError):
            await finish(error())

    run(main)
