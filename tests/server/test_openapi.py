"""The description of the server at ``/openapi.json``: complete, and as strict as the rules."""

from __future__ import annotations

import importlib.util
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.faults import API_KEY, admission, in_process_http
from support import make_app

from rollout.gateway import ModelGateway
from rollout.server.feed import FEED_PATH
from rollout.server.openapi import openapi_document
from rollout.types._fields import path_segment_problem

HAS_METRICS = importlib.util.find_spec("prometheus_client") is not None
DOCUMENT = openapi_document(authenticated=True, metrics=HAS_METRICS)
SCHEMAS = DOCUMENT["components"]["schemas"]


async def test_it_is_served_to_who_has_the_key():
    async with in_process_http(make_app(api_key=API_KEY)) as http:
        assert (await http.get("/openapi.json")).status_code == 401
        key = {"Authorization": f"Bearer {API_KEY}"}
        served = (await http.get("/openapi.json", headers=key)).json()
    assert served == openapi_document(authenticated=True, limited=False, metrics=HAS_METRICS)
    async with in_process_http(make_app()) as http:
        document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert "security" not in document
    assert "401" not in document["paths"]["/health"]["get"]["responses"]


def test_every_route_is_described():
    routes = {(FEED_PATH, "POST")}
    for rule in make_app().url_map.iter_rules():
        path = re.sub(r"<(\w+)>", r"{\1}", rule.rule)
        routes |= {(path, method) for method in (rule.methods or ()) if method != "HEAD"}
    described = {(p, method.upper()) for p, item in DOCUMENT["paths"].items() for method in item}
    assert described == routes


def test_every_reference_leads_to_a_schema():
    references = re.findall(r"#/components/schemas/(\w+)", repr(DOCUMENT))
    assert set(references) <= set(SCHEMAS)


def test_a_schema_is_the_annotation_and_the_rule():
    request = SCHEMAS["RolloutInitRequest"]
    assert set(request["required"]) == {"rollout_id", "initial_messages", "chat_completions_url"}
    assert request["properties"]["llm_api_key"] == {"type": ["string", "null"], "minLength": 1}
    assert request["properties"]["agent_timeout_sec"] == {"type": ["number", "null"]}
    assert "trajectory_messages" not in SCHEMAS["RolloutSample"]["properties"]
    lease = SCHEMAS["RolloutInitResponse"]["properties"]["polling_lease_timeout_sec"]
    assert lease == {"type": "number", "exclusiveMinimum": 0}


@given(st.text(alphabet="./\\\0\na", max_size=5))
def test_the_pattern_of_an_id_is_its_rule(text: str):
    pattern = SCHEMAS["RolloutInitRequest"]["properties"]["rollout_id"]["pattern"]
    assert bool(re.fullmatch(pattern, text)) == (path_segment_problem(text) is None)


@pytest.mark.parametrize("location", ["path.rollout_id", "header.X-Osmosis-Rollout-Lease"])
def test_an_admission_leads_to_its_result(location: str):
    link = DOCUMENT["paths"]["/rollout"]["post"]["responses"]["202"]["links"]["result"]
    assert location in link["parameters"]


@pytest.mark.parametrize("gateway", [None, ModelGateway(advertise_url="http://server:8000")])
async def test_limits_are_for_servers_with_a_gateway(autojump_clock, gateway):
    async with in_process_http(make_app(gateway=gateway)) as http:
        document = (await http.get("/openapi.json")).json()
        answer = await http.post("/rollout", json=admission(limits={"calls": 3}))
    limits = document["components"]["schemas"]["RolloutInitRequest"]["properties"]["limits"]
    assert limits["type"] == ("null" if gateway is None else ["object", "null"])
    assert answer.status_code == (422 if gateway is None else 202)
