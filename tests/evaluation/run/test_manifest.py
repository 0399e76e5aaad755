"""What a run was started with, and what is refused later."""

from __future__ import annotations

import json

import httpx
import pytest
from evaluation.run.cases import config_of, keys, run_all, scripted, write_rows

from rollout.errors import EvaluationDamagedError, EvaluationError, EvaluationInputsChangedError
from rollout.evaluation import summarize
from rollout.evaluation.folder.journal import read_records
from rollout.evaluation.folder.manifest import read_manifest

BASE = {
    "n": 2,
    "agent_timeout_sec": 60,
    "chat": {"url": "http://chat/v1", "model": "m"},
    "dataset": {"rows": "0-1"},
}


@pytest.fixture
async def started(tmp_path, server):
    """A folder with a run that is complete."""
    config = config_of(tmp_path, server="http://fake", rows=scripted(4), **changed())
    run, _ = await run_all(config)
    return run


def changed(**changes):
    """The options of a run, some of them changed; a dict is merged."""
    options = {name: dict(v) if isinstance(v, dict) else v for name, v in BASE.items()}
    for name, value in changes.items():
        options[name] = {**options[name], **value} if isinstance(value, dict) else value
    return options


async def test_manifest(started, tmp_path):
    manifest = read_manifest(started.folder)
    assert manifest == started.manifest
    assert manifest["schema"] == "rollout-evaluation/1"
    assert manifest["created_at"].endswith("Z")
    assert manifest["dataset"].pop("digest")
    assert manifest["dataset"] == {
        "path": str(tmp_path / "rows.jsonl"),
        "format": "jsonl",
        "rows": 4,
        "selected": 2,
        "selection": "0-1",
        "limit": None,
        "columns": {
            "system_prompt": "system_prompt",
            "user_prompt": "user_prompt",
            "ground_truth": "ground_truth",
            "metadata": "metadata",
            "messages": "messages",
        },
        "encoding": "auto",
        "delimiter": ",",
    }
    assert manifest["server"] == {"url": "http://fake"}
    assert manifest["chat"] == {"url": "http://chat/v1", "model": "m"}
    assert manifest["run"] == {
        "n": 2,
        "agent_timeout_sec": 60,
        "grader_timeout_sec": None,
        "pass_threshold": 1.0,
        "until": None,
        "seed": None,
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n": 1}, ["run.n was 2 and is 1"]),
        ({"agent_timeout_sec": 61}, ["run.agent_timeout_sec was 60 and is 61"]),
        ({"agent_timeout_sec": None}, ["run.agent_timeout_sec was 60 and is not given"]),
        ({"grader_timeout_sec": 5}, ["run.grader_timeout_sec was not given and is 5"]),
        ({"chat": {"model": "k"}}, ['chat.model was "m" and is "k"']),
        (
            {"chat": {"url": "http://other/v1"}},
            ['chat.url was "http://chat/v1" and is "http://other/v1"'],
        ),
        (
            {"dataset": {"rows": "0,2-3"}},
            ['dataset.selection was "0-1" and is "0,2-3"', "dataset.selected was 2 and is 3"],
        ),
        (
            {"dataset": {"limit": 1}},
            ["dataset.selected was 2 and is 1", "dataset.limit was not given and is 1"],
        ),
        ({"dataset": {"encoding": "ascii"}}, ['dataset.encoding was "auto" and is "ascii"']),
        (
            {"dataset": {"columns": {"metadata": ""}}},
            ['dataset.columns.metadata was "metadata" and is ""'],
        ),
        ({"n": 1, "pass_threshold": 2}, ["run.n was 2 and is 1"]),
    ],
)
async def test_each_input_that_changes_is_named(started, tmp_path, changes, named):
    config = config_of(tmp_path, server="http://fake", **changed(**changes))
    before = (started.folder / "manifest.json").read_bytes()
    with pytest.raises(EvaluationInputsChangedError) as caught:
        await run_all(config)
    assert len(caught.value.changes) == len(named)
    for change, expected in zip(sorted(caught.value.changes), sorted(named), strict=True):
        assert change.startswith(expected)
        assert change in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert (started.folder / "manifest.json").read_bytes() == before
    run, records = await run_all(config, fresh=True)
    assert len(records) == run.progress.total


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"n": 4}, [(0, 2), (0, 3), (1, 2), (1, 3)]),
        ({"dataset": {"rows": None}}, [(2, 0), (2, 1), (3, 0), (3, 1)]),
        ({"dataset": {"rows": None, "limit": 3}}, [(2, 0), (2, 1)]),
        ({"dataset": {"rows": "3,0,1"}, "n": 3}, [(0, 2), (1, 2), (3, 0), (3, 1), (3, 2)]),
    ],
)
async def test_rows_and_attempts_are_added_to_a_run(started, tmp_path, changes, added):
    before = read_manifest(started.folder)
    config = config_of(tmp_path, server="http://fake", **changed(**changes))
    run, records = await run_all(config)
    assert keys(records) == added
    assert run.complete
    assert run.metrics.results.attempts.passed == 4 + len(added)
    assert run.manifest == read_manifest(run.folder)
    assert [run.manifest[name] for name in ("run_id", "created_at")] == [
        before[name] for name in ("run_id", "created_at")
    ]


