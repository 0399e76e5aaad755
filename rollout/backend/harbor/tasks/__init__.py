"""Find, download and check the Harbor task of a rollout."""

from __future__ import annotations

__all__: list[str] = []
