"""Tests that need Harbor: what we write is what it reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _installed() -> bool:
    try:  # folders of that name are no Harbor
        return importlib.util.find_spec("harbor.utils.trajectory_validator") is not None
    except ModuleNotFoundError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder, with the reason, where Harbor is not installed."""
    if _installed():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="Harbor is not installed (run: nox -s harbor)"))
