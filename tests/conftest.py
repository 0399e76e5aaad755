"""Settings for all tests."""

from __future__ import annotations

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
