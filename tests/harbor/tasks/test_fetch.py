"""Tasks of git and of the registry, with Harbor's own client."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest

from rollout.backend.harbor.errors import TaskFetchError
from rollout.backend.harbor.plan import ResolvedTask
from rollout.backend.harbor.tasks import fetch as task_fetch
from rollout.backend.harbor.tasks.fetch import fetch_task
from rollout.backend.harbor.tasks.source import TaskSource
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.types import ExecutionRequest

pytestmark = pytest.mark.harbor


def resolve(value, **options):
    request = ExecutionRequest(
        id="r1", prompt=[{"role": "user", "content": "x"}], metadata={"harbor_task": value}
    )
    return TaskSource(allow_local_git=True, **options).resolve(request, Path("/nowhere"))


def in_git(repository, commit=None, path="tasks/add", **options):
    value = {"git_url": f"file://{repository}", "path": path}
    return resolve(value if commit is None else value | {"git_commit_id": commit}, **options)


def workspaces(tmp_path, count):
    found = [tmp_path / "work" / str(number) for number in range(count)]
    for each in found:
        each.mkdir(parents=True)
    return found


def fetch(task, workspace):
    return asyncio.run(fetch_task(task, workspace))


@pytest.fixture
def workspace(tmp_path):
    return workspaces(tmp_path, 1)[0]


@pytest.fixture
def clones(monkeypatch):
    """The git commands that were run."""
    found = []
    run = task_fetch._git

    async def recorded(args, cwd, given=None):
        found.append([str(arg) for arg in args])
        return await run(args, cwd, given)

    monkeypatch.setattr(task_fetch, "_git", recorded)
    return lambda: sum(args[1] == "clone" for args in found)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    yield
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "cache").rglob(".rollout-*")) == []


# --- git ------------------------------------------------------------------------------------------


def test_a_task_in_git(repository, workspace, git):
    head = git(repository, "rev-parse", "HEAD")
    for commit in (None, "main", head):
        place = workspace / str(commit)
        place.mkdir()
        task = fetch(in_git(repository, commit), place)
        assert task.folder == place / "task" / "add"
        assert task.source == {"path": task.folder}
        assert (task.instruction, task.own_tests, task.offline) == ("First.", True, True)
        script = task.folder / "tests" / "test.sh"
        assert stat.S_IMODE(script.stat().st_mode) & 0o111 == 0o111


def test_fifty_rollouts_clone_once(repository, tmp_path, clones):
    places = workspaces(tmp_path, 50)

    async def all_of_them():
        return await asyncio.gather(*(fetch_task(in_git(repository), each) for each in places))

    tasks = asyncio.run(all_of_them())
    assert clones() == 1
    assert {task.folder for task in tasks} == {each / "task" / "add" for each in places}
    assert {task.instruction for task in tasks} == {"First."}


def test_a_whole_commit_is_kept(repository, tmp_path, clones, git):
    head = git(repository, "rev-parse", "HEAD")
    first, second = workspaces(tmp_path, 2)
    task = fetch(in_git(repository, head), first)
    # What a rollout does to its task stays with it.
    (task.folder / "instruction.md").write_text("changed")
    assert fetch(in_git(repository, head), second).instruction == "First."
    assert clones() == 1


def test_a_branch_is_what_is_there_now(repository, tmp_path, clones, git):
    first, second = workspaces(tmp_path, 2)
    assert fetch(in_git(repository, "main"), first).instruction == "First."
    (repository / "tasks" / "add" / "instruction.md").write_text("Second.")
    git(repository, "commit", "-qam", "two")
    assert fetch(in_git(repository, "main"), second).instruction == "Second."
    assert clones() == 2


def test_links_out_are_refused(repository, workspace, git):
    (repository / "tasks" / "add" / "tests" / "x").symlink_to("../../../secret")
    (repository / "secret").write_text("secret")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "link")
    with pytest.raises(InvalidFieldError) as caught:
        fetch(in_git(repository), workspace)
    assert caught.value.field == "metadata.harbor_task"
    assert not list(workspace.rglob("secret"))


def test_absolute_links_are_refused(repository, workspace, git):
    (repository / "tasks" / "add" / "tests" / "x").symlink_to("/etc/hostname")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "link")
    with pytest.raises(InvalidFieldError, match="link"):
        fetch(in_git(repository), workspace)


@pytest.mark.parametrize("target", ["tasks", "/etc", "tasks/../tasks"])
def test_a_way_through_a_link_is_refused(repository, workspace, git, target):
    (repository / "alias").symlink_to(target)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "link")
    with pytest.raises(InvalidFieldError, match=r"not there|link"):
        fetch(in_git(repository, path="alias/add"), workspace)


@pytest.mark.parametrize("path", ["tasks/none", "tasks"])
def test_a_path_without_a_task(repository, workspace, path):
    with pytest.raises(InvalidFieldError, match=r"metadata\.harbor_task"):
        fetch(in_git(repository, path=path), workspace)


@pytest.mark.parametrize("commit", ["none", "0" * 40])
def test_a_commit_that_is_not_there(repository, workspace, commit):
    with pytest.raises(TaskFetchError, match="git fetch failed"):
        fetch(in_git(repository, commit), workspace)


def test_no_credentials_in_errors_and_logs(workspace, caplog, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    url = "https://robot:hunter2%21@127.0.0.1:9/x.git?token=t0ken"
    with pytest.raises(TaskFetchError) as caught:
        fetch(resolve({"git_url": url, "path": "a"}), workspace)
    error = caught.value
    assert "git clone failed" in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None
    assert not re.search("hunter2|t0ken|robot", str(error) + caplog.text)


def test_each_rollout_gets_an_error_of_its_own(tmp_path, repository):
    places = workspaces(tmp_path, 3)

    async def all_of_them():
        return await asyncio.gather(
            *(fetch_task(in_git(repository, "none"), each) for each in places),
            return_exceptions=True,
        )

    errors = asyncio.run(all_of_them())
    assert {type(error) for error in errors} == {TaskFetchError}
    assert len({id(error) for error in errors}) == 3


# --- cancellation ---------------------------------------------------------------------------------


@pytest.fixture
def slow_git(monkeypatch, tmp_path):
    """A git whose clones wait until a file is there; it says that it runs by another one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout
    script = folder / "git"
    script.write_text(
        "#!/bin/bash\n"
        f'if [ "$1" = clone ]; then echo $$ > "{tmp_path}/pid"; mkfifo "{tmp_path}/open"; '
        f'read -r _ < "{tmp_path}/open"; fi\n'
        f'exec {real.strip()} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


async def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_who_leaves_takes_nobody_along(repository, tmp_path, slow_git):
    first, second = workspaces(tmp_path, 2)

    async def scenario():
        tasks = [
            asyncio.create_task(fetch_task(in_git(repository), place)) for place in (first, second)
        ]
        await until((slow_git / "open").exists)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await asyncio.to_thread((slow_git / "open").write_text, "go\n")
        return await tasks[1]

    assert asyncio.run(scenario()).instruction == "First."


def test_the_last_one_ends_the_download(repository, tmp_path, slow_git):
    places = workspaces(tmp_path, 2)

    async def scenario():
        tasks = [asyncio.create_task(fetch_task(in_git(repository), each)) for each in places]
        await until((slow_git / "open").exists)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {asyncio.CancelledError}
        # Ended, and waited for: nothing of it runs any more.
        pid = int((slow_git / "pid").read_text())
        assert not Path(f"/proc/{pid}").exists()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_after_a_cancelled_download_comes_a_new_one(repository, tmp_path, slow_git):
    first, second = workspaces(tmp_path, 2)

    async def scenario():
        task = asyncio.create_task(fetch_task(in_git(repository), first))
        await until((slow_git / "open").exists)
        task.cancel()
        await asyncio.wait({task})
        (slow_git / "open").unlink()
        task = asyncio.create_task(fetch_task(in_git(repository), second))
        await until((slow_git / "open").exists)
        await asyncio.to_thread((slow_git / "open").write_text, "go\n")
        return await task

    assert asyncio.run(scenario()).instruction == "First."


# --- the registry, and this machine ---------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch, repository):
    """Stands in for the download of a package: the registry itself is not asked."""
    from harbor.tasks.client import TaskClient, TaskDownloadResult

    asked = []

    async def download(self, ids, overwrite=False, output_dir=None, **_):
        import shutil

        asked.extend(ids)
        (task_id,) = ids
        target = output_dir / task_id.org / task_id.name / "digest"
        shutil.copytree(repository / "tasks" / "add", target)
        return {task_id: TaskDownloadResult(path=target, download_time_sec=0.0, cached=False)}

    monkeypatch.setattr(TaskClient, "_download_package_tasks", download)
    return asked


def test_a_package(registry, tmp_path):
    digest = "sha256:" + "0a" * 32
    for ref in (None, "latest", digest, digest):
        place = tmp_path / "work" / f"{len(registry)}-{ref is digest}"
        place.mkdir(parents=True, exist_ok=True)
        name = "org/add" + (f"@{ref}" if ref else "")
        if not (place / "task").exists():
            task = fetch(resolve(name), place)
        assert task.folder == place / "task" / "add"
        assert task.instruction == "First."
    assert [each.ref for each in registry] == [None, "latest", digest]


def test_a_package_by_digest_is_kept(registry, tmp_path, caches):
    digest = "0b" * 32
    for place in workspaces(tmp_path, 3):
        assert fetch(resolve(f"org/add@sha256:{digest}"), place).instruction == "First."
    assert len(registry) == 1
    assert (caches / "packages" / "org" / "add" / digest / "task.toml").is_file()


def test_a_registry_that_fails(monkeypatch, workspace):
    from harbor.tasks.client import TaskClient

    async def download(self, ids, **_):
        raise ExceptionGroup("some", [ConnectionError("no route")])

    monkeypatch.setattr(TaskClient, "_download_package_tasks", download)
    with pytest.raises(
        TaskFetchError, match="org/add cannot be fetched: ConnectionError: no route"
    ):
        fetch(resolve("org/add"), workspace)


def test_tasks_of_this_machine_come_back_complete(repository, workspace):
    folder = repository / "tasks" / "add"
    task = fetch(ResolvedTask(name="add", source={"path": folder}), workspace)
    assert (task.folder, task.instruction, task.offline) == (folder, "First.", True)
    assert fetch(task, workspace) is task
    (folder / "task.toml").unlink()
    with pytest.raises(BackendConfigurationError, match=r"task add: it has no task\.toml"):
        fetch(ResolvedTask(name="add", source={"path": folder}), workspace)
