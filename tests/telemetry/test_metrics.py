"""``GET /metrics``, read with the parser of prometheus-client; its page and its dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from feed.streaming import OpenFeed
from gateway.served import KEY, post, workflow_of
from integrations.scripted import refuse, say, scripted_endpoint
from pool.helpers import TIMES, all_up, net, until
from support import CHAT_URL, fresh_id, in_process, local_backend, make_app, prompt, served

from rollout import LocalBackend
from rollout.client import RolloutClient
from rollout.errors import InvalidFieldError
from rollout.gateway import ModelGateway
from rollout.pool import PoolBackend
from rollout.server.metrics import METRICS

pytest.importorskip("prometheus_client", reason='needs pip install "trio-rollout[metrics]"')

DOCS = Path(__file__).parents[2] / "docs"


async def scrape(where: httpx.AsyncClient | str) -> dict[tuple[str, ...], float]:
    """The samples of a server by name and values of labels, in the order of the labels' names."""
    from prometheus_client.parser import text_string_to_metric_families

    if isinstance(where, str):
        async with httpx.AsyncClient(base_url=where) as http:
            return await scrape(http)
    response = await where.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def run(client: RolloutClient, **options: Any) -> Any:
    options = {"chat_completions_url": CHAT_URL, "initial_messages": prompt(), **options}
    options.setdefault("rollout_id", fresh_id("metrics"))
    options.setdefault("grade", False)
    return await client.run_rollout(**options)


async def test_rollouts_are_counted_by_state_answer_status_and_time(autojump_clock):
    app = make_app(local_backend(max_concurrent=1, max_queue_depth=1))
    async with in_process(app) as client, trio.open_nursery() as nursery:
        http = client.http_client
        for _ in range(2):
            nursery.start_soon(lambda: run(client, initial_messages=prompt(sleep=20)))
        await trio.sleep(1)
        found = await scrape(http)
        assert found["rollout_active_rollouts", "running"] == 1
        assert found["rollout_active_rollouts", "queued"] == 1
        assert found["rollout_slots",] == 1
        body = {"initial_messages": [], "chat_completions_url": CHAT_URL, "rollout_id": "late"}
        assert (await http.post("/rollout", json=body)).status_code == 429
        await trio.sleep(60)
        await run(client, initial_messages=prompt(**{"raise": "oh"}))
        found = await scrape(http)
    assert {v for k, v in found.items() if k[0] == "rollout_active_rollouts"} == {0}
    assert found["rollout_admissions_total", "202"] == 3
    assert found["rollout_admissions_total", "429"] == 1
    assert found["rollout_results_total", "", "success"] == 2
    assert found["rollout_results_total", "agent_error", "failure"] == 1
    assert found["rollout_queue_duration_seconds_count",] == 3
    assert found["rollout_queue_duration_seconds_sum",] == pytest.approx(20)
    assert found["rollout_queue_duration_seconds_bucket", "10.0"] == 2
    assert found["rollout_queue_duration_seconds_bucket", "30.0"] == 3
    assert found["rollout_run_duration_seconds_sum",] == pytest.approx(40)
    assert found["rollout_run_duration_seconds_bucket", "+Inf"] == 3


async def test_who_is_cancelled_in_the_queue_or_loses_its_lease_is_counted(autojump_clock):
    times = {"polling_lease_timeout_sec": 5, "result_wait_timeout_sec": 1}
    async with in_process(make_app(local_backend(max_concurrent=1), **times)) as client:
        http = client.http_client
        for name in ("first", "second"):
            body = {"initial_messages": prompt(sleep=99), "chat_completions_url": CHAT_URL}
            body |= {"rollout_id": name, "grade": False}
            assert (await http.post("/rollout", json=body)).is_success
        await http.post("/rollout/cancel", json={"ids": ["second"]})
        await trio.sleep(30)
        found = await scrape(http)
    assert found["rollout_lease_expirations_total",] == 1
    assert found["rollout_results_total", "lease_expired", "failure"] == 1
    assert found["rollout_results_total", "", "cancelled"] == 1
    assert found["rollout_queue_duration_seconds_count",] == 1
    assert found["rollout_run_duration_seconds_count",] == 1


async def test_everything_a_server_can_have_is_in_its_metrics_and_on_the_page(tmp_path):
    async def agent(context):
        assert (await post(context)).is_success
        await post(context)

    steps = (say("13", usage={"prompt_tokens": 5, "completion_tokens": 2}), refuse(400))
    backend = LocalBackend(workflow=workflow_of(agent), artifact_root=tmp_path / "files")
    app = make_app(
        backend, gateway=ModelGateway(), state=tmp_path / "state.sqlite", watchdog_sec=0.01
    )
    app.gateway.policy.resume(7)
    async with scripted_endpoint(*steps) as endpoint, served(app) as url:
        async with RolloutClient(url=url) as client:
            await run(client, chat_completions_url=endpoint.url, llm_api_key=KEY)
            found = await scrape(url)
    assert found["rollout_model_calls_total", "complete"] == 1
    assert found["rollout_model_calls_total", "failed"] == 1
    assert found["rollout_model_tokens_total", "input"] == 5
    assert found["rollout_model_tokens_total", "output"] == 2
    assert found["rollout_model_call_duration_seconds_count",] == 2
    assert found["rollout_model_calls_in_flight",] == 0
    assert found["rollout_policy_version",] == 7
    assert found["rollout_feed_connections",] == 1
    assert found["rollout_state_commits_total", "kept"] >= 2
    assert found["rollout_file_writes_total", "written"] == 1
    assert found["rollout_event_loop_lag_seconds_count",] >= 1
    names = {re.sub("_(bucket|sum|count)$", "", name) for name, *_ in found}
    assert names == set(METRICS) - {"rollout_workers"}


