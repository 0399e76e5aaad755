"""What a trial left: its outcome, sample, trajectory and files."""

from __future__ import annotations

__all__: list[str] = []
