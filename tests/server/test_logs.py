"""What the server logs: a line is one that it wrote, whatever its peers and user code say."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from server.faults import API_KEY, admission, in_process_http, result_path, run
from support import make_app, prompt

import rollout
from rollout import RolloutContext
from rollout._logs import JSONFormatter, LogFormatter
from rollout.cli.options import _current_rollout

FORGED = "\n1970-01-01 00:00:00,000 ERROR rollout.server: forged\r\x1b[2J\x9b2J\u2028"
FORMATTERS = {
    "ours": LogFormatter(),
    "of users": logging.Formatter("%(levelname)s %(name)s: %(message)s"),
}


@contextmanager
def logged(formatter: logging.Formatter = FORMATTERS["of users"]) -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
    try:
        yield text
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("whose", FORMATTERS)
async def test_no_text_from_elsewhere_forges_a_line(whose):
    logger = logging.getLogger("rollout.server.app")
    with logged(FORMATTERS[whose]) as text:
        async with in_process_http(make_app()) as http:
            forged = {"rollout_id": f"a{FORGED}", "label": FORGED}
            await run(http, **forged, initial_messages=prompt(**{"raise": FORGED}))
        logger.warning("%s of %r", Path(FORGED), [FORGED])
        logger.warning("%(name)s", {"name": f"{FORGED}\ud800"})
        try:
            raise RuntimeError(FORGED)
        except RuntimeError:
            logger.exception("failed")
        if whose == "ours":
            logging.getLogger("agent").warning(f"the model said {FORGED}")  # noqa: G004
    lines = text.getvalue().split("\n")
    assert sum("forged" in line for line in lines) >= 5
    assert not [line for line in lines if line.startswith("1970")]
    assert [line for line in lines if not line.isprintable()] == []


async def test_json_is_an_object_a_line_with_the_rollout_that_it_is_about(monkeypatch):
    logger = logging.getLogger("rollout.server.app")
    span = SimpleNamespace(is_valid=True, trace_id=0xAB)
    current = SimpleNamespace(get_span_context=lambda: span)
    with logged(JSONFormatter(_current_rollout)) as text:
        async with in_process_http(make_app()) as http:
            forged = {"rollout_id": f"a{FORGED}", "label": FORGED}
            await run(http, **forged, initial_messages=prompt(**{"raise": FORGED}))
        with RolloutContext(rollout_id="inside"):
            logging.getLogger("agent").warning(f"it said {FORGED}")  # noqa: G004
        trace = SimpleNamespace(get_current_span=lambda: current)
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
        logger.warning("rollout %s: its lease expired", "late")
        span.is_valid = False
        try:
            raise RuntimeError(FORGED)
        except RuntimeError:
            logger.exception("failed")
    failed, inside, late, raised = map(json.loads, text.getvalue().splitlines())
    assert failed["rollout_id"] == f"a{FORGED}"
    assert failed["message"].endswith("the workflow failed")
    assert "Traceback" in failed["exception"]
    assert inside["time"].endswith("+00:00")
    assert {name: inside[name] for name in inside if name != "time"} == {
        "level": "WARNING",
        "logger": "agent",
        "message": f"it said {FORGED}",
        "rollout_id": "inside",
    }
    assert (late["rollout_id"], late["trace_id"]) == ("late", f"{0xAB:032x}")
    assert (raised["message"], set(raised) & {"rollout_id", "trace_id"}) == ("failed", set())
    assert "RuntimeError" in raised["exception"]


def test_every_module_has_a_logger_that_escapes():
    sources = Path(rollout.__file__).parent.rglob("*.py")
    plain = [path for path in sources if "logger = logging.getLogger(__name__" in path.read_text()]
    assert plain == []


async def test_refusals_are_logged_at_a_bounded_rate(autojump_clock):
    key = {"Authorization": f"Bearer {API_KEY}"}
    with logged() as text:
        async with in_process_http(make_app(api_key=API_KEY)) as http:
            admitted = await http.post(
                "/rollout", headers=key, json=admission(initial_messages=prompt(sleep=60))
            )
            path = result_path(admitted.json()["rollout_id"])
            wrong = {**key, "X-Osmosis-Rollout-Lease": "wrong"}
            for _ in range(20):
                assert (await http.get(path)).status_code == 401
                assert (await http.get(path, headers=wrong)).status_code == 403
                assert (await http.post("/rollouts/feed")).status_code == 401
            await trio.sleep(10)
            assert (await http.get(path, headers=wrong)).status_code == 403
            await http.post("/rollout/cancel", headers=key, json={"all": True})
    lines = [line for line in text.getvalue().splitlines() if "refused" in line]
    line = f"WARNING rollout.server.authentication: refused GET {path} from 127.0.0.1"
    assert lines == [
        f"{line} with 401",
        f"{line} with 403; 59 more before it",
    ]
