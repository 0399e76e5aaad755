"""What the page on sandboxes says of the backend is what the backend takes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rollout.backend.harbor import HarborBackend
from rollout.backend.harbor.limits import EnvironmentWatch
from rollout.backend.harbor.trial.run import TrialRun
from rollout.context import RolloutContext

PAGE = (Path(__file__).parents[2] / "docs/harbor.md").read_text("utf-8")


def test_every_option_is_described_and_no_other():
    table = PAGE.partition("## Options\n")[2].partition("\n## ")[0]
    described = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert described == set(inspect.signature(HarborBackend).parameters)


def test_defaults_are_those_of_the_code():
    parameters = inspect.signature(HarborBackend).parameters
    for name in (
        "cancel_grace_sec",
        "stop_timeout_sec",
        "keep_failed_trials",
        "max_kept_trials",
        "allow_any_path",
        "task_mode",
    ):
        row = next(line for line in PAGE.splitlines() if re.match(rf"\|.*`{name}`.*\|", line))
        default = parameters[name].default
        assert f"{default:g}" in row if isinstance(default, float) else str(default) in row


def test_where_a_cancelled_rollout_was_is_said_as_it_is_there():
    text = " ".join(PAGE.split())
    trial = TrialRun(RolloutContext(), lambda _: None, EnvironmentWatch("t", 1.0))
    for event in ("START", "ENVIRONMENT_START", "AGENT_START", "VERIFICATION_START"):
        trial.take(event)
        assert f".. while {trial.phase}`" in text
