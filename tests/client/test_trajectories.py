"""Fetching trajectories: whose lease is sent, what is tried again, and what comes of it."""

from __future__ import annotations

import gzip
import json
import random

import httpx
import pytest
from client.fakes import (
    TOKEN,
    FakeServer,
    admitted,
    bare_client,
    client_of,
    refused,
    result,
    run,
    start,
)
from support import CHAT_URL, in_process, local_backend, make_app, prompt, served

from rollout.client import RolloutClient, RolloutProtocolError, trajectories
from rollout.errors import TrajectoryError, TrajectoryUnavailableError
from rollout.trajectory import Trajectory, build_trajectory
from rollout.types import DURABLE_RESULTS, EXTENSIONS, RolloutInitRequest

MESSAGES = [
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "42", "token_ids": [1, 2], "logprobs": [-0.5, -1.0]},
]
DOCUMENT = build_trajectory(MESSAGES, rollout_id="r")
OFFERS = {"extensions": [*EXTENSIONS]}


def found(document=DOCUMENT, **headers):
    return httpx.Response(200, json=document, headers=headers)


def server_of(*answers, **admission):
    admission = {**OFFERS, **admission}
    return FakeServer(admissions=[admitted(**admission)], trajectories=[*answers])


async def test_a_rollout_that_was_run_is_asked_for_with_its_lease(autojump_clock):
    server = server_of(found())
    async with client_of(server, api_key="k", feed=False) as client:
        await run(client)
        trajectory = await client.fetch_trajectory("r")
    assert isinstance(trajectory, Trajectory)
    assert trajectory.rollout_id == "r"
    (call,) = trajectory.calls
    assert (call.completion_token_ids, call.logprobs) == ([1, 2], [-0.5, -1.0])
    sent = server.calls[-1]
    assert (sent.method, sent.path, sent.token) == ("GET", "/rollout/r/trajectory", TOKEN)
    assert sent.headers["authorization"] == "Bearer k"


async def test_a_handle_that_has_ended_or_was_cancelled_is_enough(autojump_clock):
    async with client_of(server_of(found()), feed=False) as client:
        handle = await start(client)
        handle.cancel()
        assert (await client.fetch_trajectory(handle.rollout_id)).rollout_id == "r"


async def test_a_client_that_is_not_entered_fetches_too(autojump_clock):
    client = bare_client(server_of(found()))
    await run(client)
    assert (await client.fetch_trajectory("r")).rollout_id == "r"
    await client.http_client.aclose()


@pytest.mark.parametrize("status", [404, 409])
async def test_what_the_server_does_not_have_is_an_error_of_its_own(autojump_clock, status):
    async with client_of(server_of(refused(status, "it was removed")), feed=False) as client:
        await run(client)
        with pytest.raises(TrajectoryUnavailableError, match="it was removed") as caught:
            await client.fetch_trajectory("r")
    assert caught.value.status_code == status


async def test_other_refusals_are_those_of_the_protocol(autojump_clock):
    server = server_of(refused(403, f"not {TOKEN}"))
    async with client_of(server, feed=False) as client:
        await run(client)
        with pytest.raises(RolloutProtocolError, match="403, not 200") as caught:
            await client.fetch_trajectory("r")
    assert TOKEN not in str(caught.value)
    assert len(server.times("trajectory")) == 1


@pytest.mark.parametrize("document", [[], {}, {**DOCUMENT, "steps": 1}])
async def test_what_is_not_a_trajectory_is_refused(autojump_clock, document):
    async with client_of(server_of(found(document)), feed=False) as client:
        await run(client)
        with pytest.raises(TrajectoryError, match="not a valid trajectory"):
            await client.fetch_trajectory("r")


async def test_a_rollout_of_somebody_else_is_not_asked_for(autojump_clock):
    server = server_of(found())
    async with client_of(server, feed=False) as client:
        with pytest.raises(TrajectoryUnavailableError, match="the client has no lease of it"):
            await client.fetch_trajectory("r")
    assert not server.calls


