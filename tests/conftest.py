"""Settings for all tests."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is no fault of the code: examples are bounded in number, not in time.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def _keep_nothing() -> Generator[None, None, None]:
    """Keep no files of rollouts, neither here nor in servers that tests start as processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_ARTIFACT_ROOT", "")
        yield


@pytest.fixture(scope="session", autouse=True)
def _take_ctrl_c() -> None:
    """Take SIGINT, here and in processes that tests start, where the shell has it ignored.

    It does that for a command in the background of a script.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
