"""Whole runs against a real server: what is written, and that nothing runs twice."""

from __future__ import annotations

import json

from evaluation.run.cases import config_of, run_all, scripted
from support import make_app, served

from rollout.evaluation import read_records


def by_key(record):
    return record.key


async def test_complete_run(tmp_path):
    async with served(make_app()) as url:
        config = config_of(tmp_path, server=url, rows=scripted(3), n=2)
        run, records = await run_all(config)
    assert sorted(record.key for record in records) == [(r, a) for r in range(3) for a in (0, 1)]
    assert {record.outcome for record in records} == {"success"}
    assert sorted(read_records(run.folder), key=by_key) == sorted(records, key=by_key)
    assert run.metrics.to_dict() == json.loads((run.folder / "metrics.json").read_text())
