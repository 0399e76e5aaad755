"""The agents that trials run: Harbor's own ones, or a user's workflow."""

from __future__ import annotations

__all__: list[str] = []
