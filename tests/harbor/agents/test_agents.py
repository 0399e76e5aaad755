"""How agents are made for a trial. No Harbor is needed for that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout import ConcurrencyConfig, RolloutContext
from rollout.backend.harbor import python_paths
from rollout.backend.harbor.agents import agent_spec
from rollout.backend.harbor.agents.native import (
    NATIVE_AGENTS,
    chat_base,
    litellm_model,
)
from rollout.backend.harbor.agents.workflow import WorkflowAgent
from rollout.backend.harbor.plan import ResolvedTask, TrialPlan
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.types import ExecutionRequest

KEY = "sk-hunter2-hunter2"
URL = "http://model.invalid:9000/v1"


@pytest.fixture
def plan(tmp_path):
    def make(*, model=None, url=URL, **fields):
        return TrialPlan(
            request=ExecutionRequest(id="r", prompt=[]),
            context=RolloutContext(chat_completions_url=url, api_key=KEY),
            workspace=tmp_path,
            name="r-1",
            task=ResolvedTask(name="t", source={"path": "t"}),
            model=model,
            **fields,
        )

    return make


# --- Harbor's own agents ------------------------------------------------------------------------


def test_the_oracle_needs_no_model(plan):
    spec = agent_spec("oracle", None, None)
    assert spec.fields(plan()) == {"name": "oracle", "kwargs": {}}
    assert spec.on_host
    assert spec.sample(plan()) is None


@pytest.mark.parametrize("name", ["terminus-2", "mini-swe-agent", "opencode"])
def test_the_others_need_one(plan, name):
    spec = agent_spec(name, None, None)
    with pytest.raises(InvalidFieldError, match="harbor_model is missing"):
        spec.fields(plan())
    for model in (7, "", "/", ["m"]):
        with pytest.raises(InvalidFieldError, match="harbor_model"):
            spec.fields(plan(model=model))
    assert spec.on_host is (name == "terminus-2")


@pytest.mark.parametrize("name", NATIVE_AGENTS)
def test_no_key_is_in_what_harbor_writes(plan, name):
    assert KEY not in repr(agent_spec(name, None, None).fields(plan(model="policy")))


def test_terminus_2_is_wired_to_the_endpoint(plan):
    fields = agent_spec("terminus-2", None, None).fields(plan(model="policy"))
    assert fields == {
        "import_path": "rollout.backend.harbor.agents.harbor_classes:RolloutTerminus2",
        "model_name": "openai/policy",
        "kwargs": {
            "api_base": URL,
            "record_terminal_session": False,
            "enable_summarize": False,
        },
    }


def test_options_go_before_what_is_set_here(plan):
    options = {"enable_summarize": True, "max_turns": 3}
    kwargs = agent_spec("terminus-2", None, options).fields(plan(model="policy"))["kwargs"]
    assert kwargs["enable_summarize"] is True
    assert kwargs["max_turns"] == 3
    assert kwargs["record_terminal_session"] is False


def test_opencode_calls_chat_completions_through_a_provider_of_its_own(plan):
    options = {"opencode_config": {"provider": {"rollout": {"options": {"timeout": 1}}}, "x": 1}}
    options["opencode_config"]["compaction"] = {"prune": True}
    spec = agent_spec("opencode", None, options)
    fields = spec.fields(plan(model="openai/org/policy"))
    assert fields["model_name"] == "rollout/org/policy"
    config = fields["kwargs"]["opencode_config"]
    assert config["x"] == 1
    assert config["compaction"] == {"auto": False, "prune": True}
    provider = config["provider"]["rollout"]
    assert provider["options"] == {
        "baseURL": URL,
        "apiKey": "{env:OPENAI_API_KEY}",
        "timeout": 1,
    }
    assert provider["models"] == {"org/policy": {}}
    # The options that the backend was given are not changed by a rollout.
    assert options["opencode_config"]["provider"]["rollout"] == {"options": {"timeout": 1}}


@pytest.mark.parametrize(("given", "passed_on"), [(None, None), (2.5, 2.5), (0.0, 0.001)])
def test_no_time_left_is_a_short_time(plan, given, passed_on):
    # Harbor takes zero for no timeout of its own.
    fields = agent_spec("oracle", None, None).fields(plan(agent_timeout_sec=given))
    assert fields.get("override_timeout_sec") == passed_on


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("policy", "openai/policy"),
        ("openai/policy", "openai/policy"),
        ("hosted_vllm/policy", "hosted_vllm/policy"),
        ("Qwen/Qwen3-8B", "openai/Qwen/Qwen3-8B"),
        ("openai-like", "openai/openai-like"),
    ],
)
def test_names_of_models(model, name):
    assert litellm_model(model) == name


@pytest.mark.parametrize("url", [URL, f"{URL}/", f"{URL}/chat/completions"])
def test_the_base_of_an_endpoint(url):
    assert chat_base(url) == URL


@pytest.mark.parametrize("agent", ["terminus", "", "Oracle", "claude-code"])
def test_other_names_are_refused(agent):
    with pytest.raises(BackendConfigurationError, match="terminus-2, mini-swe-agent"):
        agent_spec(agent, None, None)


@pytest.mark.parametrize("options", [["a"], {1: 2}, {"model_name": "m"}])
def test_options_that_cannot_be(options):
    with pytest.raises(BackendConfigurationError, match="agent_options"):
        agent_spec("terminus-2", None, options)


# --- workflows --------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of its own with a workflow, since tests are not imported under a plain name."""
    (tmp_path / "flows_for_agents.py").write_text(
        "from rollout import AgentWorkflow, AgentWorkflowConfig\n"
        "class Flow(AgentWorkflow):\n"
        "    class Inner(AgentWorkflow):\n"
        "        def run(self, ctx): ...\n"
        "    def run(self, ctx): ...\n"
        "class Config(AgentWorkflowConfig):\n"
        "    tools: list = []\n"
        "    anything: object = None\n"
        "CONFIG = Config(name='c')\n"
        "NOT_A_CONFIG = 7\n"
        "def local():\n"
        "    class Local(AgentWorkflow):\n"
        "        def run(self, ctx): ...\n"
        "    return Local\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import flows_for_agents

    yield flows_for_agents
    del sys.modules["flows_for_agents"]


def test_a_workflow_by_class_and_by_name(module):
    by_class = agent_spec(module.Flow, None, None)
    by_name = agent_spec("flows_for_agents:Flow", None, {})
    assert isinstance(by_class, WorkflowAgent)
    assert by_class.name == by_name.name == "flows_for_agents:Flow"
    assert not by_class.on_host
    assert agent_spec(module.Flow.Inner, None, None).name == "flows_for_agents:Flow.Inner"


def test_a_class_that_no_name_leads_to(module):
    with pytest.raises(BackendConfigurationError, match="inside a function"):
        agent_spec(module.local(), None, None)


def test_another_class_under_that_name(module):
    hidden = module.Flow
    module.Flow = module.local()
    with pytest.raises(BackendConfigurationError, match="another class"):
        agent_spec(hidden, None, None)


@pytest.mark.parametrize("agent", ["flows_for_agents:CONFIG", "flows_for_agents:No", "no_such:X"])
def test_what_is_no_workflow(module, agent):
    with pytest.raises(BackendConfigurationError):
        agent_spec(agent, None, None)


@pytest.mark.parametrize("value", [(1,), {1: 2}, float("nan"), object(), {"a": {3}}, b"x"])
def test_a_config_that_is_no_json_goes_by_name(module, value):
    config = module.Config(name="c", anything=value)
    with pytest.raises(BackendConfigurationError, match=r"agent_config\.anything.*module:attr"):
        agent_spec(module.Flow, config, None)
    assert agent_spec(module.Flow, "flows_for_agents:CONFIG", None).name


def test_configs_that_are_none(module):
    for config in ("flows_for_agents:NOT_A_CONFIG", 7):
        with pytest.raises(BackendConfigurationError, match="agent_config"):
            agent_spec(module.Flow, config, None)


def test_a_config_with_its_fields(module):
    config = module.Config(
        name="c", tools=[1, {"a": None}], concurrency=ConcurrencyConfig(max_concurrent=2)
    )
    assert agent_spec(module.Flow, config, None).name == "flows_for_agents:Flow"


@pytest.mark.parametrize(
    "options",
    [{"requirement": []}, {"requirements": "numpy"}, {"modules": [7]}, {"python": ""}],
)
def test_options_of_a_workflow_that_cannot_be(module, options):
    with pytest.raises(BackendConfigurationError, match="agent_options"):
        agent_spec(module.Flow, None, options)


def test_a_workflow_that_was_not_packaged_cannot_run(module, plan):
    with pytest.raises(BackendConfigurationError, match="packaged"):
        agent_spec(module.Flow, None, None).fields(plan())


@pytest.mark.parametrize("given", ["bundle", "code_dir"])
def test_code_of_a_users_own_is_not_imported_here(tmp_path, given):
    path = tmp_path / given
    path.write_text("") if given == "bundle" else path.mkdir()
    spec = agent_spec("only_inside.flows:Flow", "only_inside:CONFIG", None, **{given: path})
    assert spec.name == "only_inside.flows:Flow"


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        (("oracle", None), {"code_dir": "."}, "for a workflow"),
        (("m:Flow", None), {"code_dir": ".", "bundle": "x.whl"}, "exclude each other"),
        (("m:Flow", None), {"code_dir": "/no/such/folder"}, "code_dir is not a folder"),
        (("m:Flow", None), {"bundle": "/no/such.whl"}, "bundle is not a file"),
        (("m:", None), {"code_dir": "."}, "agent must be an object or 'module:attr'"),
        (("m:Flow", "CONFIG"), {"code_dir": "."}, "agent_config must be an object or 'module:attr"),
        (("m:Flow", 7), {"code_dir": "."}, "agent_config must be an instance"),
    ],
)
def test_code_that_does_not_fit(arguments, given, words):
    with pytest.raises(BackendConfigurationError, match=words):
        agent_spec(*arguments, None, **given)


def test_python_paths_hold_this_python():
    found = python_paths()
    assert all(Path(path).is_dir() for path in found)
    for path in (sys.prefix, sys.base_prefix):
        assert any(Path(path).is_relative_to(each) for each in ["/usr", *found])
