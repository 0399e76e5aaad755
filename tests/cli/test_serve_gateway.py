"""``rollout serve --gateway``, alone and with workers."""

from __future__ import annotations

import pytest
import trio
from cli.harness import serving
from gateway.served import KEY, QUESTION
from integrations.scripted import say, scripted_endpoint

from rollout.client import RolloutClient

APP = """
import os

from gateway.served import post, workflow_of
from support import local_backend, make_app


async def agent(context):
    assert "THE_KEY" not in os.environ
    for _ in range(3):
        calls = app.gateway.bounds.maximum
        if (await post(context, user=f"one of {calls}")).status_code != 200:
            return

app = make_app(local_backend(workflow_of(agent)), api_key="key-of-the-app")
"""


async def use(url):
    async with (
        scripted_endpoint(say("13")) as endpoint,
        RolloutClient(url=url, api_key="key-of-the-app") as client,
    ):
        with trio.fail_after(60):
            await client.resume_policy(version=2)
            result = await client.run_rollout(
                [QUESTION], endpoint.url, "r", llm_api_key=KEY, grade=False, limits={"calls": 2}
            )
        return result, [each.key for each in endpoint.requests]


@pytest.mark.parametrize("workers", [(), ("--workers", "1")], ids=["alone", "with a worker"])
def test_agents_are_recorded_and_limited_where_they_run(workers, tmp_path):
    (tmp_path / "gateway_app.py").write_text(APP)
    options = ("--bind", "127.0.0.1:0", "--gateway", *workers)
    with serving(tmp_path, "gateway_app.py:app", *options) as (_, url):
        result, keys = trio.run(use, url)
    assert keys == [KEY, KEY]
    assert result.sample.messages[-1]["content"] == "13"
    assert result.sample.metrics["limit_reached"] == "calls"
    assert result.sample.metrics["policy_version_min"] == 2


def test_workers_on_ray_have_what_their_application_has(cli, tmp_path):
    code = "from support import local_backend, make_app\napp = make_app(local_backend())"
    (tmp_path / "front.py").write_text(code)
    line = cli.fails(2, "serve", f"{tmp_path}/front.py:app", "--gateway", "--ray", "auto")
    assert "give the application a gateway" in line


def test_workers_have_no_address_in_common(cli, tmp_path):
    code = "gateway=ModelGateway(advertise_url='http://x'), configure_logging=False)"
    (tmp_path / "front.py").write_text(
        "from support import local_backend\nfrom rollout.gateway import ModelGateway\n"
        "from rollout.server import create_rollout_server\n"
        f"app = create_rollout_server(backend=local_backend(), {code}"
    )
    line = cli.fails(2, "serve", f"{tmp_path}/front.py:app", "--workers", "2")
    assert "advertise_url" in line


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["alone", "with workers"])
def test_upstreams_take_the_place_of_the_endpoint_of_requests(workers, tmp_path, monkeypatch):
    async def use_upstream():
        async with scripted_endpoint(say("13")) as upstream:
            (tmp_path / "gateway_app.py").write_text(APP)
            options = ("--upstream", upstream.url, "--upstream-key-env", "THE_KEY", *workers)
            await trio.to_thread.run_sync(serve_and_use, options)
            return [(each.key, each.body["user"]) for each in upstream.requests]

    def serve_and_use(options):
        options = ("--bind", "127.0.0.1:0", "--gateway", "--max-calls-in-flight", "3", *options)
        with serving(tmp_path, "gateway_app.py:app", *options) as (_, url):
            result, keys = trio.run(use, url)
        assert keys == []
        assert result.sample.metrics["calls"] == 2
        assert result.sample.metrics["model_wait_sec"] == 0.0

    monkeypatch.setenv("THE_KEY", "sk-of-the-upstream")
    share = "one of 1" if workers else "one of 3"
    assert trio.run(use_upstream) == [("sk-of-the-upstream", share)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--upstream", "http://one"), "--upstream goes with --gateway"),
        (("--max-calls-in-flight", "2"), "--max-calls-in-flight goes with --gateway"),
        (("--gateway", "--upstream", "one"), "--upstream must be an http://"),
        (("--gateway", "--upstream-key-env", "THE_KEY"), "goes with --upstream"),
        (("--gateway", "--upstream", "http://one", "--upstream-key-env", "THE_KEY"), "not set"),
        (("--gateway", "--max-calls-in-flight", "0"), "--max-calls-in-flight"),
    ],
)
def test_options_of_the_flow_are_checked(cli, tmp_path, monkeypatch, options, message):
    monkeypatch.delenv("THE_KEY", raising=False)
    code = "from support import local_backend, make_app\napp = make_app(local_backend())"
    (tmp_path / "plain.py").write_text(code)
    assert message in cli.fails(2, "serve", f"{tmp_path}/plain.py:app", *options)


def test_an_application_with_a_gateway_has_its_upstreams(cli, tmp_path):
    (tmp_path / "own.py").write_text(
        "from support import local_backend, make_app\nfrom rollout.gateway import ModelGateway\n"
        "app = make_app(local_backend(), gateway=ModelGateway())"
    )
    options = ("--gateway", "--upstream", "http://one")
    assert "a gateway of its own" in cli.fails(2, "serve", f"{tmp_path}/own.py:app", *options)
