"""Bodies and figures in the text are those of the code."""

from __future__ import annotations

import json

import pytest
from documentation.blocks import (
    PROTOCOL,
    ROOT,
    SDK,
    SERVER,
    find,
)
from support import (
    in_process,
    make_app,
)

from rollout.codec import structure, unstructure
from rollout.rules.retry import GATEWAY_RETRY_DELAYS_SEC, TRANSPORT_RETRY_DELAYS_SEC
from rollout.server import ShutdownBudget
from rollout.server.admission import RETRY_AFTER_SEC
from rollout.server.app import (
    DEFAULT_POLLING_LEASE_TIMEOUT_SEC,
    DEFAULT_RESULT_RETENTION_SEC,
    DEFAULT_RESULT_WAIT_TIMEOUT_SEC,
)
from rollout.types import (
    CancelRolloutsResponse,
    RolloutInitResponse,
    RolloutLifecycle,
    RolloutResultResponse,
)


@pytest.mark.parametrize(
    ("marker", "kind"),
    [
        ('"polling_lease_token"', RolloutInitResponse),
        ('"agent_started_at"', RolloutResultResponse),
        ('"dispositions"', CancelRolloutsResponse),
    ],
)
def test_a_body_of_the_protocol_page_fits_its_type(marker, kind):
    body = json.loads(find(PROTOCOL, marker, "json").code)
    assert set(body) == set(unstructure(structure(body, kind)))


async def test_the_health_of_the_protocol_page_has_the_fields_of_a_real_one(autojump_clock):
    documented = json.loads(find(PROTOCOL, '"lifecycle"', "json").code)
    structure(documented["lifecycle"], RolloutLifecycle)
    async with in_process(make_app()) as client:
        real = await client.health()
    assert documented.keys() == real.keys()
    assert documented["concurrency"].keys() == real["concurrency"].keys()


def _listed(delays: tuple[float, ...]) -> str:
    return ", ".join(f"{delay:g} s" for delay in delays)


@pytest.mark.parametrize(
    ("page", "row"),
    [
        (SDK, f"`httpx.ReadTimeout` | {_listed(TRANSPORT_RETRY_DELAYS_SEC)} |"),
        (SDK, f"| HTTP 502, 503, 504 | {_listed(GATEWAY_RETRY_DELAYS_SEC)} |"),
        (SDK, f"| a poll is held for | {DEFAULT_RESULT_WAIT_TIMEOUT_SEC:g} s |"),
        (SDK, f"| the lease lasts, without a poll | {DEFAULT_POLLING_LEASE_TIMEOUT_SEC:g} s |"),
        (SDK, f"| a terminal result is kept for | {DEFAULT_RESULT_RETENTION_SEC:g} s |"),
        (SDK, "| `Retry-After` on 429 | {} to {} s |".format(*RETRY_AFTER_SEC)),
        (SERVER, f"| {ShutdownBudget().drain_sec:g} s (`drain_sec`) |"),
        (SERVER, f"| {ShutdownBudget().cleanup_sec:g} s (`cleanup_sec`) |"),
        (SERVER, f"| {ShutdownBudget().forced_sec:g} s (`forced_sec`) |"),
        (SERVER, f"| {ShutdownBudget().delivery_sec:g} s (`delivery_sec`) |"),
        (SERVER, f"| {ShutdownBudget().backend_sec:g} s (`backend_sec`) |"),
        (SERVER, f"their sum\nbefore it kills: {ShutdownBudget().total_sec:g} seconds"),
    ],
)
def test_a_figure_is_that_of_the_code(page, row):
    assert row in (ROOT / page).read_text("utf-8")
