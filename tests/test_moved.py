"""Imports of the official package work with `osmosis_ai.rollout` changed to `rollout`."""

from __future__ import annotations

import importlib

import pytest

import rollout
from rollout import RolloutContext
from rollout._moved import ELSEWHERE, INSTEAD

FOUND = [(module, name) for module, names in ELSEWHERE.items() for name in names]


@pytest.mark.parametrize(("module", "name"), FOUND)
def test_a_name_is_what_it_is_called_here(module, name):
    home, _, attribute = ELSEWHERE[module][name].partition(":")
    found = getattr(importlib.import_module(f"rollout.{module}"), name)
    assert found is getattr(importlib.import_module(home), attribute)


@pytest.mark.parametrize("place", INSTEAD)
def test_what_has_no_counterpart_says_what_to_use(place):
    module, _, name = place.rpartition(".")
    statement = f"from rollout.{module} import {name}"
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    assert str(caught.value) == f"trio-rollout has no rollout.{place}; use {INSTEAD[place]}"


def test_statements_of_the_official_docs():
    from rollout.agent_workflow import AgentWorkflow
    from rollout.backend.local.backend import LocalBackend

    assert (AgentWorkflow, LocalBackend) == (rollout.AgentWorkflow, rollout.LocalBackend)
    with pytest.raises(ImportError, match="use rollout_model and run_agent"):
        from rollout.integrations.agents.strands import OsmosisStrandsAgent  # noqa: F401


@pytest.mark.parametrize("module", ["rollout.nonsense", "rollout.utils.nonsense", "rollout.agents"])
def test_other_modules_are_missing_as_ever(module):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{module}'"):
        importlib.import_module(module)


def test_other_names_are_missing_as_ever():
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from rollout.agent_workflow import Nonsense  # noqa: F401


def test_a_context_without_an_endpoint_takes_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("OSMOSIS_CHAT_COMPLETIONS_URL", "http://model/v1")
    monkeypatch.setenv("OSMOSIS_API_KEY", "of-the-environment")
    monkeypatch.setenv("OSMOSIS_ROLLOUT_ID", "r7")
    context = RolloutContext()
    assert context.chat_completions_url == "http://model/v1"
    assert (context.api_key, context.rollout_id) == ("of-the-environment", "r7")
    given = RolloutContext(api_key="given", rollout_id="r8")
    assert (given.api_key, given.rollout_id) == ("given", "r8")
    assert RolloutContext(chat_completions_url="http://other/v1").api_key is None
