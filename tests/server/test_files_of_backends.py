"""The server keeps trajectory and diagnostics of rollouts whose backend keeps none."""

from __future__ import annotations

import json

import pytest
from support import Compare, Script, make_app, prompt, served

from rollout import (
    ExecutionBackend,
    ExecutionOutcome,
    ExecutionResult,
    LocalBackend,
    RolloutSample,
)
from rollout.client import RolloutClient
from rollout.types import RolloutStatus


class Echo(ExecutionBackend):
    """Answers by itself, and has notes of its own."""

    async def execute(self, request):
        if request.label == "raise":
            raise RuntimeError("the simulator is gone")
        sample = RolloutSample(messages=[*request.prompt, {"role": "assistant", "content": "42"}])
        sample.reward = 1.0
        return ExecutionOutcome(
            workflow=ExecutionResult(
                status=RolloutStatus.SUCCESS, sample=sample, extra_fields={"simulator": "v2"}
            )
        )


async def run(app, **fields):
    async with served(app) as url, RolloutClient(url=url) as client:
        return await client.run_rollout(
            prompt(), "http://model/v1", "r", llm_api_key="secret-key", **fields
        )


def read(root, name):
    return json.loads((root / "r" / name).read_text())


async def test_the_files_of_a_backend_that_keeps_none(tmp_path):
    app = make_app(Echo(), artifact_root=tmp_path)
    await run(app, extra_fields={"source": "set 3"}, metadata={"level": 2})
    trajectory = read(tmp_path, "trajectory.json")
    assert [step["source"] for step in trajectory["steps"]] == ["user", "agent"]
    extra = trajectory["extra"]
    assert (extra["status"], extra["reward"], extra["metadata"]) == ("success", 1.0, {"level": 2})
    assert extra["osmosis"] == {"request_extra_fields": {"source": "set 3"}}
    notes = read(tmp_path, "diagnostics.json")
    assert notes["extra_fields"] == {"simulator": "v2"}
    assert notes["timings"]["total_sec"] >= 0


async def test_the_trajectory_can_be_fetched(tmp_path):
    app = make_app(Echo(), artifact_root=tmp_path)
    async with served(app) as url, RolloutClient(url=url) as client:
        await client.run_rollout(prompt(), "http://model/v1", "r", grade=False)
        trajectory = await client.fetch_trajectory("r")
    assert trajectory.document == read(tmp_path, "trajectory.json")


async def test_the_files_of_an_execution_that_raised(tmp_path):
    result = await run(make_app(Echo(), artifact_root=tmp_path), label="raise", grade=False)
    assert result.status is RolloutStatus.FAILURE
    notes = read(tmp_path, "diagnostics.json")
    assert notes["error"] == {"category": "agent_error", "message": "the simulator is gone"}
    assert read(tmp_path, "trajectory.json")["extra"]["error"] == notes["error"]


async def test_nothing_is_kept_where_nothing_is_to_be_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_ARTIFACT_ROOT", str(tmp_path))
    assert (await run(make_app(Echo(), artifact_root=False))).status is RolloutStatus.SUCCESS
    assert list(tmp_path.iterdir()) == []
    await run(make_app(Echo()))
    assert [each.name for each in tmp_path.iterdir()] == ["r"]


async def test_a_local_backend_keeps_the_extra_fields_of_its_requests(tmp_path):
    backend = LocalBackend(workflow=Script, grader=Compare, artifact_root=tmp_path)
    await run(make_app(backend), extra_fields={"source": "set 3"}, label="42")
    extra = read(tmp_path, "trajectory.json")["extra"]
    assert extra["osmosis"] == {"request_extra_fields": {"source": "set 3"}}


@pytest.mark.parametrize("name", ["trajectory.json", "diagnostics.json"])
async def test_no_key_is_in_the_files(tmp_path, name):
    await run(make_app(Echo(), artifact_root=tmp_path), extra_fields={"said": "secret-key"})
    assert "secret-key" not in (tmp_path / "r" / name).read_text()
