"""The SDKs that the tests of the gateway call it with."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_openai = pytest.mark.skipif(
    find_spec("openai") is None, reason='needs pip install "trio-rollout[openai]"'
)
