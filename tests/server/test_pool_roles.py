"""An application as the front of a pool, and as a worker of one."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest
from quart import abort
from support import in_process, local_backend, make_app

from rollout.cli.failures import CommandError
from rollout.cli.serve import make_front
from rollout.gateway import ModelGateway
from rollout.pool import PoolBackend, WorkerSource

KEY = "key-of-the-pool"


class NoWorkers(WorkerSource):
    async def run(self, workers):
        pass


async def test_a_front_has_the_queue_bound_and_not_the_lifespan_of_its_application():
    entered = []

    @asynccontextmanager
    async def lifespan(app):
        entered.append(app)
        yield

    backend = local_backend(max_queue_depth=7)
    app = make_app(backend, lifespan=lifespan)
    make_front(app, NoWorkers())
    async with in_process(app) as client:
        health = await client.health()
    assert health["max_queue_depth"] == 7
    assert health["workers"] == []
    assert app.registry.backend is app.backend
    assert app.backend.artifact_root == backend.artifact_root
    assert entered == []


def test_a_front_is_not_made_the_front_of_another_pool():
    app = make_app(PoolBackend(["http://127.0.0.1:1"]))
    with pytest.raises(CommandError, match="front of a pool already"):
        make_front(app, NoWorkers())


async def test_a_worker_asks_for_the_key_of_its_pool_alone_and_keeps_no_state(tmp_path):
    state = tmp_path / "state"
    app = make_app(api_key="key-of-the-application", state=state)

    @app.before_request
    async def refuse():
        abort(418)

    app.become_worker(KEY)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.serving(),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        for key, status in ((KEY, 200), ("key-of-the-application", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await http.get("/health", headers=headers)).status_code == status
    assert not state.exists()


@pytest.mark.parametrize(("most", "share"), [(None, None), (9, 3), (8, 2), (2, 1)])
def test_workers_share_the_calls_in_flight_to_an_endpoint(most, share):
    app = make_app(gateway=ModelGateway(max_calls_in_flight=most))
    app.become_worker(KEY, workers=3)
    assert app.gateway.bounds.maximum == share
