"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A slow machine is no fault of the code: examples are bounded in number, not in time.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
