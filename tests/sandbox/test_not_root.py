"""As another user than root, with a user namespace. Root becomes one for these tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollout.sandbox import _setup

pytestmark = pytest.mark.usefixtures("namespaces")

SCRIPT = """
    import asyncio, concurrent.futures.thread, ctypes, json, os, sys
    from pathlib import Path
    from rollout.sandbox import CommandTimeoutError, NamespaceError, Sandbox, User

    folder, sys.executable = Path(sys.argv[1]), sys.argv[2]
    # The interpreter may be where only root can read, so everything is loaded by now.
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        # A process that changes its user is hidden from that user until it runs a program.
        assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0

    async def main():
        said = {}
        box = Sandbox(parent=folder, network=False)
        await box.start()
        try:
            async def bash(command, **options):
                result = await box.run(["bash", "-c", command], **options)
                return result.stdout + result.stderr
            said["user"] = await bash("id -u; cat /proc/1/comm; hostname")
            said["refused"] = await bash(
                "touch /usr/x; mount -t tmpfs x /mnt; mount -o remount,rw /usr; cat /etc/shadow"
            )
            said["network"] = await bash("tail -n +3 /proc/net/dev | cut -d: -f1 | grep -c eth")
            said["most"] = await bash("ulimit -u; cat /proc/self/oom_score_adj")
            await bash("mkdir /app; cd /app; mkdir -p a/b; echo x > a/b/file; chmod 000 a/b a")
            await bash("setsid sleep 1000 &")
            (folder / "in").mkdir()
            (folder / "in/run.sh").write_text("echo ran")
            (folder / "in/run.sh").chmod(0o755)
            await box.upload_dir(folder / "in", "/tests")
            said["ran"] = await bash("bash /tests/run.sh; stat -c %a /tests/run.sh")
            await box.download_dir("/tests", folder / "out")
            said["out"] = (folder / "out/run.sh").read_text()
            try:
                await bash("setsid sleep 1000 & env -i sleep 1000 & sleep 1000", timeout_sec=0.3)
            except CommandTimeoutError:
                said["left"] = await bash("cat /proc/[0-9]*/comm | grep -c sleep")
            try:
                await bash("true", user=User(uid=1, gid=1, name="daemon"))
            except NamespaceError as error:
                said["other"] = str(error)
        finally:
            await box.stop()
        said["folders"] = sorted(path.name for path in folder.iterdir())
        print(json.dumps(said))

    asyncio.run(main())
"""


def reachable(file, bit):
    """Whether another user has this right to a file, and to the folders on the way."""
    path = Path(file).resolve()
    on_the_way = all(each.stat().st_mode & 0o001 for each in path.parents)
    return path.is_file() and on_the_way and bool(path.stat().st_mode & bit)


@pytest.fixture
def setup_python():
    if os.geteuid() != 0:
        return sys.executable
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if reachable(python, 0o001):
            return python
    pytest.skip("no Python here that another user than root can start")


@pytest.fixture
def open_folder():
    """A folder that anybody can reach, unlike those of pytest."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="rollout-not-root-", dir="/var/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_a_sandbox_without_root(setup_python, open_folder):
    import json

    if os.geteuid() == 0 and not reachable(_setup.__file__, 0o004):
        # Only its text is read later, by the interpreter that sets up the namespaces.
        pytest.skip("the package is where only root can read")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(open_folder), setup_python],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "user namespaces must be allowed" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["user"] == "0\ncat\nsandbox\n"
    assert said["refused"].count("Read-only file system") == 1
    assert said["refused"].count("permission denied") == 2
    assert "No such file" in said["refused"]
    assert said["network"] == "0\n"
    assert said["most"] == "4096\n500\n"
    assert said["ran"] == "ran\n755\n"
    assert said["out"] == "echo ran"
    assert said["left"] == "1\n"
    assert "only root inside" in said["other"]
    assert said["folders"] == ["in", "out"]
