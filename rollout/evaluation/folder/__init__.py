"""The folder of a run: its lock and archive, its manifest, its journal, and what is made of it."""

__all__: list[str] = []
