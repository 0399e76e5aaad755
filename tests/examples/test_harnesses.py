"""The examples that drive rollout servers, against real servers on loopback."""

from __future__ import annotations

import importlib.util
import logging
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import attrs
import hypercorn.trio
import pytest
import trio
from examples.loading import EXAMPLES, example
from hypercorn.config import Config
from support import CHAT_URL, local_backend, make_app, served

from rollout import AgentWorkflow, Grader
from rollout.client import RolloutClient, RolloutProtocolError
from rollout.demo.arithmetic import ScriptedModel
from rollout.demo.chat import create_chat_app
from rollout.server import serve
from rollout.trajectory import Trajectory, TrajectoryCall
from rollout.types import RolloutStatus

HAS_NUMPY = importlib.util.find_spec("numpy") is not None

# httpx leaves its request body behind, half iterated, when a request is cancelled as it is sent:
# an early stop does that.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'httpx._content:ResourceWarning")


class BySeed(AgentWorkflow):
    """Answers with the seed of the rollout; an odd one only once it is cancelled."""

    async def run(self, ctx):
        if ctx.metadata["seed"] >= 6:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return [*ctx.prompt, {"role": "assistant", "content": str(ctx.metadata["seed"])}]


class EvenOrAll(Grader):
    """Rewards even seeds where the label is ``even``, everything where it is ``all``."""

    def grade(self, ctx):
        even = int(ctx.sample.messages[-1]["content"]) % 2 == 0
        ctx.set_reward(1.0 if even or ctx.label == "all" else 0.0)


# --- groups ---------------------------------------------------------------------------------


def test_advantages_are_normalised_within_the_group():
    advantages = example("grpo_groups").advantages([1.0, 0.0, 0.0, 1.0])
    assert advantages == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)
    skewed = example("grpo_groups").advantages([1.0, 0.0, 0.0, 0.0])
    assert sum(skewed) == pytest.approx(0.0)
    assert skewed[0] == pytest.approx(3**0.5, abs=1e-4)


async def test_grpo_groups():
    module = example("grpo_groups")
    backend = local_backend(BySeed, EvenOrAll, max_concurrent=32)
    async with served(make_app(backend)) as url:
        # Two of each group never end: six are enough.
        groups = await module.sample_groups(url, CHAT_URL, {"a": "even", "b": "all", "c": "even"})
        async with RolloutClient(url=url) as client:
            await client.wait_idle(timeout_sec=60)  # those that never end were cancelled
    assert sorted(group.prompt for group in groups) == ["a", "c"], "b is all alike"
    for group in groups:
        rewards = [sample.reward for sample in group.samples]
        assert sorted(rewards) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
        assert list(group.advantages) == pytest.approx(
            [1.0 if reward else -1.0 for reward in rewards], abs=1e-5
        )


@pytest.mark.skipif(not HAS_NUMPY, reason="needs numpy")
async def test_grpo_training_learns(capsys, monkeypatch):
    """All of it: endpoint, agent, gateway, trajectories, arrays, updates."""
    module = example("grpo_training")
    monkeypatch.setattr(module, "UPDATES", 8)
    means = await module.main()
    assert len(means) == 8
    assert sum(means[-2:]) / 2 > 0.25, "a policy that has learnt nothing gets 0.1"
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("update  8: mean reward ")
    assert last.endswith(" 0 missing")


@pytest.mark.skipif(not HAS_NUMPY, reason="needs numpy")
def test_the_arrays_of_a_step():
    module = example("grpo_training")
    said = {"completion_token_ids": [3], "logprobs": [-1.0], "step": {}}
    calls = [
        TrajectoryCall(prompt_token_ids=[1, 2], policy_version_start=5, **said),
        TrajectoryCall(prompt_token_ids=[9], policy_version_start=4, branch=1, **said),
        TrajectoryCall(prompt_token_ids=[1, 2, 3, 4], policy_version_start=6, **said),
        TrajectoryCall(prompt_token_ids=[1, 8], policy_version_start=6, **said),
    ]
    first, second, third = module.sequences_of(Trajectory(document={}, calls=tuple(calls)))
    assert (first.tokens, first.oldest) == ([1, 2, 3, 4, 3], 5)
    assert first.said == [False, False, True, False, True]
    assert (second.tokens, second.oldest) == ([9, 3], 4)
    assert third.tokens == [1, 8, 3], "it does not go on with what was before"
    batch = module.Batch.of([(first, 1.0), (second, -1.0)])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 3], [9, 3, 0, 0, 0]]
    assert batch.log_probs.tolist() == [[0, 0, -1, 0, -1], [0, -1, 0, 0, 0]]
    assert batch.advantages[:, 0].tolist() == [1.0, -1.0]
    missing = TrajectoryCall(prompt_token_ids=[1], completion_token_ids=[2], step={})
    assert module.sequences_of(Trajectory(document={}, calls=(calls[0], missing))) == []


