"""Fixtures for the tests of the result feed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client.conftest import draws
from server.faults import no_secret_in_logs

__all__ = ["draws", "log_lines"]


@pytest.fixture(autouse=True)
def log_lines() -> Iterator[list[str]]:
    """What the test logs; no line may hold an api key or a lease token."""
    with no_secret_in_logs() as lines:
        yield lines
