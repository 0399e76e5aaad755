"""Files in and out of a real sandbox."""

from __future__ import annotations

import asyncio
import os

import pytest
from sandbox_support import says

from rollout.sandbox import NamespaceError, TransferError, _sandbox

ODD = ["plain", "with space", "new\nline", "-rf", "$(touch x)", "*", "é", "back\\slash", "'\""]


@pytest.mark.parametrize("name", ODD)
def test_a_file_of_any_name_goes_in_and_out(sandbox, run, tmp_path, name):
    source = tmp_path / name
    source.write_bytes(b"\0\xff content")

    async def main():
        async with sandbox() as box:
            await box.upload_file(source, f"/app/new folder/{name}")
            assert (
                await says(box, "find /app -type f | wc -c")
            ) == f"{len(os.fsencode(name)) + 17}\n"
            await box.download_file(f"/app/new folder/{name}", tmp_path / "back")

    run(main)
    assert (tmp_path / "back").read_bytes() == b"\0\xff content"


def test_a_file_goes_into_an_existing_folder_under_its_name(sandbox, run, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "back").mkdir()

    async def main():
        async with sandbox() as box:
            await box.upload_file(tmp_path / "file", "/app")
            await box.upload_file(tmp_path / "file", "/")
            await box.download_file("/app/file", tmp_path / "back")
            await box.download_file("/file", tmp_path / "new/place")

    run(main)
    assert (tmp_path / "back/file").read_text() == "x"
    assert (tmp_path / "new/place").read_text() == "x"


def test_permissions_are_kept(sandbox, run, tmp_path):
    (tmp_path / "in").mkdir()
    script = tmp_path / "in/run.sh"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o750)

    async def main():
        async with sandbox() as box:
            await box.upload_file(script, "/app/run.sh")
            await box.upload_dir(tmp_path / "in", "/tests")
            assert await says(box, "/app/run.sh; /tests/run.sh") == "ran\nran\n"
            assert await says(box, "stat -c '%a %u' /app/run.sh /tests/run.sh") == "750 0\n750 0\n"
            await box.download_file("/app/run.sh", tmp_path / "out")
            await box.download_dir("/tests", tmp_path / "outs")

    run(main)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "outs/run.sh").stat().st_mode & 0o777 == 0o750


def test_a_running_program_can_be_replaced(sandbox, run, tmp_path):
    (tmp_path / "prog").write_text("new")

    async def main():
        async with sandbox() as box:
            await says(box, "cp /usr/bin/sleep /app/prog; /app/prog 1000 &")
            await box.upload_file(tmp_path / "prog", "/app/prog")
            assert await says(box, "cat /app/prog; ls -A /app") == "newprog\n"

    run(main)


def test_a_folder_goes_in_with_links_empty_folders_and_odd_names(sandbox, run, tmp_path):
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    for name in ODD:
        (source / name).write_text(name)
    (source / "link").symlink_to("plain")
    (source / "host").symlink_to("/etc/hostname")
    source.chmod(0o700)

    async def main():
        async with sandbox() as box:
            await box.upload_dir(source, "/app/deep/er")
            await box.upload_dir(source, "/tests")
            assert await says(box, "stat -c %a /tests") == "755\n"
            assert (
                await says(box, "cat /tests/link; readlink /tests/host") == "plain/etc/hostname\n"
            )
            # A link means what it means inside.
            assert await says(box, "cat /tests/host") == "sandbox\n"
            await box.download_dir("/app/deep/er", tmp_path / "back")

    run(main)
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*ODD, "empty", "link"}
    assert all((tmp_path / "back" / name).read_text() == name for name in ODD)


