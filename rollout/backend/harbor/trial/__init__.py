"""One rollout as a Harbor trial: its plan, its run on the bridge, its folder."""

from __future__ import annotations

__all__: list[str] = []
