"""NamespaceEnvironment as Harbor sees it, and whole trials in it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tomllib
import uuid
from pathlib import Path

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
pytest.importorskip("harbor.environments.base", reason="Harbor is not installed")

from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import EnvironmentConfig as TaskEnvironmentConfig
from harbor.models.task.config import NetworkPolicy
from harbor.models.task.config import TaskConfig as TaskSettings
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.trial.trial import Trial

from rollout.backend.harbor.namespace import (
    CommandTimeoutError,
    NamespaceError,
    TransferError,
)

# Harbor's own dependencies warn; what this project does is looked at in its other tests.
pytestmark = [
    pytest.mark.harbor,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("namespaces"),
]

IMPORT_PATH = "rollout.backend.harbor.namespace:NamespaceEnvironment"
ROOT = os.geteuid() == 0

TASK = {
    "task.toml": """
        version = "1.0"
        [agent]
        timeout_sec = 60.0
        [verifier]
        timeout_sec = 60.0
        [environment]
        build_timeout_sec = 60.0
        cpus = 1
        memory_mb = 512
    """,
    "instruction.md": "Double the number in /app/number.txt into /app/answer.txt.\n",
    "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY number.txt .\n",
    "environment/number.txt": "21\n",
    "solution/solve.sh": "#!/bin/bash\necho $((2 * $(cat number.txt))) > answer.txt\n",
    "tests/test.sh": """#!/bin/bash
[ "$(cat /app/answer.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt \\
    || echo 0 > /logs/verifier/reward.txt
""",
}


def write_task(folder, **changes):
    files = {**TASK, **changes}
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def make(tmp_path):
    """Makes an environment by Harbor's factory, not started."""

    def make(kwargs=None, files=None, trial_env=None, **settings):
        options = {
            key: settings.pop(key) for key in ("mounts", "network_policy") if key in settings
        }
        folder = tmp_path / uuid.uuid4().hex / "environment"
        folder.mkdir(parents=True)
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        paths = TrialPaths(trial_dir=tmp_path / "trial")
        paths.mkdir()
        return EnvironmentFactory.create_environment_from_config(
            config=EnvironmentConfig(
                import_path=IMPORT_PATH, kwargs=kwargs or {}, env=trial_env or {}
            ),
            environment_dir=folder,
            environment_name="task",
            session_id="task__1__env",
            trial_paths=paths,
            task_env_config=TaskEnvironmentConfig(**settings),
            **options,
        )

    return make


@pytest.fixture
def within(run):
    """Runs a check in a started environment and stops it."""

    def within(environment, check):
        async def main():
            await environment.start(force_build=False)
            try:
                return await check(environment)
            finally:
                await environment.stop(delete=True)

        return run(main)

    return within


async def says(environment, command, **options):
    result = await environment.exec(command, **options)
    assert result.return_code == 0, result
    return result.stdout


def test_a_command_runs_with_the_variables_of_task_trial_and_call(make, within, monkeypatch):
    monkeypatch.setenv("HOST_ONLY", "secret")

    async def check(environment):
        said = await says(environment, "echo $TASK $TRIAL $CALL $HOST_ONLY", env={"CALL": "c"})
        assert said == "t r c\n"
        with environment.scoped_exec_env({"CALL": "scoped"}):
            assert await says(environment, "echo $CALL", env={"CALL": "c"}) == "scoped\n"

    within(make(env={"TASK": "t", "TRIAL": "t"}, trial_env={"TRIAL": "r"}), check)


def test_the_working_folder_is_that_of_the_task(make, within):
    async def check(environment):
        assert await says(environment, "pwd") == "/project/deep\n"
        assert await says(environment, "pwd", cwd="/tmp") == "/tmp\n"
        await says(environment, "mkdir sub")
        assert await says(environment, "pwd", cwd="sub") == "/project/deep/sub\n"
        assert await says(environment, "ls") == "data.txt\nsub\n"

    within(make(files={"data.txt": "x", "Dockerfile": "FROM x"}, workdir="/project/deep"), check)


def test_files_are_there_and_not_there(make, within, tmp_path):
    (tmp_path / "file").write_text("x")

    async def check(environment):
        await environment.upload_file(str(tmp_path / "file"), "relative/file")
        assert await environment.is_file("/app/relative/file")
        assert await environment.is_dir("/app/relative")
        assert not await environment.is_dir("/missing")
        await environment.download_dir_with_exclusions(
            source_dir="/app", target_dir=tmp_path / "out", exclude=["relative"]
        )
        with pytest.raises(TransferError):
            await environment.download_file("/missing", tmp_path / "out")

    within(make(files={"kept": "x"}), check)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def test_a_timeout_is_no_timeout_error(make, within):
    async def check(environment):
        with pytest.raises(CommandTimeoutError, match="1 seconds") as caught:
            await environment.exec("sleep 1000", timeout_sec=1)
        assert isinstance(caught.value, RuntimeError)
        assert not isinstance(caught.value, TimeoutError)

    within(make(), check)


@pytest.mark.skipif(not ROOT, reason="other users inside need root outside")
def test_users_by_name_number_and_default(make, within):
    async def check(environment):
        me = "id -u; echo $HOME; touch $HOME/x"
        assert await says(environment, me, user="root") == "0\n/root\n"
        assert await says(environment, me, user=0) == "0\n/root\n"
        assert await says(environment, me, user=4242) == "4242\n/tmp\n"
        assert await says(environment, "id -un", user="daemon") == "daemon\n"
        environment.default_user = "4242"
        assert await says(environment, "id -u") == "4242\n"
        with pytest.raises(NamespaceError, match="no user 'nosuch'"):
            await environment.exec("true", user="nosuch")

    within(make(), check)


def test_no_network_is_no_network(make, within):
    async def check(environment):
        return await says(environment, "tail -n +3 /proc/net/dev | cut -d: -f1")

    policy = NetworkPolicy(network_mode="no-network")
    assert "eth" not in within(make(network_policy=policy), check)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"network_policy": NetworkPolicy(network_mode="allowlist", allowed_hosts=["a.b"])},
            "allow",
        ),
        ({"gpus": 1}, "GPU"),
        ({"os": "windows"}, "windows|Windows"),
        ({"files": {"docker-compose.yaml": "services: {}"}}, "services"),
        ({"kwargs": {"unknown": 1}}, "unknown"),
        ({"kwargs": {"read_only_paths": "/opt"}}, "list"),
        ({"kwargs": {"read_only_paths": ["relative"]}}, "absolute"),
        ({"kwargs": {"read_only_paths": ["/no/such"]}}, "exist"),
        ({"kwargs": {"folder": "/no/such"}}, "folder"),
        ({"kwargs": {"max_output_bytes": 0}}, "max_output_bytes"),
        ({"kwargs": {"max_file_bytes": "1G"}}, "max_file_bytes"),
        ({"kwargs": {"cpu_enforcement_policy": "limit"}, "cpus": 1}, "limit"),
        ({"kwargs": {"memory_enforcement_policy": "guarantee"}, "memory_mb": 5}, "limit"),
        ({"mounts": [{"type": "volume", "source": "v", "target": "/v"}]}, "bind"),
        ({"mounts": [{"type": "bind", "source": "/no/such", "target": "/v"}]}, "exist"),
    ],
)
def test_what_would_be_a_silent_lie_is_refused(make, settings, reason):
    with pytest.raises((ValueError, RuntimeError), match=reason):
        make(**settings)


