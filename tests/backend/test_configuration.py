"""How a LocalBackend is set up: classes, references, configs; and what is refused."""

from __future__ import annotations

import sys
import types

import pytest
from backend.helpers import echo, execute, full_marks, grader, workflow

from rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    ConcurrencyConfig,
    Grader,
    GraderConfig,
    LocalBackend,
    RolloutStatus,
)
from rollout.errors import BackendConfigurationError


@pytest.fixture
def module(monkeypatch):
    """A module with a workflow, a grader and their configs in it."""
    made = types.ModuleType("rollout_test_agents")
    made.Flow = workflow(echo)
    made.Marks = grader(full_marks)
    made.flow_config = AgentWorkflowConfig(
        name="f", concurrency=ConcurrencyConfig(max_concurrent=2)
    )
    made.marks_config = GraderConfig(name="m")
    made.nested = types.SimpleNamespace(Flow=made.Flow)
    made.number = 7
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


async def test_everything_may_be_a_reference(module):
    name = module.__name__
    local = LocalBackend(
        workflow=f"{name}:Flow",
        workflow_config=f"{name}:flow_config",
        grader=f"{name}:Marks",
        grader_config=f"{name}:marks_config",
    )
    assert local.workflow_cls is module.Flow
    assert local.workflow_config is module.flow_config
    assert local.grader_cls is module.Marks
    assert local.grader_config is module.marks_config
    assert local.max_concurrent == 2
    outcome = await execute(local, grade=True, label="x")
    assert outcome.result.sample.reward == 1.0


def test_a_reference_may_go_through_attributes(module):
    local = LocalBackend(workflow=f"{module.__name__}:nested.Flow")
    assert local.workflow_cls is module.Flow


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("", "'module:attr'"),
        (":", "'module:attr'"),
        ("json", "'module:attr'"),
        ("json:", "'module:attr'"),
        (":Flow", "'module:attr'"),
        ("json:a:b", "'module:attr'"),
        ("json:a.", "'module:attr'"),
        ("json:.a", "'module:attr'"),
        (".json:loads", "'module:attr'"),
        ("..json:loads", "'module:attr'"),
        ("os..path:join", "'module:attr'"),
        ("agents.py:Flow", "no module 'agents'"),
        ("my agents:Flow", "'module:attr'"),
        ("a\x00b:Flow", "'module:attr'"),
        ("no_such_module_at_all:Flow", "no module 'no_such_module_at_all'"),
        ("json.no_such_part:Flow", "no module 'json.no_such_part'"),
        ("json:NoSuchThing", "has no attribute 'NoSuchThing'"),
        ("json:loads.nope", "has no attribute 'loads.nope'"),
        ("json:loads", "must be a class with a method 'run'"),
    ],
)
def test_a_bad_reference_says_what_is_wrong_with_it(reference, words):
    with pytest.raises(BackendConfigurationError) as caught:
        LocalBackend(workflow=reference)
    assert words in str(caught.value)
    assert str(caught.value).startswith("workflow")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ZeroDivisionError('mine')", ZeroDivisionError),
        ("import no_such_dependency", ModuleNotFoundError),
        ("from json import no_such_name", ImportError),
        ("def broken(:", SyntaxError),
    ],
)
def test_an_error_inside_the_module_passes_through(tmp_path, monkeypatch, source, error):
    (tmp_path / "rollout_broken_agents.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(error) as caught:
        LocalBackend(workflow="rollout_broken_agents:Flow")
    assert type(caught.value) is error
    assert "rollout_broken_agents" not in sys.modules


class NoRun:
    pass


class RunIsNoMethod:
    run = 7


class Unfinished(AgentWorkflow):
    pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workflow": None}, "workflow must be a class with a method 'run'"),
        ({"workflow": 7}, "workflow must be a class with a method 'run'"),
        ({"workflow": NoRun}, "workflow must be a class with a method 'run'"),
        ({"workflow": RunIsNoMethod}, "workflow must be a class with a method 'run'"),
        ({"workflow": workflow(echo)()}, "workflow must be a class"),
        ({"workflow": grader(full_marks)}, "workflow must be a class with a method 'run'"),
        ({"workflow": Unfinished}, "Unfinished has abstract methods"),
        ({"workflow": AgentWorkflow}, "AgentWorkflow has abstract methods"),
        ({"grader": NoRun}, "grader must be a class with a method 'grade'"),
        ({"grader": grader(full_marks)()}, "grader must be a class"),
        ({"grader": workflow(echo)}, "grader must be a class with a method 'grade'"),
        ({"grader": Grader}, "Grader has abstract methods"),
        ({"workflow_config": {"name": "x"}}, "workflow_config must be an instance of Agent"),
        ({"workflow_config": GraderConfig(name="x")}, "workflow_config must be an instance"),
        ({"workflow_config": AgentWorkflowConfig}, "workflow_config must be an instance"),
        ({"workflow_config": "json:loads"}, "workflow_config must be an instance"),
        ({"workflow_config": "nope"}, "workflow_config must be an object or 'module:attr'"),
        ({"grader_config": AgentWorkflowConfig(name="x")}, "grader_config must be an instance"),
        ({"grader_config": "json:nope"}, "grader_config: module 'json' has no attribute"),
    ],
)
def test_a_wrong_part_is_refused_by_name(options, words):
    with pytest.raises(BackendConfigurationError) as caught:
        LocalBackend(**{"workflow": workflow(echo), **options})
    assert words in str(caught.value)


async def test_a_class_that_only_looks_like_a_workflow_will_do():
    class Duck:
        def __init__(self, config):
            self.config = config

        async def run(self, ctx):
            return ctx.prompt

    outcome = await execute(LocalBackend(workflow=Duck))
    assert outcome.result.status is RolloutStatus.SUCCESS


def test_a_backend_can_be_made_outside_of_a_loop_and_says_that_it_reports_starts():
    local = LocalBackend(workflow=workflow(echo))
    assert local.reports_agent_start is True
    assert local.has_capacity()
    assert local.cancel_rollouts(all=True) == {}
