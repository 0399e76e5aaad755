"""Loads the hypothesis profile that all tests share."""

import strategies  # noqa: F401