def test_what_is_not_applied_is_said_once(make, within, caplog):
    async def check(environment):
        await environment.exec("true")

    settings = {"docker_image": "debian:12", "cpus": 1, "memory_mb": 100, "storage_mb": 100}
    with caplog.at_level(logging.WARNING):
        within(make(files={"Dockerfile": "FROM x"}, **settings), check)
    (record,) = [each for each in caplog.records if "Not applied" in each.getMessage()]
    for word in ("debian:12", "cpus=1", "memory_mb=100", "storage_mb=100", "Dockerfile"):
        assert word in record.getMessage()


def test_what_can_be_limited_is(make, within):
    async def check(environment):
        script = "cd /tmp; head -c 3000000 /dev/zero > large; stat -c %s large"
        result = await environment.exec(script)
        assert result.stdout == f"{2 << 20}\n"
        size = await says(environment, "df --output=size -B1 /dev/shm | tail -n 1")
        assert int(size) == 64 << 20
        script = (
            "import ctypes; libc = ctypes.CDLL(None); libc.shmget.argtypes = "
            "[ctypes.c_int, ctypes.c_size_t, ctypes.c_int]; "
            "print([libc.shmget(0, size << 20, 0o600) >= 0 for size in (1, 100)])"
        )
        assert await says(environment, f"python3 -c '{script}'") == "[True, False]\n"

    within(make(storage_mb=2, memory_mb=64), check)


def test_processes_inside_are_killed_before_the_server(make, within):
    async def check(environment):
        score = await says(environment, "cat /proc/self/oom_score_adj")
        own = int(Path("/proc/self/oom_score_adj").read_text())
        assert int(score) == max(own, 500)

    within(make(), check)


def test_folders_of_the_host_can_be_shown(make, within, tmp_path):
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_text("x")
    mounts = [{"type": "bind", "source": str(shown), "target": "/data", "read_only": False}]

    async def check(environment):
        assert await says(environment, f"cat {shown}/file /data/file") == "xx"
        assert (await environment.exec(f"touch {shown}/new")).return_code != 0
        await says(environment, "touch /data/new")
        assert await says(environment, "command -v python3") == "/usr/bin/python3\n"

    within(make(kwargs={"read_only_paths": [str(shown), "/usr/bin"]}, mounts=mounts), check)
    assert (shown / "new").exists()


