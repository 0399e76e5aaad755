"""How sandboxes start and end, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest
from sandbox_support import bash, others, says

from rollout.sandbox import (
    Bind,
    NamespaceError,
    NamespaceStartError,
    Sandbox,
    _init_process,
    _sandbox,
    _subprocesses,
    remove_abandoned,
)

ROOT = os.geteuid() == 0


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
            assert (box.folder / "root/app/file").read_text() == "kept\n"

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
        async with sandbox(binds=[Bind(tmp_path, "/shown", writable=True)]) as box:
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
    monkeypatch.setattr(_sandbox, "prepare_root", lambda *_: [("/no/such/folder", "/app", False)])

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
    monkeypatch.setattr(_init_process, "PATH", f"{tmp_path}:{_subprocesses.PATH}")

    async def main():
        with pytest.raises(NamespaceStartError, match="Operation not permitted") as caught:
            await Sandbox().start()
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(NamespaceStartError, match="max_user_namespaces"):
            await Sandbox().start()
        assert "CAP_SYS_ADMIN" in str(caught.value) or not ROOT

    run(main)


def test_missing_programs_are_named(run, monkeypatch):
    monkeypatch.setattr(_subprocesses, "PATH", "/nonexistent")

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
            os.kill(box._init.pid, 9)
            await box._init.unshare.wait()
            with pytest.raises(NamespaceError, match="has ended"):
                await bash(box, "true")

    run(main)


DYING = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from rollout.sandbox import Sandbox

    async def main():
        box = Sandbox(parent=Path(sys.argv[1]))
        await box.start()
        await box.run(["bash", "-c", "setsid sleep 1000 & exit"])
        print(box._init.pid_namespace, box._init.pid, flush=True)
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
    (left,) = tmp_path.iterdir()
    assert remove_abandoned(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == []


def test_folders_of_running_sandboxes_are_not_abandoned(namespaces, run, tmp_path):
    async def main():
        async with Sandbox(parent=tmp_path) as box:
            assert remove_abandoned(tmp_path) == []
            assert await says(box, "echo ok") == "ok\n"

    run(main)


def test_many_sandboxes_at_a_time(sandbox, run):
    async def one(index):
        async with sandbox() as box:
            await says(box, f"echo {index} > /app/me")
            return await says(box, "cat /app/me; ls /app | wc -l")

    async def main():
        said = await asyncio.gather(*map(one, range(10)))
        assert said == [f"{index}\n1\n" for index in range(10)]

    run(main)