# --- best of n ------------------------------------------------------------------------------


class ByNumber(AgentWorkflow):
    """Answers with the number of the sample; those after the third wait for ever."""

    async def run(self, ctx):
        if ctx.metadata["seed"] > 3:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return [*ctx.prompt, {"role": "assistant", "content": str(ctx.metadata["seed"])}]


class Closeness(Grader):
    """Rewards by how close the number comes to the label."""

    def grade(self, ctx):
        ctx.set_reward(1 - abs(int(ctx.sample.messages[-1]["content"]) - int(ctx.label)) / 10)


async def test_best_of_n_stops_at_one_that_is_good_enough():
    module = example("best_of_n")
    backend = local_backend(ByNumber, Closeness, max_concurrent=8)
    async with served(make_app(backend)) as url:
        best = await module.best_of_n(url, CHAT_URL, "How many?", "3")
    assert best.sample.reward == 1.0
    assert best.sample.messages[-1]["content"] == "3"


async def test_best_of_n_takes_the_best_where_none_is_good(monkeypatch):
    module = example("best_of_n")
    monkeypatch.setattr(module, "SAMPLES", 3)
    async with served(make_app(local_backend(ByNumber, Closeness))) as url:
        best = await module.best_of_n(url, CHAT_URL, "How many?", "7")
    assert best.sample.reward == pytest.approx(0.5)
    assert best.sample.messages[-1]["content"] == "2"


async def test_best_of_nothing(caplog):
    class Fails(AgentWorkflow):
        async def run(self, ctx):
            await trio.lowlevel.checkpoint()
            raise RuntimeError("boom")

    with caplog.at_level(logging.CRITICAL):
        async with served(make_app(local_backend(Fails))) as url:
            assert await example("best_of_n").best_of_n(url, CHAT_URL, "How many?", "7") is None


# --- two servers ----------------------------------------------------------------------------


@attrs.define(eq=False)
class Gate:
    """A workflow's class whose runs wait until they are told to go on."""

    arrived: int = 0
    change: trio.Event = attrs.field(factory=trio.Event)
    open: trio.Event = attrs.field(factory=trio.Event)

    def workflow(self):
        gate = self

        class Waits(AgentWorkflow):
            async def run(self, ctx):
                gate.arrived += 1
                gate.change.set()
                gate.change = trio.Event()
                await gate.open.wait()
                return [*ctx.prompt, {"role": "assistant", "content": "42"}]

        return Waits

    async def reached(self, count):
        while self.arrived < count:
            await self.change.wait()


async def test_two_servers_share_the_work():
    module = example("two_servers")
    gates = Gate(), Gate()
    questions = {f"What is {n}?": "42" for n in range(6)}
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(
                served(make_app(local_backend(gate.workflow(), max_concurrent=8)))
            )
            for gate in gates
        ]
        async with trio.open_nursery() as nursery:

            async def watch():
                for gate in gates:
                    await gate.reached(3)
                for gate in gates:
                    gate.open.set()

            nursery.start_soon(watch)
            results = await module.run_all(CHAT_URL, urls, questions)
    assert {result.status for result in results.values()} == {RolloutStatus.SUCCESS}
    assert [gate.arrived for gate in gates] == [3, 3]


async def test_a_server_that_is_not_there_costs_nothing():
    module = example("two_servers")
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    nobody = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    await listener.aclose()
    async with served(make_app(local_backend(max_concurrent=8))) as url:
        results = await module.run_all(CHAT_URL, [nobody, url], module.QUESTIONS)
    assert {result.status for result in results.values()} == {RolloutStatus.SUCCESS}
    assert all(result.agent_started_at is not None for result in results.values())


