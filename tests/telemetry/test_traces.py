"""Spans of rollouts, model calls and tools, as the SDK of OpenTelemetry gets them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
import trio
from gateway.served import KEY, QUESTION, post, workflow_of
from integrations.scripted import refuse, say, scripted_endpoint
from pool.helpers import TIMES, all_up, net
from support import CHAT_URL, Compare, fresh_id, local_backend, make_app, prompt, served
from telemetry.spans import recorded, sdk

from rollout._telemetry import names
from rollout.client import RolloutClient
from rollout.gateway import ModelGateway
from rollout.integrations.asyncio_bridge import open_asyncio_bridge
from rollout.integrations.chat import chat
from rollout.integrations.frameworks.adapters import trio_tool
from rollout.pool import PoolBackend

trace = pytest.importorskip("opentelemetry.trace")


@pytest.fixture
def spans(monkeypatch):
    with recorded(monkeypatch) as found:
        yield found


async def run(client: RolloutClient, **options: Any) -> Any:
    options = {"chat_completions_url": CHAT_URL, "initial_messages": [QUESTION], **options}
    options.setdefault("rollout_id", fresh_id("traced"))
    options.setdefault("grade", "label" in options)
    with trio.fail_after(60):
        return await client.run_rollout(**options)


USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


async def test_a_rollout_has_a_span_with_its_phases_its_calls_and_its_reward(spans):
    async def agent(context):
        await chat([QUESTION], model="gpt-4o")

    app = make_app(local_backend(workflow_of(agent), Compare))
    async with (
        scripted_endpoint(say("13", usage=USAGE)) as endpoint,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        rollout_id = fresh_id("traced")
        asked = {"chat_completions_url": endpoint.url, "llm_api_key": KEY, "run": "night"}
        result = await run(client, rollout_id=rollout_id, label="13", **asked)
        sent = endpoint.requests[0].headers["traceparent"]
    assert result.sample.reward == 1.0
    root = spans.one("invoke_agent")
    assert root.parent is None
    assert root.name.startswith("invoke_agent gateway.served:")
    attributes = dict(root.attributes)
    assert attributes.pop(names.AGENT_NAME) == app.backend.application
    assert attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": rollout_id,
        "rollout.run": "night",
        "rollout.status": "success",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 2,
    }
    (event,) = root.events
    assert event.name == "gen_ai.evaluation.result"
    assert dict(event.attributes) == {
        "gen_ai.evaluation.name": "reward",
        "gen_ai.evaluation.score.value": 1.0,
    }
    assert spans.children(root) == ["queue", "agent", "grading"]
    call = spans.one("chat gpt-4o")
    assert spans.children(spans.one("agent")) == [call.name]
    assert sent[:-2] == f"00-{call.context.trace_id:032x}-{call.context.span_id:016x}-"
    assert call.kind is trace.SpanKind.CLIENT
    assert call.attributes["gen_ai.provider.name"] == "openai"
    assert call.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert call.attributes["gen_ai.usage.output_tokens"] == 2
    assert call.attributes["server.port"] == httpx.URL(endpoint.url).port
    assert QUESTION["content"] not in repr([(s.name, dict(s.attributes)) for s in spans.all()])


async def test_failures_say_which_kind_they_are_and_nothing_else(spans):
    async def agent(context):
        await chat([QUESTION], model="gpt-4o")

    app = make_app(local_backend(workflow_of(agent), None))
    async with (
        scripted_endpoint(refuse(500, "the question was about 6 + 7")) as endpoint,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        asked = {"chat_completions_url": endpoint.url, "llm_api_key": KEY}
        await run(client, **asked)
    root, call = spans.one("invoke_agent"), spans.one("chat")
    assert root.attributes["error.type"] == "agent_error"
    assert call.attributes["error.type"] == "500"
    for span in (root, call):
        assert span.status.status_code is trace.StatusCode.ERROR
        assert span.status.description is None
        assert not span.events


@pytest.mark.parametrize("feed", [True, False])
async def test_each_rollout_is_below_the_span_of_who_asked_for_it(spans, feed):
    tracer = trace.get_tracer("trainer")

    async def ask(client, name):
        with tracer.start_as_current_span(name):
            await run(client, rollout_id=fresh_id(name), initial_messages=prompt())

    async with served(make_app()) as url, RolloutClient(url=url, feed=feed) as client:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, client, f"step-{number}")
        await run(client, rollout_id=fresh_id("alone"), initial_messages=prompt())
    for root in spans.named("invoke_agent"):
        name = root.attributes[names.CONVERSATION_ID].rpartition("-")[0]
        if name == "alone":
            assert root.parent is None
        else:
            caller = spans.one(name)
            assert root.parent.span_id == caller.context.span_id
            assert root.context.trace_id == caller.context.trace_id
            assert root.parent.is_remote
    assert len(spans.named("invoke_agent")) == 5


@pytest.mark.parametrize("value", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_traceparent_that_names_nothing_is_ignored(spans, value):
    body = {"rollout_id": fresh_id(), "initial_messages": [], "chat_completions_url": CHAT_URL}
    async with served(make_app()) as url, httpx.AsyncClient(base_url=url) as http:
        response = await http.post("/rollout", json=body, headers={"traceparent": value})
        assert response.status_code == 202
        bodies = {"rollouts": [{**body, "rollout_id": fresh_id()}], "traceparents": [value]}
        response = await http.post("/rollouts", json=bodies)
        assert response.json()["outcomes"][0]["status_code"] == 202
    assert [span.parent for span in spans.named("invoke_agent")] == [None, None]


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}])
async def test_traceparents_of_a_batch_are_a_list(value):
    body = {"rollout_id": fresh_id(), "initial_messages": [], "chat_completions_url": CHAT_URL}
    async with served(make_app()) as url, httpx.AsyncClient(base_url=url) as http:
        response = await http.post("/rollouts", json={"rollouts": [body], "traceparents": value})
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "traceparents"]


@pytest.mark.parametrize("own_span", [True, False])
async def test_a_gateway_has_the_span_of_a_call_below_that_of_the_agent(spans, own_span):
    async def agent(context):
        if not own_span:
            await post(context)  # a program that knows nothing of traces
            return
        with trace.get_tracer("agent").start_as_current_span("think"):
            await chat([QUESTION], model="gpt-4o")

    app = make_app(local_backend(workflow_of(agent), None), gateway=ModelGateway())
    async with (
        scripted_endpoint(say("13", usage=USAGE)) as endpoint,
        served(app) as url,
        RolloutClient(url=url) as client,
    ):
        await run(client, chat_completions_url=endpoint.url, llm_api_key=KEY)
        sent = endpoint.requests[0].headers["traceparent"]
    call = spans.one("chat gpt-4o")
    parent = spans.one("think") if own_span else spans.one("agent")
    assert call.parent.span_id == parent.context.span_id
    assert f"{call.context.span_id:016x}" in sent
    assert call.attributes["server.port"] == httpx.URL(endpoint.url).port
    assert call.context.trace_id == spans.one("invoke_agent").context.trace_id


async def test_a_trace_goes_through_a_front_to_its_worker(spans):
    async def agent(context):
        await post(context)

    async with net() as servers, scripted_endpoint(say("13")) as endpoint:
        backend = local_backend(workflow_of(agent), Compare)
        worker = await servers.serve(make_app(backend, gateway=ModelGateway(), **TIMES))
        pool = PoolBackend([worker.url])
        front = await servers.serve(make_app(pool))
        async with RolloutClient(url=front.url) as client:
            await all_up(pool, 1)
            with trace.get_tracer("trainer").start_as_current_span("step") as step:
                asked = {"chat_completions_url": endpoint.url, "llm_api_key": KEY}
                await run(client, label="13", **asked)
    at_front, at_worker = sorted(
        spans.named("invoke_agent"), key=lambda span: span.parent.span_id != step.context.span_id
    )
    assert at_front.parent.span_id == step.context.span_id
    assert at_worker.parent.span_id == at_front.context.span_id
    assert {span.context.trace_id for span in spans.all()} == {step.context.trace_id}
    assert [event.name for event in at_worker.events] == ["gen_ai.evaluation.result"]
    assert spans.one("chat")


async def test_a_tool_on_the_trio_side_has_a_span(spans):
    @trio_tool
    async def add(left: int, right: int) -> int:
        await trio.lowlevel.checkpoint()
        return left + right

    @trio_tool
    async def broken() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("the question was about 6 + 7")

    async def tools():
        with pytest.raises(ValueError, match="question"):
            await broken()
        return await add(6, 7)

    async def agent(context):
        async with open_asyncio_bridge() as bridge:
            assert await bridge.run(tools) == 13
        return [QUESTION, {"role": "assistant", "content": "13"}]

    app = make_app(local_backend(workflow_of(agent), None))
    async with served(app) as url, RolloutClient(url=url) as client:
        await run(client)
    assert sorted(spans.children(spans.one("agent"))) == ["execute_tool add", "execute_tool broken"]
    failed = spans.one("execute_tool broken")
    assert failed.attributes["error.type"] == "ValueError"
    assert failed.attributes["gen_ai.tool.name"] == "broken"
    assert not failed.events


async def test_who_is_cancelled_in_the_queue_has_no_agent_phase(spans):
    async with served(make_app(local_backend(max_concurrent=1))) as url:
        async with RolloutClient(url=url) as client, trio.open_nursery() as nursery:
            first, second = fresh_id("first"), fresh_id("second")
            asked = {"initial_messages": prompt(sleep=60)}
            nursery.start_soon(lambda: run(client, rollout_id=first, **asked))
            nursery.start_soon(lambda: run(client, rollout_id=second, **asked))
            while (await client.health())["concurrency"]["queued"] != 1:
                await trio.lowlevel.checkpoint()
            await client.cancel_rollouts(ids=[second, first])
    assert len(spans.named("queue")) == 2
    assert len(spans.named("agent")) == 1
    ends = [span.attributes["rollout.status"] for span in spans.named("invoke_agent")]
    assert ends == ["cancelled", "cancelled"]


def test_the_names_are_those_of_the_conventions():
    pytest.importorskip("opentelemetry.semconv")
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
    from opentelemetry.semconv.attributes import error_attributes, server_attributes

    known = {
        value
        for module in (gen_ai_attributes, error_attributes, server_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    ours = {getattr(names, name) for name in names.__all__}
    assert {name for name in ours if not name.startswith("rollout.")} - known == {
        names.EVALUATION_EVENT
    }


def test_the_library_imports_no_opentelemetry():
    code = """
