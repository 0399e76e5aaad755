"""Graders that are ready to use."""

__all__: list[str] = []
