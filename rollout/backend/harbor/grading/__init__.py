"""Who grades a trial: the task's own tests, a user's grader, or nobody."""

from __future__ import annotations

__all__: list[str] = []