import sys
import rollout.server, rollout.pool, rollout.integrations.chat
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- over the wire ----------------------------------------------------------------------------


@contextmanager
def otlp_receiver() -> Generator[tuple[str, list[Any]], None, None]:
    """A receiver of OTLP over HTTP on the loopback: its address, and the spans that came."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    came: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = service.ExportTraceServiceRequest.FromString(body)
            came.extend(
                span
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
        server.shutdown()
        thread.join()


async def test_spans_arrive_over_otlp(monkeypatch):
    exporters = pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        reason="needs pip install opentelemetry-exporter-otlp-proto-http",
    )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    with otlp_receiver() as (address, came):
        processor = BatchSpanProcessor(exporters.OTLPSpanExporter(endpoint=address))
        with sdk(monkeypatch, processor):
            async with served(make_app()) as url, RolloutClient(url=url) as client:
                await run(client, initial_messages=prompt(), label="42")
            await trio.to_thread.run_sync(processor.force_flush)
    by_name = {re.sub(" .*", "", span.name): span for span in came}
    assert by_name.keys() == {"invoke_agent", "queue", "agent", "grading"}
    root = by_name["invoke_agent"]
    phases = [span for span in came if span is not root]
    assert {span.parent_span_id for span in phases} == {root.span_id}
    (event,) = root.events
    scores = {each.key: each.value.double_value for each in event.attributes}
    assert scores["gen_ai.evaluation.score.value"] == 1.0
