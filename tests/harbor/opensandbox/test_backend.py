"""OpenSandbox through `HarborBackend`: what its caller gets, and what is left for an operator."""

from __future__ import annotations

import json
import threading

import pytest

from rollout.backend.harbor import HarborBackend
from rollout.types import ExecutionRequest, RolloutErrorCategory, RolloutStatus

pytestmark = [pytest.mark.harbor, pytest.mark.filterwarnings("ignore::DeprecationWarning:harbor")]


@pytest.fixture
def make_backend(task, tmp_path):
    def make(server, image_bindings=None, **kwargs):
        return HarborBackend(
            image_bindings=image_bindings,
            agent="oracle",
            tasks_dir=task.parent,
            task_mode="dataset",
            environment={"opensandbox": {"api_key": server.api_key} | kwargs},
            artifact_root=tmp_path / "kept",
            trials_dir=tmp_path / "trials",
        )

    return make


async def run(backend):
    request = ExecutionRequest(
        id="r1",
        prompt=[{"role": "user", "content": "hi"}],
        metadata={"harbor_task_id": "answer"},
    )
    async with backend.running():
        return (await backend.execute(request)).result


async def test_to_a_verified_reward(server, make_backend, monkeypatch):
    monkeypatch.setenv("OPENSANDBOX_DOMAIN", f"http://{server.domain}")
    result = await run(make_backend(server))
    assert (result.status, result.sample.reward) == (RolloutStatus.SUCCESS, 1.0)
    (sandbox,) = server.sandboxes.values()
    assert sandbox.killed


async def test_a_published_image_runs_in_place_of_the_tasks_own(
    server, task, make_backend, monkeypatch
):
    monkeypatch.setenv("OPENSANDBOX_DOMAIN", f"http://{server.domain}")
    (task / "task.toml").write_text('[environment]\nworkdir = "/app"\n')
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    image = f"registry.example/answer@sha256:{'0a' * 32}"
    backend = make_backend(server, {"answer": image})
    assert (await run(backend)).sample.reward == 1.0
    async with backend.running():
        report = await backend.prewarm("healthcheck")
    assert (report.tried, report.failed) == (["answer"], {})
    images = [sandbox.request["image"] for sandbox in server.sandboxes.values()]
    assert images == [{"uri": image}] * 2
    assert image not in (task / "task.toml").read_text()


async def test_a_wrong_key_is_an_error_of_the_provider(
    server, make_backend, monkeypatch, no_waits, tmp_path
):
    monkeypatch.setenv("OPENSANDBOX_DOMAIN", f"http://{server.domain}")
    result = await run(make_backend(server, api_key="a-key-of-nobody"))
    assert result.status is RolloutStatus.FAILURE
    assert result.err_category is RolloutErrorCategory.HTTP_ERROR
    kept = [path.read_bytes() for path in tmp_path.joinpath("kept").rglob("*") if path.is_file()]
    assert kept
    assert not any(b"a-key-of-nobody" in data for data in kept)


async def test_a_sandbox_that_may_still_be_there_is_named(
    server, make_backend, monkeypatch, tmp_path
):
    server.hold = threading.Event()
    monkeypatch.setenv("OPENSANDBOX_DOMAIN", f"http://{server.domain}")
    monkeypatch.setenv("OPENSANDBOX_REQUEST_TIMEOUT_SEC", "1")
    try:
        result = await run(make_backend(server))
    finally:
        server.hold.set()
    assert result.err_category is RolloutErrorCategory.TIMEOUT
    diagnostics = json.loads((tmp_path / "kept" / "r1" / "diagnostics.json").read_bytes())
    note = diagnostics["harbor"]["leftover"]["opensandbox"]
    assert note["may_still_run"] is True
    assert server.domain in note["domain"]
