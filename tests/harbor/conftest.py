"""Tests of the Harbor backend. Modules marked `harbor` run Harbor itself, where it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import strategies  # noqa: F401 - the hypothesis profile that all tests share

from rollout.backend.harbor.validation import has_harbor

HERE = Path(__file__).parent

# Harbor's model library would otherwise fetch a list of prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

if sys.platform != "linux" or not has_harbor():
    # They import Harbor, so they are told by their text.
    collect_ignore = [
        str(path.relative_to(HERE))
        for path in HERE.rglob("test_*.py")
        if "pytest.mark.harbor" in path.read_text("utf-8")
    ]


def pytest_collection_modifyitems(items):
    """Harbor and its dependencies warn of themselves."""
    for item in items:
        if item.get_closest_marker("harbor") is not None:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
