"""Fixtures for the tests of the client."""

from __future__ import annotations

import random

import pytest


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client's jitter draws next; without any, every delay is exactly what was asked."""
    coming: list[float] = []
    monkeypatch.setattr(random, "random", lambda: coming.pop(0) if coming else 0.0)
    return coming
