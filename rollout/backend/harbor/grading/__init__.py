"""Choose who grades a trial: the task's own tests, a user's grader, or neither."""

from __future__ import annotations

__all__: list[str] = []