def test_names_can_be_left_out(sandbox, run, tmp_path):
    for name in ("Dockerfile", "kept", "sub/Dockerfile"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()

    async def main():
        async with sandbox() as box:
            await box.upload_dir(tmp_path / "in", "/app", exclude=["Dockerfile"])
            assert await says(box, "cd /app; find . -type f | sort") == "./kept\n./sub/Dockerfile\n"
            await box.download_dir("/app", tmp_path / "out", exclude=["sub"])

    run(main)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def test_links_inside_never_lead_to_files_of_the_host(sandbox, run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "file").write_text("uploaded")

    async def main():
        async with sandbox() as box:
            await says(
                box, f"ln -s {secret} /app/link; ln -s {tmp_path} /app/dir; ln -s / /app/root"
            )
            with pytest.raises(TransferError, match="no such file"):
                await box.download_file("/app/link", tmp_path / "stolen")
            with pytest.raises(TransferError, match="no such folder"):
                await box.download_dir("/app/dir", tmp_path / "stolen")
            await box.upload_file(tmp_path / "file", "/app/link")
            await box.upload_file(tmp_path / "file", "/app/root/app/through")
            assert await says(box, "cat /app/link /app/through") == "uploadeduploaded"
            await box.download_dir("/app", tmp_path / "out")

    run(main)
    assert secret.read_text() == "secret"
    assert not (tmp_path / "stolen").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["link", "through"]


def test_a_link_of_the_host_is_replaced_by_a_download(sandbox, run, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").symlink_to(tmp_path / "precious")

    async def main():
        async with sandbox() as box:
            await says(box, "echo new > /app/file")
            await box.download_file("/app/file", tmp_path / "out")

    run(main)
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "out").read_text() == "new\n"


def test_what_is_no_file_is_left_out_and_named(sandbox, run, tmp_path):
    async def main():
        async with sandbox() as box:
            await says(box, "mkfifo /app/pipe; echo x > /app/file; chmod 000 /app/file")
            (left_out,) = await box.download_dir("/app", tmp_path / "out")
            assert "pipe" in left_out
            with pytest.raises(TransferError, match="no such file"):
                await box.download_file("/app/pipe", tmp_path / "pipe")
            with pytest.raises(TransferError, match="is a folder"):
                await box.download_file("/app", tmp_path / "pipe")

    run(main)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_a_file_that_is_too_large_is_refused(sandbox, run, tmp_path, monkeypatch):
    monkeypatch.setattr(_sandbox, "MAX_BYTES", 100_000)

    async def main():
        async with sandbox() as box:
            await says(box, "head -c 200000 /dev/zero | tr '\\0' x > /app/real")
            with pytest.raises(TransferError):
                await box.download_dir("/app", tmp_path / "outs")
            await says(box, "rm /app/real; truncate -s 1T /app/sparse")
            with pytest.raises(TransferError, match="larger than 100000 bytes"):
                await box.download_file("/app/sparse", tmp_path / "out")

    run(main)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_a_large_hole_does_not_cost_the_others(sandbox, run, tmp_path):
    async def main():
        async with sandbox() as box:
            await says(box, "truncate -s 10T /app/huge; truncate -s 99M /app/hole; echo x > /app/y")
            (left_out,) = await box.download_dir("/app", tmp_path / "out")
            assert "huge" in left_out

    run(main)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["hole", "y"]
    assert (tmp_path / "out/hole").stat().st_size == 99 << 20
    assert (tmp_path / "out/hole").stat().st_blocks == 0


def test_what_does_not_exist_or_cannot_be_written_is_an_error(sandbox, run, tmp_path):
    (tmp_path / "file").touch()

    async def main():
        async with sandbox() as box:
            with pytest.raises(FileNotFoundError):
                await box.upload_file(tmp_path / "missing", "/app/x")
            with pytest.raises(FileNotFoundError):
                await box.upload_dir(tmp_path / "missing", "/app/x")
            with pytest.raises(TransferError, match="Read-only"):
                await box.upload_file(tmp_path / "file", "/usr/x")
            with pytest.raises(TransferError):
                await box.upload_dir(tmp_path, "/usr/x")
            with pytest.raises(TransferError, match="NUL"):
                await box.upload_file(tmp_path / "file", "/app/\0")
            with pytest.raises(TransferError, match="no such folder"):
                await box.download_dir("/missing", tmp_path / "out")
            await box.stop()
            with pytest.raises(NamespaceError):
                await box.upload_file(tmp_path / "file", "/app/x")

    run(main)
    assert not (tmp_path / "out").exists()


def test_a_pipe_in_the_place_of_a_file_does_not_block(sandbox, run, tmp_path):
    (tmp_path / "file").write_text("x")

    async def main():
        async with sandbox() as box:
            await says(box, "mkfifo /tests/test.sh")
            await box.upload_file(tmp_path / "file", "/tests/test.sh")
            assert await says(box, "cat /tests/test.sh") == "x"
            await says(box, "rm /tests/test.sh; mkfifo /tests/file")
            (tmp_path / "in").mkdir()
            (tmp_path / "in/file").write_text("y")
            await box.upload_dir(tmp_path / "in", "/tests")
            assert await says(box, "cat /tests/file") == "y"

    run(main)


@pytest.mark.parametrize("kind", ["upload_file", "upload_dir", "download_file", "download_dir"])
def test_a_transfer_cancelled_at_any_step_leaves_no_part(sandbox, run, tmp_path, kind):
    source = tmp_path / "source"
    source.mkdir()
    for index in range(3):
        (source / f"{index}").write_bytes(bytes(300_000))
    target = tmp_path / "target"

    def begin(box):
        match kind:
            case "upload_file":
                return box.upload_file(source / "0", "/app/up/0")
            case "upload_dir":
                return box.upload_dir(source, "/app/up")
            case "download_file":
                return box.download_file("/tests/0", target / "0")
            case _:
                return box.download_dir("/tests", target)

    async def main():
        async with sandbox() as box:
            await box.upload_dir(source, "/tests")
            for steps in (*range(8), 12, 20, 40, 80, 160):
                task = asyncio.create_task(begin(box))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled() or task.exception() is None
            assert box._commands == set()
            assert {path.name for path in box.folder.iterdir()} == {".running", "outer", "root"}
            await says(box, "mkdir -p /app/up")
            assert set((await says(box, "ls -A /app/up")).split()) <= {"0", "1", "2"}

    run(main)
    if target.exists():
        assert {path.name for path in target.iterdir()} <= {"0", "1", "2"}


# Looks for a command that moves files, and says what it can do with the file of the host.
SPY = r"""
import os, pathlib
while True:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if pathlib.Path(f"/proc/{pid}/comm").read_text() != "tar\n":
                continue
            open(f"/proc/{pid}/fd/1", "r+b")
        except PermissionError:
            print("refused")
        except (FileNotFoundError, ProcessLookupError):
            continue
        else:
            print("got it")
        raise SystemExit
"""


def test_nobody_inside_gets_at_the_files_of_the_host(sandbox, run, tmp_path):
    async def main():
        async with sandbox() as box:
            await says(box, "cd /app && touch $(seq 3000)")
            spy = asyncio.ensure_future(box.run(["python3", "-c", SPY]))
            while not spy.done():
                await box.download_dir("/app", tmp_path / "out")
            assert spy.result().stdout == "refused\n"

    run(main)


# Puts a pipe in the place of a file, and the file back, all the time.
FLIP = """
import os
os.mkfifo("/app/pipe")
open("/app/file", "w").write("x")
while True:
    for name in ("file", "pipe"):
        os.symlink(name, "/app/next")
        os.replace("/app/next", "/app/result")
        if name == "file" and not os.path.exists("/app/ready"):
            open("/app/ready", "w")
"""


def test_a_pipe_that_comes_in_between_holds_nothing_up(sandbox, run, tmp_path):
    async def main():
        async with sandbox() as box:
            flip = asyncio.ensure_future(box.run(["python3", "-c", FLIP]))
            await says(box, "until [ -f /app/ready ]; do sleep 0.01; done")
            said = set()
            for _ in range(40):
                (tmp_path / "out").unlink(missing_ok=True)
                try:
                    await box.download_file("/app/result", tmp_path / "out")
                except TransferError:
                    said.add("refused")
                else:
                    said.add((tmp_path / "out").read_text())
            flip.cancel()
            await asyncio.wait([flip])
        assert said <= {"refused", "x", ""}
        assert "refused" in said

    run(main)
