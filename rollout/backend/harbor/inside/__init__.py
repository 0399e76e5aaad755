"""Code that runs a user's workflow inside a sandbox, and the documents that go in and out."""

from __future__ import annotations

__all__: list[str] = []
