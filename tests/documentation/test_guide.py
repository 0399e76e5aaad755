"""The guide and the home page do what they say."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from documentation.blocks import (
    SDK,
    Block,
    defined_by,
    find,
)
from documentation.serving import (
    SERVER_URL_IN_TEXT,
    chat_endpoint,
    placed,
    run_python,
)
from support import (
    CHAT_URL,
    Script,
    fresh_id,
    in_process,
    make_app,
    prompt,
    served,
)

from rollout import (
    AgentWorkflow,
    Grader,
    LocalBackend,
    RolloutInitRequest,
    RolloutSample,
    SampleSource,
    get_rollout_context,
)
from rollout.client import RolloutClient, RolloutProtocolError
from rollout.types import (
    RolloutErrorCategory,
    RolloutStatus,
)


async def test_the_guide_from_server_to_reward():
    app = defined_by(find(SDK, "class Solve"))["app"]
    async with chat_endpoint("a-key-of-the-model") as chat_url, served(app) as url:
        code = placed(find(SDK, "trio.run(main)"), url, chat_url)
        printed = await run_python("-c", code, ROLLOUT_LLM_API_KEY="a-key-of-the-model")
    assert printed == "success 1.0\n"


async def test_the_tracking_example(capsys):
    track_rollout = defined_by(find(SDK, "async def track_rollout"))["track_rollout"]
    app = defined_by(find(SDK, "class Solve"))["app"]
    async with (
        chat_endpoint() as chat_url,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        result = await track_rollout(client, chat_url)
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.reward == 1.0
    printed = capsys.readouterr().out.split()
    assert printed == sorted(printed, key=list(RolloutStatus).index)
    assert printed[-1] in {"grading", "success"}


async def test_the_guide_runs_many_at_a_time():
    app = defined_by(find(SDK, "class Solve"))["app"]
    run_all = defined_by(find(SDK, "async def run_all"))["run_all"]
    questions = {fresh_id(): f"What is {number} + 1?" for number in range(12)}
    async with (
        chat_endpoint() as chat_url,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        results = await run_all(client, chat_url, questions, max_in_flight=5)
    answers = {name: result.sample.messages[-1]["content"] for name, result in results.items()}
    assert answers == {name: f"{n} + 1 = {n + 1}" for n, name in enumerate(questions)}


async def test_the_guide_prints_phases(autojump_clock, capsys):
    print_phases = defined_by(find(SDK, "async def print_phases"))["print_phases"]
    async with in_process(make_app()) as client:
        handle = await client.run_rollout_async(
            prompt(sleep=60), CHAT_URL, "a", metadata={"grader": {"sleep": 60}}
        )
        await print_phases(handle)
    assert capsys.readouterr().out.split() == [
        *("a", "queued"),
        *("a", "running"),
        *("a", "grading"),
        *("a", "success"),
    ]


async def test_the_guide_cancels_and_waits(autojump_clock):
    cancel_and_wait = defined_by(find(SDK, "async def cancel_and_wait"))["cancel_and_wait"]
    async with in_process(make_app()) as client:
        handle = await client.run_rollout_async(prompt(sleep=3600), CHAT_URL, "a", label="42")
        await handle.wait_for_running()
        result = await cancel_and_wait(client, handle)
    assert result.status is RolloutStatus.CANCELLED
    assert trio.current_time() < 60


async def test_the_guide_waits_at_most_so_long(autojump_clock):
    wait_at_most = defined_by(find(SDK, "async def wait_at_most"))["wait_at_most"]
    async with in_process(make_app()) as client:
        slow = await client.run_rollout_async(prompt(sleep=3600), CHAT_URL, "slow", label="42")
        assert await wait_at_most(client, slow, 5) is None
        assert (await slow).status is RolloutStatus.CANCELLED
        quick = await client.run_rollout_async(prompt(sleep=1), CHAT_URL, "quick", label="42")
        assert await wait_at_most(client, quick, 5) is await quick


async def test_the_guide_authenticates(monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER_API_KEY", "a-key-of-the-server")
    app = defined_by(
        find(SDK, "app = create_rollout_server(\n    backend=backend"),
        backend=LocalBackend(workflow=Script),
    )["app"]
    async with served(app) as url:
        block = find(SDK, "client = RolloutClient(\n")
        assert SERVER_URL_IN_TEXT in block.code
        code = block.code.replace(SERVER_URL_IN_TEXT, url)
        client = defined_by(Block(block.page, block.line, block.language, code))["client"]
        assert (await client.health())["status"] == "ok"
        await client.aclose()
        async with RolloutClient(url=url) as stranger:
            with pytest.raises(RolloutProtocolError) as caught:
                await stranger.health()
        assert caught.value.status_code == 401


async def test_the_guide_waits_until_idle(autojump_clock):
    wait_until_idle = defined_by(find(SDK, "async def wait_until_idle"))["wait_until_idle"]
    async with in_process(make_app()) as client:
        await client.run_rollout_async(prompt(sleep=50), CHAT_URL, "a", label="42")
        await wait_until_idle(client)
        assert 50 <= trio.current_time() < 60
        assert (await client.health())["lifecycle"]["active_rollouts"] == 0


async def test_the_guides_own_backend(autojump_clock):
    parrot = defined_by(find(SDK, "class Parrot"))["Parrot"]()
    async with in_process(make_app(parrot)) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "a")
    assert result.status is RolloutStatus.SUCCESS
    assert result.sample.messages == prompt() * 2
    assert result.agent_started_at is not None


async def test_what_the_guide_repeats_is_what_has_cost_nothing(autojump_clock):
    worth = defined_by(find(SDK, "def worth_another_attempt"))["worth_another_attempt"]
    app = make_app(LocalBackend(workflow=Script), polling_lease_timeout_sec=120)
    async with in_process(app) as client:
        for number in range(4):  # as many as there are slots
            await client.run_rollout_async(prompt(sleep=60), CHAT_URL, str(number), grade=False)
        in_queue = await client.run_rollout(
            prompt(), CHAT_URL, "in-queue", grade=False, agent_timeout_sec=5
        )
        after_start = await client.run_rollout(
            prompt(**{"raise": "boom"}), CHAT_URL, "after-start", grade=False
        )
        ungradable = await client.run_rollout(prompt(), CHAT_URL, "ungradable", label="42")
        success = await client.run_rollout(prompt(), CHAT_URL, "success", grade=False)
    assert in_queue.err_category is RolloutErrorCategory.TIMEOUT
    assert ungradable.err_category is RolloutErrorCategory.VALIDATION_ERROR
    assert [worth(r) for r in (in_queue, after_start, ungradable, success)] == [
        True,
        False,
        False,
        False,
    ]


# --- the home page ----------------------------------------------------------------------------

HOME = "docs/index.md"


async def test_the_client_of_the_home_page(capsys):
    code = find(HOME, "run_rollouts", "py").code
    defines = "async def main(server, requests):\n" + textwrap.indent(code, "    ")
    namespace: dict[str, Any] = {"RolloutClient": RolloutClient}
    exec(compile(defines, HOME, "exec"), namespace)
    requests = [
        RolloutInitRequest(
            rollout_id=name, initial_messages=prompt(), chat_completions_url=CHAT_URL, label="42"
        )
        for name in ("a", "b", "b")  # the last of them has no result: its id is taken
    ]
    async with served(make_app()) as url:
        await namespace["main"](url, requests)
    printed = sorted(capsys.readouterr().out.splitlines())
    assert printed[:2] == ["1.0", "1.0"]
    assert printed[2].startswith("no reward: POST /rollout")


async def test_the_server_of_the_home_page(autojump_clock):
    asked: list[dict[str, Any]] = []

    class Completions:
        async def create(self, **request: Any) -> None:
            await trio.lowlevel.checkpoint()
            asked.append(request)
            messages = [*request["messages"], {"role": "assistant", "content": "it is 42"}]
            context = get_rollout_context()
            assert context is not None
            context.set_sample_source(Said(RolloutSample(messages=messages)))

    class Said(SampleSource):
        def __init__(self, sample: RolloutSample) -> None:
            self.sample = sample

        async def get_sample(self) -> RolloutSample:
            await trio.lowlevel.checkpoint()
            return self.sample

    # The client of the OpenAI SDK has tests of its own; here it is the one of the example.
    client_of_the_sdk = SimpleNamespace(chat=SimpleNamespace(completions=Completions()))
    page = defined_by(
        find(HOME, "class Solve", "py"),
        AgentWorkflow=AgentWorkflow,
        Grader=Grader,
        rollout_client=lambda: client_of_the_sdk,
    )
    backend = LocalBackend(workflow=page["Solve"], grader=page["Compare"])
    async with in_process(make_app(backend)) as client:
        result = await client.run_rollout(prompt(), CHAT_URL, "a", label="42")
    assert result.sample.reward == 1.0
    assert [request["model"] for request in asked] == ["policy"]