async def test_another_threshold_scores_what_is_there_again(started, tmp_path):
    before = read_manifest(started.folder)
    rewards = [record.reward for record in read_records(started.folder)]
    for threshold in (0.25, 1.5, 1.0):
        config = config_of(tmp_path, server="http://fake", **changed(pass_threshold=threshold))
        run, records = await run_all(config)
        assert records == []
        passed = sum(reward >= threshold for reward in rewards)
        assert run.metrics.results.attempts.passed == passed
        assert [record.passed for record in read_records(run.folder)] == [
            reward >= threshold for reward in rewards
        ]
        manifest = read_manifest(run.folder)
        assert manifest["run"].pop("pass_threshold") == threshold
        assert manifest | {"run": manifest["run"] | {"pass_threshold": 1.0}} == before


async def test_other_bytes_and_another_server(started, tmp_path):
    write_rows(tmp_path / "rows.jsonl", scripted(5))
    config = config_of(tmp_path, server="http://other", **changed())
    with pytest.raises(EvaluationInputsChangedError) as caught:
        await run_all(config)
    names = {change.split()[0] for change in caught.value.changes}
    assert names == {"dataset", "dataset.rows", "server.url"}


@pytest.mark.parametrize("head", [True, False])
async def test_inputs_may_change_while_nothing_has_ended(tmp_path, server, head):
    """Who mends a config that could not work need not start anew."""
    server.healthy = httpx.ConnectError("no such host")
    wrong = config_of(tmp_path, server="http://fak", rows=scripted(4), **changed(n=3))
    with pytest.raises(EvaluationError, match="does not answer"):
        await run_all(wrong)
    first = read_manifest(wrong.run.output)
    if not head:
        (wrong.run.output / "events.jsonl").unlink()
    server.healthy = None
    run, records = await run_all(config_of(tmp_path, server="http://fake", **changed()))
    assert len(records) == 4
    assert run.manifest == read_manifest(run.folder)
    assert run.manifest["server"] == {"url": "http://fake"}
    assert run.manifest["run"]["n"] == 2
    # What the first process may have left on the server is found by the run's id.
    assert run.manifest["run_id"] == first["run_id"]


async def test_one_record_is_enough_to_refuse_other_inputs(tmp_path, server):
    async def end(rollout):
        return {"status": "cancelled"}

    server.end = end
    run, _ = await run_all(config_of(tmp_path, server="http://fake", rows=scripted(1), n=2))
    assert run.progress.settled == 0
    with pytest.raises(EvaluationInputsChangedError):
        await run_all(config_of(tmp_path, server="http://fake", n=1))


async def test_what_may_change(started, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "elsewhere" / "rows.ndjson")
    config = config_of(
        tmp_path,
        server="http://fake/",
        **changed(
            dataset={"path": str(tmp_path / "elsewhere" / "rows.ndjson")},
            max_in_flight=3,
            retry_setup_failures=2,
            breaker_failures=1,
            admission_timeout_sec=9,
        ),
    )
    run, records = await run_all(config)
    assert records == []
    assert run.manifest == started.manifest


