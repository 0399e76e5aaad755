"""Load the files under examples/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Import an example from its file, once for each test that asks."""
    unique = f"example_{name}"
    spec = importlib.util.spec_from_file_location(unique, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # attrs looks the module up, to resolve annotations
    spec.loader.exec_module(module)
    return module
