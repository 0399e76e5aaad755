"""Outcome, sample, trajectory and files of a finished trial."""

from __future__ import annotations

__all__: list[str] = []