def test_the_commit_of_a_dataset_is_on_record_and_its_bytes_decide(tmp_path):
    from rollout.evaluation.folder.manifest import check_unchanged, describe_inputs

    def inputs(revision, digest="d", split="train"):
        dataset = {"path": "hf://a/b", "split": split}
        config = config_of(tmp_path, server="http://fake/", **changed(dataset=dataset))
        facts = {"format": "jsonl", "digest": digest, "rows": 2, "selected": 2}
        return describe_inputs(config, revision=revision, **facts)

    first = inputs("0123")
    dataset = first["dataset"]
    assert (dataset["path"], dataset["revision"], dataset["split"]) == ("hf://a/b", "0123", "train")
    check_unchanged(tmp_path, first, inputs("4567"))
    with pytest.raises(EvaluationInputsChangedError, match=r"dataset changed: b \(d → e\)"):
        check_unchanged(tmp_path, first, inputs("4567", "e"))


async def test_file_of_an_app(tmp_path, server, monkeypatch):
    """The digest of the file that the server is started from is an input, its place is not."""
    from rollout.evaluation.folder.manifest import check_unchanged, describe_inputs

    def inputs(path):
        config = config_of(tmp_path, server={"app": f"{path}:app"})
        return describe_inputs(config, format="jsonl", digest="d", rows=1, selected=1)

    app = tmp_path / "app.py"
    app.write_text("app = 1")
    first = inputs(app)
    assert first["server"]["app"] == "app.py:app"
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "app.py"
    moved.write_text("app = 1")
    check_unchanged(tmp_path, first, inputs(moved))
    app.write_text("app = 2")
    with pytest.raises(
        EvaluationInputsChangedError,
        match=r"server file changed: app\.py \([0-9a-f]{8} → [0-9a-f]{8}\)",
    ):
        check_unchanged(tmp_path, first, inputs(app))
    with pytest.raises(EvaluationError, match=r"server\.app: .*gone\.py: No such file"):
        inputs(tmp_path / "gone.py")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"schema": "other"}',
        '{"schema": "rollout-evaluation/1"}',
        '{"schema": "rollout-evaluation/1", "run_id": "r", "dataset": {}, "server": {}, "run": 1}',
    ],
)
async def test_damaged_manifest(started, tmp_path, text):
    (started.folder / "manifest.json").write_text(text)
    with pytest.raises(EvaluationDamagedError, match=r"manifest\.json"):
        read_manifest(started.folder)
    with pytest.raises(EvaluationDamagedError):
        await run_all(config_of(tmp_path, server="http://fake", **changed()))
    assert (started.folder / "manifest.json").read_text() == text


@pytest.mark.parametrize("value", [None, "2", 2.0, True, 0, -1])
@pytest.mark.parametrize(("section", "name"), [("run", "n"), ("dataset", "selected")])
async def test_a_manifest_that_was_edited(started, tmp_path, section, name, value):
    manifest = json.loads(json.dumps(started.manifest))
    manifest[section][name] = value
    (started.folder / "manifest.json").write_text(json.dumps(manifest))
    words = rf"manifest\.json: {section}\.{name} must be a whole number from 1 up"
    with pytest.raises(EvaluationDamagedError, match=words):
        summarize(started.folder)
    with pytest.raises(EvaluationDamagedError, match=words):
        await run_all(config_of(tmp_path, server="http://fake", **changed()))


async def test_manifest_of_another_run(started, tmp_path):
    manifest = {**started.manifest, "run_id": "another"}
    (started.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EvaluationDamagedError, match="belongs to another run than the manifest"):
        await run_all(config_of(tmp_path, server="http://fake", **changed()))


def test_no_manifest(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EvaluationError, match="holds no evaluation"):
            read_manifest(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="holds no evaluation"):
        read_manifest(tmp_path / "file")
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(EvaluationError, match="directory"):
        read_manifest(tmp_path)
