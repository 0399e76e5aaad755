"""The application that the workers of these tests serve."""

from __future__ import annotations