def test_a_python_from_elsewhere_runs_where_it_is_shown(make, within):
    prefixes = sorted({sys.prefix, sys.base_prefix})

    async def check(environment):
        said = await says(environment, f"{sys.executable} -c 'import ssl; print(1)'")
        assert said == "1\n"

    within(make(kwargs={"read_only_paths": prefixes}), check)


def test_an_environment_can_be_stopped_at_any_time(make, run, caplog):
    async def main():
        environment = make()
        await environment.stop(delete=True)
        with pytest.raises(NamespaceError):
            await environment.exec("true")
        await environment.start(force_build=True)
        with pytest.raises(NamespaceError, match="before"):
            await environment.start(force_build=True)
        with caplog.at_level(logging.INFO):
            await environment.stop(delete=False)
        assert "stay in" in caplog.text
        await environment.stop(delete=True)

    run(main)


def test_a_failure_after_the_start_leaves_nothing(make, run):
    async def main():
        environment = make(workdir="/usr/x")
        with pytest.raises(NamespaceError, match="folders"):
            await environment.start(force_build=False)
        await environment.stop(delete=True)

    run(main)


def test_preflight_names_what_is_missing(monkeypatch):
    from rollout.sandbox import _subprocesses

    EnvironmentFactory.run_preflight(type=None, import_path=IMPORT_PATH)
    monkeypatch.setattr(_subprocesses, "PATH", "/nonexistent")
    with pytest.raises(SystemExit, match="util-linux"):
        EnvironmentFactory.run_preflight(type=None, import_path=IMPORT_PATH)


# Whole trials


def trial_config(task, tmp_path, **options):
    return TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=tmp_path / "trials",
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig(import_path=IMPORT_PATH, **options),
    )


async def run_trial(config):
    return await (await Trial.create(config)).run()


def test_the_settings_of_the_task_are_valid():
    assert TaskSettings.model_validate(tomllib.loads(TASK["task.toml"])).environment.cpus == 1


def test_oracle_reaches_the_reward(run, tmp_path):
    task = write_task(tmp_path / "task")
    result = run(run_trial, trial_config(task, tmp_path))
    assert result.exception_info is None
    assert result.verifier_result.rewards == {"reward": 1.0}
    (reward,) = (tmp_path / "trials").glob("*/verifier/reward.txt")
    assert reward.read_text() == "1\n"


def test_a_wrong_solution_does_not(run, tmp_path):
    wrong = "#!/bin/bash\necho 1 > answer.txt\n"
    task = write_task(tmp_path / "task", **{"solution/solve.sh": wrong})
    result = run(run_trial, trial_config(task, tmp_path))
    assert result.exception_info is None
    assert result.verifier_result.rewards == {"reward": 0.0}


def test_a_healthcheck_runs_inside(run, tmp_path):
    settings = TASK["task.toml"] + '\n[environment.healthcheck]\ncommand = "test -d /logs/agent"\n'
    task = write_task(tmp_path / "task", **{"task.toml": settings})
    result = run(run_trial, trial_config(task, tmp_path))
    assert result.verifier_result.rewards == {"reward": 1.0}


def test_trials_at_a_time_do_not_meet(run, tmp_path):
    task = write_task(tmp_path / "task")

    async def main():
        trials = [await Trial.create(trial_config(task, tmp_path)) for _ in range(6)]
        return await asyncio.gather(*(trial.run() for trial in trials))

    assert [each.verifier_result.rewards for each in run(main)] == [{"reward": 1.0}] * 6


def test_an_agent_that_runs_too_long_is_killed(run, tmp_path):
    settings = TASK["task.toml"].replace("timeout_sec = 60.0", "timeout_sec = 1.0", 1)
    solution = "#!/bin/bash\ncd /app; setsid sleep 1000 & sleep 1000\n"
    task = write_task(tmp_path / "task", **{"task.toml": settings, "solution/solve.sh": solution})
    result = run(run_trial, trial_config(task, tmp_path))
    assert result.exception_info.exception_type == "AgentTimeoutError"


def test_a_cancelled_trial_leaves_nothing(run, tmp_path):
    solution = "#!/bin/bash\necho x > /data/ready; setsid sleep 1000 & sleep 1000\n"
    task = write_task(tmp_path / "task", **{"solution/solve.sh": solution})
    shared = tmp_path / "shared"
    shared.mkdir()
    os.mkfifo(shared / "ready")
    mounts = [{"type": "bind", "source": str(shared), "target": "/data"}]

    async def main():
        running = asyncio.create_task(run_trial(trial_config(task, tmp_path, mounts=mounts)))
        # Opens once the agent writes.
        await asyncio.to_thread((shared / "ready").read_text)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(main)
