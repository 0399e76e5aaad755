"""A rollout's conversation, as it unfolds and once it has ended."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import trio
from feed.streaming import OpenFeed
from pool.helpers import machines, start
from server.faults import LLM_KEY, admit, assert_refused, served_http
from server.live.test_stream import simulated
from support import Compare, Script, local_backend, make_app, prompt

from rollout import AgentWorkflow, SampleSource, get_rollout_context
from rollout.client.wire import Wire
from rollout.integrations.chat import get_recorder
from rollout.integrations.recording.calls import read_body
from rollout.types import RolloutSample


class Talk(AgentWorkflow[Any]):
    """Says two things, each when a test lets it, in answer to what a tool said before."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)

    steps: list[trio.Event] = []  # noqa: RUF012 - set by the test

    async def run(self, ctx: Any) -> None:
        messages = list(ctx.prompt)
        for number, step in enumerate(self.steps):
            call = get_recorder().start(
                {"model": "policy", "messages": messages},
                api="chat",
                conversation="main",
                at=datetime.now(UTC),
            )
            await step.wait()
            reply = {"role": "assistant", "content": f"step {number}, with {LLM_KEY}"}
            body = {"id": f"c{number}", "choices": [{"index": 0, "message": reply}]}
            get_recorder().finish(call, read_body(body, "chat"), 0.5)
            messages = [*messages, reply, {"role": "user", "content": "go on"}]


def talk_app(count: int = 2) -> tuple[Any, list[trio.Event]]:
    steps = [trio.Event() for _ in range(count)]
    workflow = type("Told", (Talk,), {"steps": steps})
    return make_app(local_backend(workflow, Compare)), steps


class Conversation:
    """Puts together what a stream sends."""

    def __init__(self, data: Any) -> None:
        self.feed = OpenFeed(data)
        self.steps: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}

    async def update(self) -> dict[str, Any]:
        with trio.fail_after(60):
            self.last = await self.feed.line()
        self.steps[self.last["from"] :] = self.last["steps"]
        return self.last

    @property
    def texts(self) -> list[str]:
        return [step["t"] for step in self.steps]


def follow(http: Any, rollout_id: str) -> Any:
    wire = Wire(str(http.base_url).rstrip("/"), http)
    return wire.stream(f"/rollout/{rollout_id}/live", None, read_timeout_sec=60)


async def test_it_unfolds_and_ends_with_the_rollout(autojump_clock):
    app, (first, second) = talk_app()
    async with simulated(app) as http:
        rollout_id, _ = await admit(http)
        async with follow(http, rollout_id) as answer:
            live = Conversation(answer.data)
            await live.update()
            while live.last.get("calls_in_flight") != 1:
                await live.update()
            assert live.texts == ["What is 6 * 7?"]
            first.set()
            while len(live.steps) < 2:
                await live.update()
            assert live.texts[1] == "step 0, with [redacted]"
            assert live.steps[1]["s"] == "agent"
            second.set()
            while live.last["status"] != "success":
                await live.update()
            assert [text.partition(",")[0] for text in live.texts][1::2] == ["step 0", "step 1"]
            assert await live.feed.rest() == []


async def test_without_a_recorder_it_is_known_at_the_end(autojump_clock):
    app = make_app(local_backend(Script, Compare))
    async with simulated(app) as http:
        rollout_id, _ = await admit(http, initial_messages=prompt(sleep=3))
        async with follow(http, rollout_id) as answer:
            live = Conversation(answer.data)
            await live.update()
            while live.last["status"] != "running":
                await live.update()
            assert "not recorded" in live.last["note"]
            assert live.texts == ["What is 6 * 7?"]
            while live.last["status"] != "success":
                await live.update()
            assert live.texts == ["What is 6 * 7?", "42"]
            assert "note" not in live.last


class Own(SampleSource):
    """Shows its last message, or fails to."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.error: Exception | None = None

    async def get_sample(self) -> RolloutSample:
        return RolloutSample(messages=list(self.said))

    async def get_preview(self, max_messages: int) -> RolloutSample | None:
        assert max_messages > 1
        if self.error is not None:
            raise self.error
        return RolloutSample(
            messages=self.said[-1:], extra_fields={"_preview_truncated": len(self.said) > 1}
        )


def own_app(source: Own, over: trio.Event, *, watched: bool = True) -> Any:
    class Speak(AgentWorkflow[Any]):
        async def run(self, ctx: Any) -> None:
            context = get_rollout_context()
            assert context is not None
            context.preview_enabled = watched
            context.set_sample_source(source)
            await over.wait()

    return make_app(local_backend(Speak, Compare))


async def test_a_sample_source_may_show_its_last_messages(autojump_clock):
    source, over = Own(), trio.Event()
    async with simulated(own_app(source, over)) as http:
        rollout_id, _ = await admit(http)
        async with follow(http, rollout_id) as answer:
            live = Conversation(answer.data)
            source.said.append({"role": "assistant", "content": f"one, with {LLM_KEY}"})
            while live.texts != ["one, with [redacted]"]:
                await live.update()
            assert "note" not in live.last
            source.said.append({"role": "assistant", "content": "two"})
            while live.texts != ["two"]:
                await live.update()
            assert "before these" in live.last["note"]
            source.error = ValueError("odd")
            while "failed: ValueError" not in live.last.get("note", ""):
                await live.update()
            source.error = None
            over.set()
            while live.last["status"] != "success":
                await live.update()
            assert len(live.steps) == 2
            assert await live.feed.rest() == []


async def test_a_rollout_that_is_not_to_be_watched(autojump_clock):
    source, over = Own(), trio.Event()
    source.said.append({"role": "assistant", "content": "private"})
    async with simulated(own_app(source, over, watched=False)) as http:
        rollout_id, _ = await admit(http)
        async with follow(http, rollout_id) as answer:
            live = Conversation(answer.data)
            while "nobody watch" not in live.last.get("note", ""):
                await live.update()
            assert live.texts == ["What is 6 * 7?"]


async def test_a_rollout_that_is_unknown_is_refused():
    async with served_http(make_app()) as http:
        detail = assert_refused(await http.get("/rollout/nobody/live"), 404)
        assert "there is no such rollout" in detail


async def test_a_front_passes_on_what_its_worker_streams(autojump_clock):
    app, (first, second) = talk_app()
    async with machines(app) as (client, _, _):
        handle = await start(client, "talk")
        wire = Wire("http://front.test", client.http_client)
        async with wire.stream("/rollout/talk/live", None, read_timeout_sec=60) as answer:
            live = Conversation(answer.data)
            await live.update()
            first.set()
            while len(live.steps) < 2:
                await live.update()
            assert live.texts[1].startswith("step 0")
            second.set()
            while live.last["status"] != "success":
                await live.update()
            await handle
        async with wire.stream("/rollouts/live", None, read_timeout_sec=60) as answer:
            line = await OpenFeed(answer.data).line()
        (row,) = line["rows"]
        assert (row["id"], row["worker"]) == ("talk", "127.0.0.1:80")
        assert row["reward"] == 0.0