async def test_a_front_shows_what_its_workers_have_counted_also_those_that_are_gone():
    async def agent(context):
        await post(context)

    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    async with net() as servers, scripted_endpoint(*[say("13", usage=usage)] * 2) as endpoint:
        workers = [
            await servers.serve(
                make_app(local_backend(workflow_of(agent), None), gateway=ModelGateway(), **TIMES)
            )
            for _ in range(2)
        ]
        backend = PoolBackend([worker.url for worker in workers])
        front = await servers.serve(make_app(backend))
        async with RolloutClient(url=front.url) as client:
            await all_up(backend, 2)
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    asked = {"chat_completions_url": endpoint.url, "llm_api_key": KEY}
                    nursery.start_soon(lambda asked=asked: run(client, **asked))
            await until(lambda: backend.health()["counts"].get("model_tokens.input") == 10, backend)
            await workers[0].kill()
            await until(lambda: backend._workers is not None and not all_are_up(backend), backend)
            found = await scrape(front.url)
    assert found["rollout_workers", "up"] == 1
    assert found["rollout_policy_paused",] == 0
    assert found["rollout_model_calls_total", "complete"] == 2
    assert found["rollout_model_call_duration_seconds_count",] == 2
    assert found["rollout_results_total", "", "success"] == 2


async def test_what_a_drained_worker_has_counted_last_is_not_lost(monkeypatch):
    monkeypatch.setattr("rollout.pool.worker.HEALTH_SEC", 3600)  # it would be seen by chance

    async def agent(context):
        await post(context)

    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    async with net() as servers, scripted_endpoint(say("13", usage=usage)) as endpoint:
        worker = await servers.serve(
            make_app(local_backend(workflow_of(agent), None), gateway=ModelGateway(), **TIMES)
        )
        backend = PoolBackend([worker.url])
        front = await servers.serve(make_app(backend))
        async with RolloutClient(url=front.url) as client:
            await all_up(backend, 1)
            await run(client, chat_completions_url=endpoint.url, llm_api_key=KEY)
            (member,) = workers = backend._workers
            workers.drain(member)
            await workers.drained(member)
            workers.lose(member, "it was drained")
            assert backend.health()["counts"]["model_tokens.input"] == 5
            async with client._wire.stream("/rollouts/live", None, read_timeout_sec=60) as answer:
                line = await OpenFeed(answer.data).line()
    assert line["gateway"] == {
        "answers": {"complete": 1},
        "tokens": {"input": 5, "output": 2},
        "latency_sec": line["gateway"]["latency_sec"],
    }


def all_are_up(backend: PoolBackend) -> bool:
    return all(each["status"] == "up" for each in backend.health()["workers"])


async def test_metrics_need_the_key_and_can_be_left_out():
    app = make_app(api_key="the-key-of-the-server", metrics=True)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/metrics")).status_code == 401
        http.headers["Authorization"] = "Bearer the-key-of-the-server"
        assert ("rollout_slots",) in await scrape(http)
    switched_off = make_app(metrics=True)
    switched_off.serve_metrics(False)
    for off in (make_app(metrics=False), switched_off):
        async with served(off) as url, httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/metrics")).status_code == 404


async def test_without_the_extra_nothing_is_served_and_who_wants_it_reads_how(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidFieldError, match=r'pip install "trio-rollout\[metrics\]"'):
        make_app(metrics=True)
    app = make_app()

    @app.get("/metrics")
    async def own() -> str:
        await trio.lowlevel.checkpoint()
        return "the application's own"

    async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/metrics")).text == "the application's own"


async def test_a_backend_whose_counts_are_no_numbers_breaks_nothing():
    backend = local_backend()
    backend.health = lambda: {"counts": {"files.written": "many", "x": [1]}, "workers": 3}
    async with served(make_app(backend)) as url, httpx.AsyncClient(base_url=url) as http:
        assert ("rollout_feed_connections",) in await scrape(http)


def test_the_page_lists_all_metrics():
    page = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(rollout_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", page, re.MULTILINE)
    assert rows == [
        (name, each.kind, ", ".join(f"`{label}`" for label in each.labels), each.text)
        for name, each in METRICS.items()
    ]


def test_the_dashboard_shows_every_metric_and_no_other_with_labels_that_it_has():
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    shown = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"rollout_\w+", target["expr"])
            name = re.sub("_bucket$", "", name)
            shown.add(name)
            labels = {label for found in re.findall(r"by \(([^)]*)\)", target["expr"])
                      for label in found.split(", ")}  # fmt: skip
            assert labels - {"le"} <= set(METRICS[name].labels), name
    assert shown == set(METRICS)
