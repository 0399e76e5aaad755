"""What the tests of the simulation share."""

from __future__ import annotations

import logging

import pytest
import strategies as _profile  # noqa: F401 - loads the Hypothesis profile of the tests


@pytest.fixture(autouse=True)
def planned_failures_are_not_logged():
    """Keep the library's log quiet: the workflows here fail by the thousand, as planned."""
    logger = logging.getLogger("rollout")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)
