"""The config: read from a file, overridden, and refused with every problem by its name."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import EvaluationError, InvalidBodyError, InvalidFieldError
from rollout.evaluation import (
    ChatConfig,
    DatasetConfig,
    EvaluationConfig,
    RunConfig,
    SecretsConfig,
    ServerConfig,
    load_config,
)
from rollout.evaluation.config import parse_config
from rollout.evaluation.names import RUN_NAME

MINIMAL = {
    "server": {"url": "http://127.0.0.1:8000"},
    "chat": {"url": "http://127.0.0.1:9000/v1"},
    "dataset": {"path": "rows.jsonl"},
    "run": {"output": "out"},
}


def with_value(section, name, value):
    tables = copy.deepcopy(MINIMAL)
    if name == "app":
        del tables["server"]["url"]
    tables[section][name] = value
    return tables


def problems_of(tables) -> list[str]:
    with pytest.raises(InvalidBodyError) as caught:
        parse_config(tables)
    return [str(problem) for problem in caught.value.problems]


def write(folder, text):
    path = folder / "eval.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


FULL = """
[server]
app = "server.py:app"
api_key_env = "SERVER_KEY"
[chat]
url = "https://models.example/v1"
api_key_env = "CHAT_KEY"
model = "m"
[dataset]
path = "data/rows.csv"
format = "csv"
delimiter = ";"
columns = { user_prompt = "question", ground_truth = "answer" }
limit = 10
rows = "0-99"
[run]
output = "../runs/one"
n = 4
max_in_flight = 32
agent_timeout_sec = 600
grader_timeout_sec = 60.5
pass_threshold = 0.5
retry_setup_failures = 2
breaker_failures = 5
"""


OWN = {**MINIMAL, "server": {"app": "module:app"}}


# --- what is taken ----------------------------------------------------------------------------


def test_a_full_file(tmp_path):
    config = load_config(write(tmp_path, FULL))
    assert config.server == ServerConfig(app=f"{tmp_path}/server.py:app", api_key_env="SERVER_KEY")
    assert config.chat == ChatConfig(
        url="https://models.example/v1", api_key_env="CHAT_KEY", model="m"
    )
    assert config.dataset.path == tmp_path / "data/rows.csv"
    assert config.dataset.columns.user_prompt == "question"
    assert config.dataset.columns.metadata == "metadata"
    assert config.run == RunConfig(
        output=tmp_path.parent / "runs/one", n=4, max_in_flight=32, agent_timeout_sec=600,
        grader_timeout_sec=60.5, pass_threshold=0.5, retry_setup_failures=2, breaker_failures=5,
    )  # fmt: skip


def test_the_shortest_file_has_the_documented_defaults():
    config = parse_config(MINIMAL)
    assert (config.run.n, config.run.max_in_flight, config.run.breaker_failures) == (1, None, 20)
    assert config.run.pass_threshold == 1.0
    assert config.run.agent_timeout_sec is config.dataset.limit is config.chat.model is None


@pytest.mark.parametrize("app", ["package.module:make_app", "module:app"])
def test_a_module_is_no_path(tmp_path, app):
    text = FULL.replace("server.py:app", app)
    assert load_config(write(tmp_path, text)).server.app == app


def test_absolute_paths_and_homes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    text = FULL.replace("data/rows.csv", "/data/rows.csv").replace("../runs/one", "~/runs")
    config = load_config(write(tmp_path, text))
    assert config.dataset.path == Path("/data/rows.csv")
    assert config.run.output == Path("/home/somebody/runs")


def test_a_home_of_nobody_is_a_name(tmp_path):
    config = load_config(write(tmp_path, FULL.replace("../runs/one", "~no-such-user-here/runs")))
    assert config.run.output == tmp_path / "~no-such-user-here/runs"


def test_a_byte_order_mark_and_crlf(tmp_path):
    data = b"\xef\xbb\xbf" + FULL.replace("\n", "\r\n").encode()
    assert load_config(write(tmp_path, data)).run.n == 4


def test_overrides_are_relative_to_the_current_folder(tmp_path):
    overrides = {"dataset": {"path": "other.jsonl"}, "run": {"output": "elsewhere", "n": 2}}
    config = load_config(write(tmp_path, FULL), overrides)
    assert config.dataset.path == Path("other.jsonl")
    assert (config.run.output, config.run.n) == (Path("elsewhere"), 2)
    assert config.run.max_in_flight == 32


def test_a_url_replaces_an_app_and_the_other_way_round(tmp_path):
    path = write(tmp_path, FULL)
    config = load_config(path, {"server": {"url": "http://h"}})
    assert (config.server.url, config.server.app) == ("http://h", None)
    path = write(tmp_path, FULL.replace('app = "server.py:app"', 'url = "http://h"'))
    config = load_config(path, {"server": {"app": "m:a"}})
    assert (config.server.url, config.server.app) == (None, "m:a")


def test_overrides_can_be_whole_sections(tmp_path):
    path = write(tmp_path, "")
    assert load_config(path, MINIMAL) == parse_config(MINIMAL)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name", "value", "reason"),
    [
        ("server", "url", "ftp://host", "must be an http:// or https:// URL"),
        ("server", "url", "http://", "must be an http:// or https:// URL"),
        ("server", "url", "http://h?x=1", "must have no query"),
        ("server", "url", "http://[", "cannot be read as a URL"),
        ("server", "url", "http://h:port", "cannot be read as a URL"),
        ("server", "url", 7, "must be a string"),
        ("server", "app", "module", "must be MODULE:APP or FILE.py:APP"),
        ("server", "app", ":app", "must be MODULE:APP or FILE.py:APP"),
        ("server", "app", "server.py:", "must be MODULE:APP or FILE.py:APP"),
        ("server", "app", "a\0b:app", "must be MODULE:APP or FILE.py:APP"),
        ("server", "workers", 0, 'must be a whole number from 1 up, or "auto"'),
        ("server", "workers", True, 'must be a whole number from 1 up, or "auto"'),
        ("server", "workers", 1.5, 'must be a whole number from 1 up, or "auto"'),
        ("server", "workers", "4", 'must be a whole number from 1 up, or "auto"'),
        ("server", "api_key_env", "sk-1", "takes the name of an environment variable"),
        ("server", "api_key_env", "", "takes the name of an environment variable"),
        ("chat", "url", "localhost:9000/v1", "must be an http:// or https:// URL"),
        ("chat", "url", "", "must be an http:// or https:// URL"),
        ("chat", "model", " ", "must not be empty"),
        ("chat", "model", "a\0b", "must not have control characters"),
        ("chat", "model", "a\nb", "must not have control characters"),
        ("chat", "api_key_env", 5, "must be a string"),
        ("dataset", "path", "", "must be a path"),
        ("dataset", "path", "a\0b", "must be a path"),
        ("dataset", "path", 5, "must be a path"),
        ("dataset", "format", "xml", "must be one of auto, jsonl"),
        ("dataset", "limit", 0, "must be a whole number from 1 up"),
        ("dataset", "limit", True, "must be a whole number"),
        ("dataset", "columns", 5, "must be a table"),
        ("run", "output", " ", "must be a path"),
        ("run", "n", 0, "must be a whole number from 1 to 1000000"),
        ("run", "n", 1_000_001, "must be a whole number from 1 to 1000000"),
        ("run", "n", 2.0, "must be a whole number"),
        ("run", "max_in_flight", "7", "must be a whole number"),
        ("run", "agent_timeout_sec", 0, "must be above 0"),
        ("run", "grader_timeout_sec", -1.5, "must be above 0"),
        ("run", "admission_timeout_sec", float("inf"), "must be finite"),
        ("run", "admission_timeout_sec", "60", "must be a number"),
        ("run", "pass_threshold", float("nan"), "must be finite"),
        ("run", "retry_setup_failures", -1, "must not be negative"),
        ("run", "breaker_failures", 1.5, "must be a whole number"),
        ("run", "nn", 1, "is unknown; there are output, n, "),
        ("run", "max_in_fligth", 1, "is unknown; is max_in_flight meant?"),
        ("run", "Pass-Threshold", 1, "is unknown; is pass_threshold meant?"),
        ("run", "limit", 1, "is unknown here; it belongs in [dataset]"),
        ("dataset", "n", 1, "is unknown here; it belongs in [run]"),
        ("run", "url", "sk-1", "is unknown here; it belongs in [server] or [chat]"),
        ("dataset", "user_prompt", "q", "is unknown here; it belongs in [dataset.columns]"),
    ],
)
def test_a_problem_is_named_by_section_and_field(section, name, value, reason):
    (problem,) = problems_of(with_value(section, name, value))
    assert problem.startswith(f"{section}.{name}: {reason}")
    assert "sk-1" not in problem


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sever", "is server meant?"),
        ("Run", "is run meant?"),
        ("model", "there are server, chat, dataset, run, secrets, prices, env"),
    ],
)
def test_a_section_that_there_is_not(name, reason):
    (problem,) = problems_of({**copy.deepcopy(MINIMAL), name: {}})
    assert problem == f"{name}: is not a section; {reason}"


def test_a_column_that_there_is_not():
    tables = copy.deepcopy(MINIMAL)
    tables["dataset"]["columns"] = {"ground_thruth": "a"}
    (problem,) = problems_of(tables)
    assert problem == "dataset.columns.ground_thruth: is unknown; is ground_truth meant?"


def test_every_problem_is_named_at_once():
    tables = copy.deepcopy(MINIMAL)
    tables["server"] = {"url": "x", "api_key_env": "a-key"}
    tables["dataset"] = {"limit": 0, "columns": {"user_prompt": 1, "prompt": "p"}}
    tables["run"].update(n=0, breaker_failures=-1)
    del tables["chat"]
    tables["extra"] = {}
    assert [problem.split(": ")[0] for problem in problems_of(tables)] == [
        "extra", "server.url", "server.api_key_env", "chat", "dataset.path",
        "dataset.columns.prompt", "dataset.columns.user_prompt", "dataset.limit", "run.n",
        "run.breaker_failures",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "server", [{}, {"url": "http://h", "app": "m:a"}, {"api_key_env": "SERVER_KEY"}]
)
def test_a_server_is_either_there_or_started(server):
    (problem,) = problems_of({**MINIMAL, "server": server})
    assert problem == "server.url: must be given, or app, but not both"


@pytest.mark.parametrize("workers", [1, 4, "auto"])
def test_an_app_has_workers_and_a_server_that_runs_has_not(workers, tmp_path):
    path = write(tmp_path, FULL.replace("[chat]", f"workers = {workers!r}\n[chat]", 1))
    assert load_config(path).server.workers == workers
    assert load_config(path, {"server": {"url": "http://h"}}).server.workers is None
    (problem,) = problems_of({**MINIMAL, "server": {"url": "http://h", "workers": workers}})
    assert problem == "server.workers: goes with app; a server that runs has its own"


def test_a_server_has_one_way_to_authenticate():
    server = {"url": "http://user:password-1@h", "api_key_env": "SERVER_KEY"}
    (problem,) = problems_of({**MINIMAL, "server": server})
    assert problem.startswith("server.api_key_env: cannot be sent along with the credentials")
    assert "password-1" not in problem


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[run", "is not valid TOML"),
        (b"n = 1\nn = 2", "is not valid TOML"),
        (b"\xff", "is not UTF-8 (at byte 0)"),
        (b"a = " + b"[" * 100_000, "is not valid TOML"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, data, reason):
    with pytest.raises(EvaluationError) as caught:
        load_config(write(tmp_path, data))
    assert str(caught.value).startswith(f"{tmp_path / 'eval.toml'} {reason}")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(EvaluationError, match=r"missing\.toml: No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(EvaluationError, match="Is a directory"):
        load_config(tmp_path)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    section=st.sampled_from(["server", "chat", "dataset", "run"]),
    data=st.data(),
    value=plain,
)
def test_any_value_is_taken_or_refused_by_name(section, data, value):
    kinds = {"server": ServerConfig, "chat": ChatConfig, "dataset": DatasetConfig, "run": RunConfig}
    name = data.draw(st.sampled_from([*attrs.fields_dict(kinds[section]), "other"]))
    tables = with_value(section, name, value)
    problems: list[str] = []
    taken = None
    try:
        taken = parse_config(tables)
    except InvalidBodyError as error:
        problems = [str(problem) for problem in error.problems]
    assert (taken is None) == bool(problems)
    assert all(problem.startswith(f"{section}.") for problem in problems)


# --- from Python ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (DatasetConfig, {"path": 5}, "path"),
        (DatasetConfig, {"path": b"rows"}, "path"),
        (RunConfig, {"output": None}, "output"),
        (RunConfig, {"output": "o", "n": "4"}, "n"),
        (ServerConfig, {}, "url"),
        (ChatConfig, {"url": "nowhere"}, "url"),
        (
            EvaluationConfig,
            {
                "server": "http://h",
                "chat": ChatConfig(url="http://h"),
                "dataset": DatasetConfig(path="d"),
                "run": RunConfig(output="o"),
            },
            "server",
        ),
    ],
)
def test_the_classes_refuse_the_same(kind, values, field):
    with pytest.raises(InvalidFieldError) as caught:
        kind(**values)
    assert caught.value.field == field


def test_a_password_in_a_url_is_not_in_the_repr():
    server = ServerConfig(url="http://user:password-1@h")
    chat = ChatConfig(url="http://user:password-2@h/v1?key=password-3")
    config = attrs.evolve(parse_config(MINIMAL), server=server, chat=chat)
    assert "password" not in repr(config)


# --- variables and secrets --------------------------------------------------------------------


def test_variables_and_names_of_secrets(tmp_path):
    text = FULL + '[env]\nREGION = "eu"\n[secrets]\nrequired = ["SEARCH_KEY", "DB"]\n'
    config = load_config(write(tmp_path, text))
    assert config.env == {"REGION": "eu"}
    assert config.secrets == SecretsConfig(required=["SEARCH_KEY", "DB"])
    other = load_config(write(tmp_path, text), {"server": {"url": "http://127.0.0.1:8000"}})
    assert (other.env, other.secrets) == ({}, SecretsConfig())


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"env": 1}, "env: must be a table"),
        ({"env": {"A-B": "x"}}, "env: 'A-B' cannot be the name of a variable"),
        ({"env": {"A": 1}}, "env: A must be a string without NUL; put numbers in quotes"),
        ({"env": {"A": "\0"}}, "env: A must be a string without NUL; put numbers in quotes"),
        ({"env": {"ROLLOUT_MODEL": "m"}}, "env: ROLLOUT_MODEL is set by chat.model"),
        (
            {"env": {"A": "x"}, "secrets": {"required": ["B", "A"]}},
            "env: A is also in secrets.required",
        ),
        ({"prices": {"prompt": 1}}, "prices.completion: is required"),
        (
            {"prices": {"prompt": -1, "completion": 1}},
            "prices.prompt: must be a finite number from 0 up",
        ),
        ({"secrets": {"KEY": "sk-1"}}, "secrets.KEY: is unknown; there are required"),
        ({"secrets": {"required": ["A", "A"]}}, "secrets.required: has a name twice"),
        (
            {"secrets": {"required": ["sk-1"]}},
            "secrets.required: must be a list of names of environment variables, not of keys",
        ),
        (
            {"secrets": {"required": "A"}},
            "secrets.required: must be a list of names of environment variables, not of keys",
        ),
        (
            {"server": MINIMAL["server"], "env": {"A": "x"}},
            "env: goes with server.app; a server that runs has its own variables",
        ),
        (
            {"server": MINIMAL["server"], "secrets": {"required": ["A"]}},
            "secrets: goes with server.app; a server that runs has its own variables",
        ),
    ],
)
def test_variables_that_cannot_be_used(tables, problem):
    assert problems_of({**OWN, **tables}) == [problem]


# --- names of runs ----------------------------------------------------------------------------

UNNAMED = FULL.replace('output = "../runs/one"\n', "")


def test_a_run_without_a_folder_gets_a_name_that_is_free(tmp_path, monkeypatch):
    parts = iter(["sandy", "maple", 7, "tidy", "oak", 8])
    monkeypatch.setattr("rollout.evaluation.names.random.choice", lambda _: next(parts))
    (tmp_path / "runs" / "sandy-maple-7").mkdir(parents=True)
    run = load_config(write(tmp_path, UNNAMED)).run
    assert (run.output, run.name) == (tmp_path / "runs" / "tidy-oak-8", "tidy-oak-8")


def test_generated_names_are_names(tmp_path):
    names = {load_config(write(tmp_path, UNNAMED)).run.name for _ in range(20)}
    assert len(names) > 10
    assert all(RUN_NAME.fullmatch(name) for name in names)


@pytest.mark.parametrize(
    ("text", "overrides", "output"),
    [
        (UNNAMED, {"name": "one.2"}, "{}/runs/one.2"),
        (UNNAMED + 'name = "one"', {}, "{}/runs/one"),
        (UNNAMED + 'name = "one"', {"name": "two"}, "{}/runs/two"),
        (UNNAMED, {"name": "one", "output": "elsewhere"}, "elsewhere/one"),
        (FULL + 'name = "two"', {}, "{}/../runs/one/two"),
        (FULL, {}, "{}/../runs/one"),
    ],
)
def test_a_name_and_its_folder(tmp_path, text, overrides, output):
    run = load_config(write(tmp_path, text), {"run": overrides}).run
    assert run.output == Path(os.path.normpath(output.format(tmp_path)))
    assert run.name in {None, run.output.name}


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "-x", "x" * 65, "a b"])
def test_a_name_that_cannot_be_one(tmp_path, name):
    with pytest.raises(InvalidBodyError, match=r"^run\.name: must begin with a letter or digit"):
        load_config(write(tmp_path, FULL), {"run": {"name": name}})


def test_a_name_is_a_text_and_belongs_to_its_folder(tmp_path):
    with pytest.raises(InvalidBodyError, match=r"^run\.name: "):
        load_config(write(tmp_path, FULL + "name = 1"))
    with pytest.raises(InvalidFieldError, match="name must be the last part of output"):
        RunConfig(output="runs/one", name="two")