async def test_without_any_server_the_errors_say_so():
    module = example("two_servers")
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    nobody = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    await listener.aclose()
    results = await module.run_all(CHAT_URL, [nobody], {"What is 1?": "1"})
    assert isinstance(results["What is 1?"], module.NoServerLeftError)


async def test_only_what_had_not_started_is_run_again():
    module = example("two_servers")
    dies, lives = Gate(), Gate()
    lives.open.set()
    questions = {f"What is {n}?": "42" for n in range(6)}
    results = {}
    async with trio.open_nursery() as nursery:
        # One slot: of its three rollouts one runs, the others wait in its queue.
        first = make_app(local_backend(dies.workflow(), max_concurrent=1))
        second = make_app(local_backend(lives.workflow(), max_concurrent=8))
        async with served(second) as other:
            urls = await nursery.start(
                partial(serve, first, bind="127.0.0.1:0", handle_signals=False)
            )

            async def run():
                results.update(await module.run_all(CHAT_URL, [urls[0], other], questions))

            async with trio.open_nursery() as inner:
                inner.start_soon(run)
                await dies.reached(1)
                await lives.reached(3)
                async with RolloutClient(url=urls[0]) as client:
                    await client.cancel_rollouts(all=True)
                dies.open.set()
            first.request_shutdown()
    by_status = [result.status for result in results.values()]
    assert len(results) == 6
    assert by_status.count(RolloutStatus.SUCCESS) == 5
    assert by_status.count(RolloutStatus.CANCELLED) == 1, "its agent had started"
    assert dies.arrived >= 1


async def test_a_refusal_is_no_failure_of_the_server():
    module = example("two_servers")
    async with served(make_app(api_key="a-key-of-the-server")) as url:
        results = await module.run_all(CHAT_URL, [url], {"What is 1?": "1"})
    (error,) = results.values()
    assert isinstance(error, RolloutProtocolError)
    assert error.status_code == 401


# --- as scripts -----------------------------------------------------------------------------


@asynccontextmanager
async def arithmetic(servers=1, **model):
    """Serve the scripted model and the arithmetic example; yields the URLs of both."""
    config = Config()
    config.bind, config.accesslog, config.errorlog = ["127.0.0.1:0"], None, None
    chat = create_chat_app(ScriptedModel(think_sec=0, **model), None)
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        stop = trio.Event()
        chat_urls = await nursery.start(
            partial(hypercorn.trio.serve, chat, config, shutdown_trigger=stop.wait)
        )
        urls = []
        for _ in range(servers):
            module = example("arithmetic_server")  # afresh, so that each has its own backend
            app = make_app(module.app.backend, lifespan=module.lifespan)
            urls.append(await stack.enter_async_context(served(app)))
        yield urls, f"{chat_urls[0]}/v1"
        stop.set()


async def run_script(name, *args):
    done = await trio.run_process(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *args],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


async def test_grpo_groups_as_a_script():
    async with arithmetic(error_rate=0.5) as ((url,), chat_url):
        *groups, summary = await run_script("grpo_groups", url, chat_url)
    assert summary == f"{len(groups)} of 4 groups have right and wrong samples"
    assert len(groups) >= 1
    for line in groups:
        values = [float(value) for value in line.split("?")[1].split()]
        assert len(values) == 6
        assert sum(values) == pytest.approx(0, abs=0.05)
        assert len(set(values)) == 2


async def test_best_of_n_as_a_script():
    async with arithmetic(error_rate=0.5) as ((url,), chat_url):
        lines = await run_script("best_of_n", url, chat_url, "What is 6 * 7?", "42")
    assert lines == ["reward 1.0: 6 * 7 = 42"]


async def test_two_servers_as_a_script():
    async with arithmetic(servers=2) as (urls, chat_url):
        lines = await run_script("two_servers", chat_url, *urls)
    assert [line.split("?")[1].strip() for line in lines] == ["success"] * 10


@pytest.mark.parametrize("name", ["grpo_groups", "best_of_n", "two_servers"])
async def test_wrong_use_is_told(name):
    done = await trio.run_process(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_stderr=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"usage: python {name}.py")
