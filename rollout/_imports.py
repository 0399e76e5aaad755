"""The modules that a source imports, by its import statements."""

from __future__ import annotations

import ast

__all__ = ["imported_modules"]


def imported_modules(source: bytes) -> set[str]:
    """Return the top-level modules that a source imports; empty if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found
