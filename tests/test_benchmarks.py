"""The comparison runs and writes what it says; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = Path(__file__).parent.parent / "benchmarks" / "compare.py"
TINY = ("--rollouts=4", "--at-least-sec=0", "--limit-sec=10", "--rounds=1", "--traffic-rollouts=4")


def compare(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(COMPARE), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The JSON file of a tiny run of our own pair."""
    folder = tmp_path_factory.mktemp("results")
    work = ("--levels=1,2", "--scale-levels=", "--wall=3x0.05")
    run = compare("--quick", "--pairs=ours", "--no-plot", f"--output={folder}", *TINY, *work)
    assert run.returncode == 0, run.stdout + run.stderr
    (file,) = folder.iterdir()
    assert str(file) in run.stdout
    return json.loads(file.read_text())


def test_a_run_records_every_job(results):
    assert results["format"] == 1
    assert results["pairs"] == ["ours"]
    assert results["official"] is None
    assert results["ours"]["trio-rollout"]
    jobs = [
        (record["measure"], record["in_flight"], record["sleep_sec"])
        for record in results["records"]
    ]
    assert jobs == [
        ("throughput", 1, 0),
        ("throughput", 2, 0),
        ("traffic", 4, 0),
        ("traffic", 4, 1),
        ("wall", 3, 0.05),
    ]


def test_every_rollout_of_every_job_succeeds(results):
    for record in results["records"]:
        assert "error" not in record
        assert record["outcomes"] == {"success": record["finished"]}
        assert record["finished"] >= record["in_flight"]
        assert record["unfinished"] == 0
        assert not record["cut"]
        assert record["wall_sec"] > record["sleep_sec"]
        assert 0 < record["latency_p50_sec"] <= record["latency_p95_sec"]


def test_traffic_is_counted(results):
    quick, slow = (record for record in results["records"] if record["measure"] == "traffic")
    assert 1 <= quick["connections"] <= quick["requests"]
    assert quick["bytes_up"] > 0
    assert quick["bytes_down"] > 0
    assert slow["requests"] >= 2


def test_the_summary_has_a_row_for_each_work(results):
    rows = {(row["measure"], row["in_flight"], row["sleep_sec"]): row for row in results["summary"]}
    assert len(rows) == len(results["summary"]) == 5
    assert all(row["failed"] == 0 and row["errors"] == [] for row in rows.values())
    assert rows["throughput", 1, 0]["rollouts_per_sec"] > 0
    assert rows["traffic", 4, 0]["requests_per_rollout"] > 0


def test_targets_that_were_not_measured_are_neither_met_nor_missed(results):
    assert len(results["targets"]) == 9
    assert all(target["met"] is None for target in results["targets"])


def test_processor_time_and_memory_are_those_of_the_processes(results):
    if not Path("/proc/self/statm").exists():
        pytest.skip("there is no /proc here")
    for record in results["records"]:
        for side in ("server", "client"):
            assert record[f"{side}_cpu_sec"] >= 0
            assert record[f"{side}_peak_rss_kib"] >= record[f"{side}_idle_rss_kib"] > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pairs=official",), "--official-python is needed"),
        (("--pairs=nobody",), "choose from"),
        (("--pairs=ours,official", "--profile=server"), "take one pair"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    run = compare(*options)
    assert run.returncode == 2
    assert message in run.stderr


def test_an_official_python_without_the_package_is_named():
    run = compare("--pairs=official", f"--official-python={sys.executable}")
    if run.returncode != 2:
        pytest.skip("the official package is installed here")
    assert "osmosis-ai" in run.stdout


def test_a_profile_says_where_the_time_goes(tmp_path):
    run = compare(
        "--profile=server", "--profile-in-flight=2", "--profile-rollouts=4", f"--output={tmp_path}"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "h11" in run.stdout
    assert "by cumulative time" in run.stdout
    assert (tmp_path / "server.prof").exists()


@pytest.mark.parametrize("who", ["server", "client"])
def test_processor_time_is_split_by_layer(who):
    run = compare(f"--layers={who}", "--profile-in-flight=2", "--profile-rollouts=100")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Processor time of a rollout in our {who}" in run.stdout
    assert "trio: tasks and cancel scopes" in run.stdout
