"""The parts of a harness do what the page says of them."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from client.fakes import FakeServer, admitted, client_of, result
from documentation.blocks import defined_by, find
from support import CHAT_URL, in_process, local_backend, make_app, prompt, served

from rollout.client import RolloutClient
from rollout.types import RolloutInitRequest

PAGE = "docs/harness.md"


def request(name: str, **changes: Any) -> RolloutInitRequest:
    fields = {"initial_messages": prompt(), "chat_completions_url": CHAT_URL, "grade": False}
    return RolloutInitRequest(rollout_id=name, **{**fields, **changes})


async def test_a_server_that_is_late(autojump_clock):
    wait_until_up = defined_by(find(PAGE, "async def wait_until_up"))["wait_until_up"]
    asked: list[float] = []

    async def late(_: httpx.Request) -> httpx.Response:
        asked.append(trio.current_time())
        if trio.current_time() < 5:
            raise httpx.ConnectError("nobody is there yet")
        return httpx.Response(200, json={"status": "ok"})

    async def never(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody is there")

    async with httpx.AsyncClient(transport=httpx.MockTransport(late)) as http:
        client = RolloutClient(url="http://late", http_client=http)
        assert await wait_until_up(client) == {"status": "ok"}
    assert 5 <= asked[-1] < 6
    async with httpx.AsyncClient(transport=httpx.MockTransport(never)) as http:
        client = RolloutClient(url="http://never", http_client=http)
        with pytest.raises(trio.TooSlowError):
            await wait_until_up(client, timeout_sec=10)


async def test_results_are_kept_and_not_run_again(tmp_path):
    page = defined_by(find(PAGE, "async def run_to_file"))
    path = tmp_path / "results.jsonl"
    assert page["results_of"](path) == {}
    async with served(make_app()) as url, RolloutClient(url=url) as client:
        await page["run_to_file"](client, [request("a"), request("b")], path)
        # Were "a" asked for again, it would be refused: its id is taken.
        await page["run_to_file"](client, [request(name) for name in "abc"], path)
    with path.open("a") as file:
        file.write('{"rollout_id": "half')
    results = page["results_of"](path)
    assert sorted(results) == ["a", "b", "c"]
    assert len(path.read_text().splitlines()) == 4
    assert {result["status"] for result in results.values()} == {"success"}


async def test_only_what_never_ran_is_tried_again(autojump_clock):
    run_with_retries = defined_by(find(PAGE, "async def run_with_retries"))["run_with_retries"]
    async with in_process(make_app(local_backend(max_concurrent=1))) as client:
        ended = await run_with_retries(
            client,
            [
                request("first", initial_messages=prompt(sleep=30)),
                request("in-queue", agent_timeout_sec=20),
                request("breaks", initial_messages=prompt(**{"raise": "boom"})),
                request("ungradable", grade=True),
            ],
        )
    names = {one.request.rollout_id: str(one.result.status) for one in ended}
    assert names == {
        "first": "success",
        "in-queue-again": "success",
        "breaks": "failure",
        "ungradable": "failure",
    }


async def test_those_whose_server_was_killed_are_not_tried_again(autojump_clock):
    run_with_retries = defined_by(find(PAGE, "async def run_with_retries"))["run_with_retries"]
    server = FakeServer(
        admissions=[httpx.ConnectError("not there yet"), admitted("a-again")],
        polls=[
            result("running", "a-again", agent_started_at="2026-01-31T12:00:00Z"),
            httpx.ConnectError("killed"),
        ],
    )
    async with client_of(server, feed=False) as client:
        (ended,) = await run_with_retries(client, [request("a")])
    assert ended.request.rollout_id == "a-again"
    assert ended.agent_started_at is not None


async def test_rollouts_do_not_run_far_ahead_of_the_trainer():
    train = defined_by(find(PAGE, "async def train"))["train"]
    pulled: list[str] = []
    stepped: list[tuple[int, int]] = []
    go_on = threading.Event()

    def requests() -> Any:
        for number in range(60):
            pulled.append(f"r-{number}")
            yield request(f"r-{number}")

    def step(batch: Any) -> None:
        assert go_on.wait(30)
        stepped.append((len(batch), len(batch.failures)))

    async with served(make_app()) as url, RolloutClient(url=url) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train, client, requests(), 5, step)
            most = 5 + 5 + 5 + 10 + 10  # in a step, in the channel, in hand, waiting, in flight
            while len(pulled) < most:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.05)
            ahead = len(pulled)
            go_on.set()
    assert ahead == most
    assert stepped == [(5, 0)] * 12


async def test_the_trainer_counts_failures_apart():
    train = defined_by(find(PAGE, "async def train"))["train"]
    boom = prompt(**{"raise": "boom"})
    requests = [
        request(f"r-{n}", **({} if n % 3 else {"initial_messages": boom})) for n in range(9)
    ]
    batches: list[Any] = []
    async with served(make_app()) as url, RolloutClient(url=url) as client:
        await train(client, requests, 4, batches.append)
    assert [len(batch) for batch in batches] == [4, 2]
    assert sum(len(batch.failures) for batch in batches) == 3


async def test_groups_of_one_prompt(autojump_clock, capsys):
    advantages = defined_by(find(PAGE, "async def advantages"))["advantages"]
    prompts = [
        request("a", grade=True, label="42"),
        request("b", initial_messages=prompt(sleep=3600)),
    ]
    async with in_process(make_app(local_backend(max_concurrent=None))) as client:
        assert await advantages(client, prompts, deadline_sec=60) == []
    assert capsys.readouterr().out.splitlines() == [
        "a: 8 samples, 0 failures, 0 stragglers",
        "b: 0 samples, 0 failures, 8 stragglers",
    ]


async def test_as_many_as_fit(autojump_clock):
    as_many_as_fit = defined_by(find(PAGE, "async def as_many_as_fit"))["as_many_as_fit"]
    async with in_process(make_app(local_backend(max_concurrent=None))) as client:
        requests = [
            request(f"r-{number}", initial_messages=prompt(sleep=10 * number))
            for number in range(1, 8)
        ]
        ended = await as_many_as_fit(client, requests, 35)
        assert [one.request.rollout_id for one in ended] == ["r-1", "r-2", "r-3"]
        await client.wait_idle(timeout_sec=5)  # what was left was cancelled on the server
