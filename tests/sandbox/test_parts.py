"""Parts of a sandbox that need none: output, users, work that is finished, the face."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys

import pytest

from rollout.sandbox import processes
from rollout.sandbox.errors import NamespaceError
from rollout.sandbox.output import Output
from rollout.sandbox.processes import find_marked, new_mark, pid_namespace
from rollout.sandbox.sandbox import User
from rollout.sandbox.tasks import finish
from rollout.sandbox.users import find_user

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
        output.started()
        assert output.collect() == "first"
        assert not output.is_open
        output.close()

    run(main)


# Users

PASSWD = """root:x:0:0:root:/root:/bin/bash
alice:x:1000:1001:Alice:/home/alice:/bin/bash
odd:x:1002:1002::relative:/bin/sh
broken line
bad:x:x:y:::
"""
GROUP = "root:x:0:\nalice:x:1001:\nwheel:x:10:alice,odd\nbroken\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    (tmp_path / "etc/group").write_text(GROUP)
    return tmp_path


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
def test_users_are_found_by_name_and_number(root, wanted, user):
    assert find_user(root, wanted) == user


@pytest.mark.parametrize("wanted", ["nosuch", "", "bad", "-1", -1, 2**32 - 1, "1:1", "٣"])
def test_other_users_are_refused(root, wanted):
    with pytest.raises(NamespaceError, match="no user"):
        find_user(root, wanted)


def test_without_a_list_there_is_still_root_and_numbers(tmp_path):
    assert find_user(tmp_path, None) == User()
    assert find_user(tmp_path, 5).uid == 5


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
            patched.setattr(processes, "_pids", lambda: next(lists))
            assert find_marked(namespace, mark, spare=0) == ([process.pid], True)
        # Where that does not end, it is said.
        with monkeypatch.context() as patched:
            numbers = itertools.count(2**23)  # beyond all numbers of processes
            patched.setattr(processes, "_pids", lambda: [next(numbers)])
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


# The face


def test_the_face_can_be_imported_without_harbor(tmp_path):
    script = """
import sys
sys.modules["harbor"] = None
from rollout.backend.harbor import namespace
from rollout.errors import BackendConfigurationError
try:
    namespace.NamespaceEnvironment()
except BackendConfigurationError as error:
    print("Harbor" in str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
