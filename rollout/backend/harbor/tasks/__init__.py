"""Find, download and check the Harbor task of a rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout._moved import moved_names

__all__: list[str] = []

if not TYPE_CHECKING:
    __getattr__ = moved_names(__name__)
