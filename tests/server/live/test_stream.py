"""What those who look on are sent: everything at first, then what has changed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from attrs import define, field
from feed.streaming import URL, OpenFeed, transport_of
from gateway.served import rig
from integrations.scripted import say
from server.faults import API_KEY, admission, admit, assert_refused, poll, served_http
from support import make_app, prompt

from rollout import RolloutContext
from rollout.client.wire import Wire
from rollout.server.live import LIVE_PATH, view
from rollout.types import RolloutInitRequest

MOST_ENDED = 7


@define
class Onlooker:
    """One who looks on, and puts together what it is sent."""

    feed: OpenFeed
    sections: dict[str, Any] = field(factory=dict)
    rows: dict[str, dict[str, Any]] = field(factory=dict)
    last: dict[str, Any] = field(factory=dict)

    async def update(self) -> dict[str, Any]:
        with trio.fail_after(60):
            self.last = await self.feed.line()
        for row in self.last["rows"]:
            self.rows[row["id"]] = row
        for gone in self.last["gone"]:
            self.rows.pop(gone, None)
        self.sections |= {n: v for n, v in self.last.items() if n not in {"rows", "gone"}}
        return self.last

    async def until(self, rollout_id: str, status: str) -> dict[str, Any]:
        while self.rows.get(rollout_id, {}).get("status") != status:
            await self.update()
        await self.update()  # a row may be newer than the figures of its line
        return self.rows[rollout_id]


@asynccontextmanager
async def looking_on(http: httpx.AsyncClient) -> AsyncGenerator[Onlooker, None]:
    wire = Wire(str(http.base_url).rstrip("/"), http)
    async with wire.stream(LIVE_PATH, None, read_timeout_sec=60) as answer:
        assert answer.status_code == 200
        yield Onlooker(OpenFeed(answer.data))


@asynccontextmanager
async def simulated(app: Any, room: float = 0) -> AsyncGenerator[httpx.AsyncClient, None]:
    """The application in process, on whatever clock there is."""
    async with (
        transport_of(app, room) as transport,
        httpx.AsyncClient(transport=transport, base_url=URL) as http,
    ):
        yield http


async def test_it_shows_a_rollout_from_its_admission_to_its_end(autojump_clock):
    async with simulated(make_app()) as http, looking_on(http) as live:
        first = await live.update()
        assert first["rows"] == []
        assert first["rollouts"]["active"] == first["rollouts"]["admitted"] == 0
        assert first["server"]["accepting"] is True
        assert first["slots"] == {"max_concurrent": 4, "queued": 0, "running": 0}
        assert first["workers"] is first["gateway"] is None
        rollout_id, lease = await admit(http, initial_messages=prompt(sleep=9), run="r-7")
        row = await live.until(rollout_id, "running")
        assert row["run"] == "r-7"
        assert row["admitted_at"] <= row["agent_started_at"] <= live.last["now"]
        assert live.sections["rollouts"]["running"] == live.sections["slots"]["running"] == 1
        await poll(http, rollout_id, lease)
        row = await live.until(rollout_id, "success")
        assert row["reward"] == 1.0
        assert 9 <= row["ended_at"] - row["admitted_at"] < 10
    sections = live.sections
    assert sections["rollouts"]["active"] == 0
    assert sections["rollouts"]["ended"] == 1
    assert sections["outcomes"] == {"success": 1}
    bounds = sections["durations"]["bounds_sec"]
    place = next(index for index, bound in enumerate(bounds) if bound >= 9)
    assert sections["durations"]["ran"]["counts"][place] == 1
    assert sections["history"]["mean_reward"][-1] == 1.0


async def test_a_failure_is_counted_by_its_category(autojump_clock):
    async with simulated(make_app()) as http, looking_on(http) as live:
        script = prompt(**{"raise": "x" * 1000})
        rollout_id, _ = await admit(http, initial_messages=script)
        row = await live.until(rollout_id, "failure")
        assert row["err_category"] == "agent_error"
        assert "reward" not in row
        assert row["err_message"].count("x") < 310
        assert live.sections["failures"] == {"agent_error": 1}


async def test_lines_are_a_second_apart_and_have_only_what_has_changed(autojump_clock):
    async with simulated(make_app()) as http, looking_on(http) as live:
        await live.update()
        ids = [(await admit(http, initial_messages=prompt(sleep=50)))[0] for _ in range(6)]
        last = live.last["now"]
        second = await live.update()
        assert second["now"] - last == pytest.approx(1, abs=0.01)
        assert [row["id"] for row in second["rows"]] == ids
        assert "server" not in second
        assert "outcomes" not in second
        started = trio.current_time()
        while (await live.update())["rows"]:
            pass
        # A server where nothing happens says so every few seconds.
        quiet = await live.update()
        while set(quiet) != {"now", "rows", "gone"}:
            quiet = await live.update()
        before = trio.current_time()
        assert before - started < 70
        await live.update()
        assert trio.current_time() - before == pytest.approx(5, abs=0.01)


async def test_one_who_comes_later_is_sent_all_that_is_shown(autojump_clock):
    async with simulated(make_app()) as http:
        running, _ = await admit(http, initial_messages=prompt(sleep=50))
        ended, lease = await admit(http)
        await poll(http, ended, lease)
        await poll(http, ended, lease)
        async with looking_on(http) as live:
            await live.update()
            assert set(live.rows) == {running, ended}
            assert live.rows[ended]["status"] == "success"


async def test_a_slow_reader_skips_states_and_gets_the_last(autojump_clock):
    app = make_app()
    async with simulated(app) as http, looking_on(http) as live:
        await live.update()
        rollout_id, lease = await admit(http, initial_messages=prompt(sleep=5))
        for _ in range(3):
            await poll(http, rollout_id, lease)
        await trio.sleep(30)
        assert app.live._watches
        seen = [row["status"] for _ in range(3) for row in (await live.update())["rows"]]
        # One line was on its way, and the next has the end: none has waited in between.
        assert seen[-1] == "success"
        assert len(seen) <= 2
    await trio.testing.wait_all_tasks_blocked()
    assert not app.live._watches


async def test_so_many_ended_rollouts_are_shown(autojump_clock, monkeypatch):
    monkeypatch.setattr(view, "MOST_ENDED", MOST_ENDED)
    app = make_app()
    async with simulated(app) as http, looking_on(http) as live:
        await live.update()
        ids = []
        for _ in range(MOST_ENDED + 5):
            request = RolloutInitRequest(**{**admission(), "llm_api_key": None})
            ids.append(app.registry.admit(request)[0].rollout_id)
        await app.registry.wait_idle()
        for _ in range(3):
            await live.update()
        assert len(live.rows) == MOST_ENDED
        assert set(live.rows) < set(ids)
        assert live.sections["rollouts"]["ended"] == MOST_ENDED + 5


async def test_a_cancelled_rollout_says_that_it_is_being_cancelled(autojump_clock):
    async with simulated(make_app()) as http, looking_on(http) as live:
        rollout_id, _ = await admit(http, initial_messages=prompt(sleep=50))
        await live.until(rollout_id, "running")
        await http.post("/rollout/cancel", json={"ids": [rollout_id]})
        row = await live.until(rollout_id, "cancelled")
        assert "cancelling" not in row
        assert live.sections["outcomes"] == {"cancelled": 1}


async def test_a_backend_whose_health_fails_is_shown_as_that(autojump_clock, caplog):
    app = make_app()

    def fail() -> dict[str, Any]:
        raise RuntimeError("odd")

    app.backend.health = fail
    async with simulated(app) as http, looking_on(http) as live:
        assert (await live.update())["server"]["status"] == "error"
    assert "the backend's health failed" in caplog.text


async def test_it_asks_for_the_key_and_ends_with_the_server():
    app = make_app(api_key=API_KEY)
    async with served_http(app) as http:
        assert_refused(await http.get(LIVE_PATH), 401)
        http.headers["Authorization"] = f"Bearer {API_KEY}"
        async with looking_on(http) as live:
            await live.update()
            app.request_shutdown()
            with pytest.raises(StopAsyncIteration):
                while True:
                    await live.update()
            assert live.sections["server"]["accepting"] is False


async def test_model_calls_are_shown_where_there_is_a_gateway():
    async def agent(context: RolloutContext) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            headers = {"Authorization": f"Bearer {context.api_key}"}
            url = f"{context.chat_completions_url}/chat/completions"
            (await http.post(url, json=body, headers=headers)).raise_for_status()

    async with (
        rig(agent, say("hello")) as run,
        httpx.AsyncClient(base_url=run.url, trust_env=False) as http,
    ):
        await run.run()
        async with looking_on(http) as live:
            shown = (await live.update())["gateway"]
    assert shown["answers"] == {"complete": 1}
    assert shown["latency_sec"] > 0
    assert shown["rollouts"] == 0
    assert set(shown) >= {"policy", "tokens", "flow"}
