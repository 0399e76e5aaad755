"""``rollout eval export``."""

from __future__ import annotations

import json
import sys

import pytest

parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")


def test_an_export_names_its_file_and_what_is_missing_in_it(cli, finished):
    done = cli("eval", "export", str(finished), "--to", "parquet")
    target = finished.with_name("finished.parquet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{target}\n", "")
    assert parquet.read_table(target)["reward"].to_pylist()[:4] == [1, 1, 0, 0]
    again = cli("eval", "export", str(finished), "--to", "parquet")
    assert again.exit_code == 2
    assert "finished.parquet exists; name another place with --output, or use --rep" in again.stderr
    (finished / "trajectories/0-0-0.json").unlink()
    done = cli("eval", "export", str(finished), "--to", "parquet", "--replace", "--json")
    missing = "row 0, attempt 0: The trajectory file is missing."
    assert json.loads(done.stdout) == {"target": str(target), "unread": [missing]}
    assert f"1 conversation could not be read, the first: {missing}" in done.stderr


def test_an_extra_that_is_not_installed(cli, finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = cli("eval", "export", str(finished), "--to", "wandb")
    assert done.exit_code == 2
    assert 'needs its extra: pip install "trio-rollout[wandb]"' in done.stderr
    assert "Traceback" not in done.stderr
