"""Variables and secrets of a run's own server."""

from __future__ import annotations

import json
import os
import textwrap

import pytest
from attrs import evolve
from evaluation.run.cases import TESTS, config_of, run_all, scripted
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import EvaluationError, EvaluationInputsChangedError
from rollout.evaluation import SecretsConfig, evaluate
from rollout.evaluation.environment import parse_secrets, secrets_of

APP = """
    import os, sys
    from support import Script, local_backend, make_app

    class Workflow(Script):
        async def run(self, ctx):
            key, region = os.environ["SEARCH_KEY"], os.environ["REGION"]
            print(f"the key is {key} in {region}", flush=True)
            (ctx.artifacts_dir / "region").write_text(region)
            ctx.prompt[0] = {**ctx.prompt[0], "answer": f"{key} in {region}"}
            return await super().run(ctx)

    app = make_app(local_backend(Workflow))
"""
SECRET = "swordfish-of-search\nsecond line of it"


@pytest.fixture
def app(tmp_path, monkeypatch):
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("ROLLOUT_ARTIFACT_ROOT", raising=False)
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    file = tmp_path / "own_app.py"
    file.write_text(textwrap.dedent(APP))
    return file


def own(tmp_path, app, **env):
    config = config_of(tmp_path, server={"app": f"{app}:app"}, rows=scripted(1))
    return evolve(config, env=env, secrets=SecretsConfig(required=["SEARCH_KEY"]))


async def test_they_reach_the_server_and_secrets_are_nowhere_in_the_folder(tmp_path, app, caplog):
    config = own(tmp_path, app, REGION="eu")
    run, (record,) = await run_all(config, secrets={"SEARCH_KEY": SECRET})
    assert record.outcome == "success"
    document = json.loads((run.folder / "trajectories" / "0-0-0.json").read_text())
    assert document["steps"][-1]["message"] == "[redacted] in eu"
    assert "the key is [redacted]" in (run.folder / "server.log").read_text()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert "region" in {path.name for path in files}
    for path in files:
        assert b"swordfish" not in path.read_bytes(), path
        assert b"second line" not in path.read_bytes(), path
    assert "swordfish" not in repr(config) + repr(run) + caplog.text
    assert run.manifest["server"]["env"] == {"REGION": "eu"}
    assert run.manifest["server"]["secrets"] == ["SEARCH_KEY"]

    # Another value of a secret is the same run, another one of a variable is not.
    again, records = await run_all(config, secrets={"SEARCH_KEY": "another-value"})
    assert (records, again.manifest) == ([], run.manifest)
    for changed, change in (
        ({"REGION": "us"}, 'server.env.REGION was "eu" and is "us"'),
        ({}, 'server.env.REGION was "eu" and is not given'),
    ):
        with pytest.raises(EvaluationInputsChangedError) as caught:
            await run_all(evolve(config, env=changed), secrets={"SEARCH_KEY": SECRET})
        assert list(caught.value.changes) == [change]
    with pytest.raises(EvaluationInputsChangedError, match=r"server\.secrets was"):
        await run_all(evolve(config, secrets=SecretsConfig()))


async def test_a_value_that_is_missing_starts_nothing(tmp_path, app, monkeypatch):
    config = own(tmp_path, app, REGION="eu")
    with pytest.raises(EvaluationError, match="there is no value for SEARCH_KEY"):
        async with evaluate(config):
            pytest.fail("it started")
    assert not config.run.output.exists()
    monkeypatch.setenv("SEARCH_KEY", "from-the-environment")
    assert secrets_of(config, {}) == {"SEARCH_KEY": "from-the-environment"}
    assert secrets_of(config, {"SEARCH_KEY": "from-a-file"}) == {"SEARCH_KEY": "from-a-file"}


@pytest.mark.parametrize(
    ("value", "words"),
    [("hunter2", "too short to be blanked out .* put it into \\[env\\]"), ("a\0bcdefgh", "a NUL")],
)
def test_a_value_that_cannot_be_used(tmp_path, app, value, words):
    with pytest.raises(EvaluationError, match=f"the value of SEARCH_KEY .*{words}") as caught:
        secrets_of(own(tmp_path, app), {"SEARCH_KEY": value})
    assert value not in str(caught.value)


async def test_keys_come_from_the_same_values(tmp_path, server):
    bodies = []
    server.admit = bodies.append
    tables = {"url": "http://fake", "api_key_env": "OWN_SERVER_KEY"}
    chat = {"api_key_env": "OWN_CHAT_KEY"}
    config = config_of(tmp_path, server=tables, rows=scripted(1), chat=chat)
    keys = {"OWN_SERVER_KEY": "key-of-the-server", "OWN_CHAT_KEY": "key-of-the-chat"}
    await run_all(config, secrets=keys)
    assert [body["llm_api_key"] for body in bodies] == ["key-of-the-chat"]


TEXT = """
# a comment
A=plain
export B = 'single # quotes'
C="double=quotes"

D=
E="one
F=$A # kept
"""


def test_lines_of_a_secrets_file():
    assert parse_secrets(TEXT, "file") == {
        "A": "plain",
        "B": "single # quotes",
        "C": "double=quotes",
        "D": "",
        "E": '"one',
        "F": "$A # kept",
    }


@pytest.mark.parametrize("line", ["sk-live-1", "=sk-live-1", "A B=sk-live-1", "1A=sk-live-1"])
def test_a_line_that_is_none_is_named_and_not_repeated(line):
    with pytest.raises(EvaluationError) as caught:
        parse_secrets(f"A=b\n{line}\n", "my.env")
    assert str(caught.value) == "my.env, line 2: must be NAME=value, on one line"


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        values = parse_secrets(text, "file")
    except EvaluationError:
        return
    assert all(name.isidentifier() for name in values)


def test_a_config_that_names_no_secret_needs_none(tmp_path):
    config = config_of(tmp_path, server="http://fake", rows=scripted(1))
    assert secrets_of(config, {"OTHER": "x"}) == {}
