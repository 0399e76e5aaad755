"""Every public module and name of the official package can be imported, or its error says more."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

OFFICIAL = "osmosis_ai.rollout"


def public_names(path):
    """The classes, functions and constants that a module defines, and what it lists as its own."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names == ["__all__"]:
                found.update(ast.literal_eval(node.value))
            found.update(name for name in names if name.isupper())
    return sorted(name for name in found if not name.startswith("_"))


def walk():
    spec = importlib.util.find_spec("osmosis_ai")
    if spec is None:
        return
    root = Path(spec.submodule_search_locations[0]) / "rollout"
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        module = ".".join(("rollout", *(part for part in parts if part != "__init__")))
        yield module, public_names(path)


def problem(module, name):
    """Why a name cannot be imported, unless the error says what to use instead."""
    try:
        exec(f"from {module} import {name}", {})
    except ImportError as error:
        said = str(error)
        helps = said.startswith(f"trio-rollout has no {module}") and "; use " in said
        return None if helps else said
    return None


@pytest.mark.parametrize(("module", "names"), list(walk()))
def test_imports_work_or_say_what_to_use(module, names):
    assert [found for name in names if (found := problem(module, name))] == []