async def test_a_server_without_the_route_is_not_asked(autojump_clock):
    server = FakeServer(admissions=[admitted()])
    async with client_of(server, feed=False) as client:
        await run(client)
        with pytest.raises(TrajectoryUnavailableError, match="does not announce the extension"):
            await client.fetch_trajectory("r")
    assert not server.times("trajectory")


async def test_the_oldest_lease_is_forgotten(autojump_clock, monkeypatch):
    monkeypatch.setattr(trajectories, "MOST_LEASES", 2)
    server = server_of(found())
    server.admissions = [admitted(name, **OFFERS) for name in "abab"] + [admitted("c", **OFFERS)]
    server.polls = [result("success", name) for name in "ababc"]
    async with client_of(server, feed=False) as client:
        for name in "ababc":
            await run(client, name)
        await client.fetch_trajectory("b")
        await client.fetch_trajectory("c")
        with pytest.raises(TrajectoryUnavailableError, match="last 2 of this client"):
            await client.fetch_trajectory("a")


# --- retries --------------------------------------------------------------------------------


async def test_faults_of_the_network_are_tried_again(autojump_clock):
    server = server_of(httpx.ReadError("cut"), httpx.ConnectError("no"), found())
    async with client_of(server, feed=False) as client:
        await run(client)
        await client.fetch_trajectory("r")
    first, second, third = server.times("trajectory")
    assert (second - first, third - second) == (pytest.approx(0.1), pytest.approx(0.5))


async def test_a_gateway_in_between_is_waited_for_within_bounds(autojump_clock):
    server = server_of(refused(503))
    async with client_of(server, feed=False) as client:
        await run(client)
        with pytest.raises(RolloutProtocolError, match="503, not 200"):
            await client.fetch_trajectory("r")
    times = server.times("trajectory")
    assert len(times) == 7
    assert times[-1] - times[0] == pytest.approx(15.75)


async def test_a_server_with_a_state_is_waited_for_as_long_as_a_lease(autojump_clock):
    server = server_of(httpx.ConnectError("no"), extensions=[*EXTENSIONS, DURABLE_RESULTS])
    async with client_of(server, feed=False) as client:
        await run(client)
        with pytest.raises(httpx.ConnectError):
            await client.fetch_trajectory("r")
    times = server.times("trajectory")
    assert 100 < times[-1] - times[0] < 120


# --- the real thing -------------------------------------------------------------------------


async def test_of_a_bulk_run_all_are_there(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path))
    draw = random.Random(1)
    ids = [draw.randrange(150_000) for _ in range(60_000)]  # several hundred KiB, hardly smaller
    request = RolloutInitRequest(
        rollout_id="g",
        initial_messages=prompt(answer=json.dumps(ids)),
        chat_completions_url=CHAT_URL,
        label="42",
    )
    async with served(make_app(local_backend(max_concurrent=4))) as url:
        async with RolloutClient(url=url) as client:
            async with client.run_groups([request], samples=4) as groups:
                (group,) = [each async for each in groups]
            for ended in group.finished:
                trajectory = await client.fetch_trajectory(ended.result.rollout_id)
                assert trajectory.document["steps"][1]["message"] == json.dumps(ids)
        assert {ended.result.rollout_id for ended in group.finished} == {f"g-{n}" for n in range(4)}


async def test_what_is_decompressed_is_bounded(monkeypatch, autojump_clock):
    monkeypatch.setattr("rollout.client.wire._LARGEST_RESULT", 1 << 20)
    data = gzip.compress(b'"' + b"x" * (1 << 20) + b'"')
    bomb = httpx.Response(200, content=data, headers={"content-encoding": "gzip"})

    async def answer(_):
        return httpx.Response(200, headers=bomb.headers, stream=httpx.ByteStream(data))

    async with client_of(server_of(answer), feed=False) as client:
        await run(client)
        with pytest.raises(RolloutProtocolError, match="more than 1 MiB"):
            await client.fetch_trajectory("r")


async def test_under_a_clock_that_jumps_nothing_is_kept(autojump_clock, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path))
    async with in_process(make_app()) as client:
        await client.run_rollout(prompt(), CHAT_URL, "r", label="42")
        with pytest.raises(TrajectoryUnavailableError, match="none was written"):
            await client.fetch_trajectory("r")
