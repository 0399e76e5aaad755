"""Limits that Harbor does not have: of an agent's time, and of an environment's stop."""

from __future__ import annotations

import asyncio
import logging

import pytest
import trio

from rollout.backend.harbor.limits import (
    AgentTime,
    EnvironmentWatch,
    drop_large_files,
)
from rollout.backend.harbor.trial.runtime import Runtime


class Agent:
    def __init__(self):
        self.told = []

    async def run(self, instruction, *, environment):
        self.told.append((instruction, environment))
        if environment == "hangs":
            await asyncio.Event().wait()
        return "done"


class Calls:
    async def start(self, force_build):
        return None

    exec = upload_file = upload_dir = download_file = download_dir = stop = start


class Environment(Calls):
    def __init__(self, how="well"):
        self.how = how
        self.asked = []
        self.cancelled = 0

    async def stop(self, delete):
        self.asked.append(delete)
        if self.how == "fails":
            raise OSError("no such container")
        while self.how != "well":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                if self.how == "hangs" or self.cancelled > 1:
                    raise


def test_an_agent_in_time_is_left_alone():
    async def main():
        agent, time = Agent(), AgentTime(asyncio.get_running_loop().time() + 1000)
        time.limit(agent)
        assert await agent.run("i", environment="e") == "done"
        return agent.told, time.is_over

    assert asyncio.run(main()) == ([("i", "e")], False)


@pytest.mark.parametrize("left", [0.02, 0, -5])
def test_an_agent_out_of_time_ends_with_a_timeout(left):
    async def main():
        agent, time = Agent(), AgentTime(asyncio.get_running_loop().time() + left)
        time.limit(agent)
        with pytest.raises(TimeoutError):
            await agent.run("i", environment="hangs")
        return time.is_over

    assert asyncio.run(main())


def test_each_step_gets_what_was_left_for_the_first():
    async def main():
        loop = asyncio.get_running_loop()
        agent, time = Agent(), AgentTime(loop.time() + 1000)
        time.limit(agent)
        await agent.run("one", environment="e")
        time.deadline = loop.time() - 1  # verification of the first step took long
        return await agent.run("two", environment="e")

    assert asyncio.run(main()) == "done"


def test_a_timeout_of_the_agent_itself_is_not_its_deadline():
    async def main():
        async def fail(**_):
            raise TimeoutError("of a request")

        agent, time = Agent(), AgentTime(asyncio.get_running_loop().time() + 1000)
        agent.run = fail
        time.limit(agent)
        with pytest.raises(TimeoutError, match="of a request"):
            await agent.run()
        return time.is_over

    assert not asyncio.run(main())


def stopped(how, timeout_sec=1000.0):
    async def main():
        environment, stop = Environment(how), EnvironmentWatch("t-1", timeout_sec)
        stop.watch(environment)
        await environment.stop(delete=True)
        await environment.stop(True)
        return environment, stop

    environment, stop = asyncio.run(main())
    assert environment.asked == [True, True]
    assert not stop.is_running
    return stop


def test_a_stop_that_goes_well_is_not_worth_a_word(caplog):
    stop = stopped("well")
    assert (stop.note, stop.may_run, caplog.text) == (None, False, "")


def test_a_stop_that_fails_is_told_and_costs_nothing(caplog):
    stop = stopped("fails")
    assert stop.note == "OSError: no such container"
    assert stop.may_run
    assert "trial t-1: its environment did not stop: OSError: no such container" in caplog.text


@pytest.mark.parametrize("how", ["hangs", "ignores"])
def test_a_stop_that_hangs_is_given_up(caplog, monkeypatch, how):
    monkeypatch.setattr("rollout.backend.harbor.limits._LAST_SEC", 0.01)
    stop = stopped(how, 0.01)
    assert stop.note == "had not ended after 0.01 s and was given up"
    assert stop.may_run
    assert "trial t-1: its environment has not stopped within 0.01 s" in caplog.text


def test_the_end_of_the_loop_ends_a_stop():
    async def main():
        environment, stop = Environment("hangs"), EnvironmentWatch("t-1", 1000.0)
        stop.watch(environment)
        task = asyncio.ensure_future(environment.stop(delete=True))
        while not environment.asked:
            await asyncio.sleep(0)
        assert stop.note == "was under way when the rollout ended"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return environment.cancelled, stop.is_running

    assert asyncio.run(main()) == (1, False)


def test_environments_that_did_not_stop_have_their_trials_names():
    runtime = Runtime(trio.CapacityLimiter(1))
    running, lost, well = (EnvironmentWatch(name, 1.0) for name in ("running", "lost", "well"))
    running.is_running = True
    lost.may_run = True
    for each in (running, lost, well):
        runtime.note_stop(each)
    assert runtime.unstopped() == ["running", "lost"]
    running.is_running = False
    assert runtime.unstopped() == ["lost"]
    for number in range(30):
        one = EnvironmentWatch(f"n-{number}", 1.0)
        one.may_run = True
        runtime.note_stop(one)
    assert runtime.unstopped() == [f"n-{number}" for number in range(10, 30)]


def test_files_that_would_fill_the_memory_are_left_out(tmp_path, caplog):
    for name, size in (("reward.json", 1 << 40), ("trajectory.json", (64 << 20) + 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    (tmp_path / "reward.txt").write_text("1")
    (tmp_path / "other.json").write_bytes(b"x" * (2 << 20))
    drop_large_files(tmp_path, logging.getLogger("tests"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "reward.txt"]
    assert "reward.json is larger than 1048576 bytes" in caplog.text
    assert "trajectory.json is larger than 67108864 bytes" in caplog.text
    drop_large_files(tmp_path / "nowhere", logging.getLogger("tests"))


def test_that_holds_for_any_environment_that_copies_folders_out(tmp_path):
    class Remote(Calls):
        async def download_dir(self, source_dir, target_dir):
            (target_dir / "reward.txt").write_bytes(b"1" * (2 << 20))
            (target_dir / "from").write_text(source_dir)

    environment = Remote()
    EnvironmentWatch("t-1", 1.0).watch(environment)
    asyncio.run(environment.download_dir(source_dir="/logs/verifier", target_dir=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["from"]
