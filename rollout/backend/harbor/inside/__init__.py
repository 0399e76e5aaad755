"""What runs a user's workflow inside a sandbox: the code brought in, and its result."""

from __future__ import annotations

__all__: list[str] = []
