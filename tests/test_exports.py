"""The public face: what it names exists, is documented, and arrows only point down."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollout

ROOT = Path(rollout.__file__).parent

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(ROOT)], prefix="rollout.")
    if not any(part.startswith("_") for part in module.name.split("."))
)
"""Every public module. A name with an underscore is private, `__main__` included."""

FLOORS = {
    "errors": 0,
    "types": 0,
    "rules": 0,
    "codec": 0,
    "_json": 0,
    "_files": 0,
    "_http": 0,
    "_redaction": 0,
    "_checks": 0,
    "_tasks": 0,
    "_telemetry": 0,
    "_threads": 0,
    "_logs": 0,
    "_moved": 0,
    "_page": 0,
    "_endpoint_failures": 0,
    "_imports": 0,
    "_server_process": 0,
    "_version": 0,
    "context": 1,
    "workflow": 1,
    "grader": 1,
    "artifacts": 1,
    "backend": 2,
    "sandbox": 1,
    "trajectory": 2,
    "integrations": 2,
    "gateway": 2,
    "graders": 2,
    "client": 3,
    "server": 3,
}
"""Rooms by floor; whatever is not named here (pools, the simulation, evaluations) is on top."""

TOP = 4

EXTRAS = {"harbor", "openai", "agents", "strands", "pydantic_ai", "mcp", "xllamacpp", "ray"}
"""Packages of extras. Modules that they load by name import them, and are left out without."""


def load(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in EXTRAS:
            raise
        pytest.skip(f"{name} needs {missing}, which is not installed")


@pytest.mark.parametrize("name", ["rollout", *MODULES])
def test_every_name_in_all_exists(name):
    module = load(name)
    names = getattr(module, "__all__", None)
    assert names is not None, f"{name} has no __all__"
    assert len(names) == len(set(names))
    missing = [each for each in names if not hasattr(module, each)]
    assert missing == []


def public_objects(module):
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            yield f"{module.__name__}.{name}", value


def public_members(path, cls):
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if inspect.isroutine(value) or isinstance(value, property):
            yield f"{path}.{name}", value


@pytest.mark.parametrize("name", ["rollout", *MODULES])
def test_everything_public_has_a_docstring(name):
    module = load(name)
    assert module.__doc__, name
    bare = []
    for path, value in public_objects(module):
        if not str(getattr(value, "__module__", "")).startswith("rollout"):
            continue
        # A subclass would inherit the text of its base.
        if not vars(value).get("__doc__") if inspect.isclass(value) else not value.__doc__:
            bare.append(path)
        if inspect.isclass(value):
            bare += [where for where, member in public_members(path, value) if not member.__doc__]
    assert bare == []


def test_the_protocols_names_are_those_of_the_official_package():
    wanted = """
        RolloutInitRequest RolloutInitResponse RolloutResultResponse CancelRolloutsRequest
        CancelRolloutsResponse RolloutLifecycle RolloutStatus RolloutErrorCategory RolloutSample
        ExecutionRequest ExecutionResult ExecutionOutcome AgentWorkflowConfig GraderConfig
        ConcurrencyConfig AgentWorkflowOutput POLLING_LEASE_HEADER
    """
    types = importlib.import_module("rollout.types")
    assert set(wanted.split()) <= set(types.__all__)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "rollout",
            """AgentWorkflow Grader AgentWorkflowContext GraderContext RolloutContext SampleSource
               get_rollout_context ExecutionBackend LocalBackend AgentWorkflowConfig GraderConfig
               ConcurrencyConfig AgentWorkflowOutput RolloutSample RolloutStatus""",
        ),
        ("rollout.backend", "ExecutionBackend LocalBackend"),
        ("rollout.client", "RolloutClient RolloutHandle RolloutHandleCancelled"),
        ("rollout.server", "create_rollout_server serve"),
    ],
)
def test_the_public_paths_of_the_specification(module, names):
    assert set(names.split()) <= set(importlib.import_module(module).__all__)


def test_every_error_is_exported_and_subclasses_a_builtin():
    errors = importlib.import_module("rollout.errors")
    found = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert found <= set(errors.__all__)
    plain = {"RolloutError", "RolloutHandleCancelled"}
    for name in found - plain:
        builtins = {base for base in getattr(errors, name).__mro__ if base.__module__ == "builtins"}
        assert builtins - {Exception, BaseException, object}, name
        assert issubclass(getattr(errors, name), errors.RolloutError)


def test_no_exception_is_defined_elsewhere():
    elsewhere = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, tree in sources()
        if path.name != "errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(base, ast.Name) and base.id.endswith(("Error", "Exception"))
            for base in node.bases
        )
        and not node.name.startswith("_")
        and "cli" not in path.parts
    ]
    assert elsewhere == []


# --- which module knows which ---------------------------------------------------------------


def sources():
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def room_of(path):
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def floor_of(room):
    return FLOORS.get(room, TOP)


def imports(tree):
    """Each module of ours that the code imports, with its line; also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def imported_rooms(path, tree):
    for name, line in imports(tree):
        parts = name.split(".")
        if parts[0] != "rollout":
            continue
        room = parts[1] if len(parts) > 1 else ""
        is_room = (ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file()
        yield (room if room and is_room else "__init__"), f"{path.relative_to(ROOT)}:{line}"


def test_imports_point_down():
    upwards = [
        f"{where} imports {room}"
        for path, tree in sources()
        if path != ROOT / "__init__.py"
        for room, where in imported_rooms(path, tree)
        if room != room_of(path)
        and (2 if room == "__init__" else floor_of(room)) > floor_of(room_of(path))
    ]
    assert upwards == []


def test_rooms_on_the_third_floor_do_not_know_each_other():
    known = {
        (room_of(path), room)
        for path, tree in sources()
        for room, _ in imported_rooms(path, tree)
        if floor_of(room_of(path)) == floor_of(room) == 3 and room != room_of(path)
    }
    assert known == set()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("rollout", ["rollout.client", "rollout.server", "httpx", "quart", "hypercorn"]),
        ("rollout.client", ["rollout.server", "quart", "hypercorn"]),
        ("rollout.server", ["rollout.client"]),
        ("rollout.types", ["rollout.client", "rollout.server"]),
    ],
)
def test_importing_one_does_not_load_the_other(module, unwanted):
    code = f"import sys, {module}; print(*[name for name in {unwanted!r} if name in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert loaded.stdout.split() == []


def test_nothing_imports_asyncio_outside_the_bridges():
    # Harbor is asyncio: its environments, and the sandboxes they use, run in the loop of a bridge.
    harbor = ROOT / "backend" / "harbor"
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in sources()
        if room_of(path) not in {"integrations", "sandbox"} and harbor not in path.parents
        for name, line in imports(tree)
        if name.split(".")[0] in {"asyncio", "anyio", "trio_asyncio"}
    ]
    assert found == []
