"""Sandboxes of Linux namespaces: their folder, their processes, and what goes in and out.

Nothing here knows rollouts or Harbor. `layout` builds the folder that becomes the root, `setup` is
the program that turns it into one, `sandbox` starts and ends it and runs commands, `processes`
finds and kills what a command started, `transfer` and `extract` move files.
"""

from __future__ import annotations

__all__: list[str] = []
