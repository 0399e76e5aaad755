"""Read the files of a task: its tests, its instruction, its network. Blocking.

Harbor's own models read ``task.toml`` where Harbor is installed, so that each version's rules
apply; elsewhere the documented keys are read as they stand.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.backend.harbor.errors import UnfitTaskError
from rollout.backend.harbor.plan import ResolvedTask
from rollout.backend.harbor.tasks.links import check_tree
from rollout.backend.harbor.validation import has_harbor, problems_of

__all__ = [
    "INSTRUCTION",
    "TASK_FILE",
    "describe",
    "has_healthcheck",
    "network_modes",
    "read_config",
]

TASK_FILE = "task.toml"
INSTRUCTION = "instruction.md"

_ALLOWLIST = "allowlist"
_NO_NETWORK = "no-network"
_DEFINITIONS = ("Dockerfile", "docker-compose.yaml")
_SCRIPTS = {"linux": (".sh",), "windows": (".bat",)}


def describe(folder: Path, name: str) -> ResolvedTask:
    """Check the folder of a task and read what matters of it.

    Args:
        folder: The folder.
        name: What the task is called in messages.

    Raises:
        UnfitTaskError: It is not a task, or holds links out of it or special files.
    """
    try:
        check_tree(folder)
        config = read_config(folder)
        steps = _steps(config)
        modes = network_modes(config)
        return ResolvedTask(
            name=name,
            folder=folder,
            source={"path": folder},
            own_tests=_own_tests(folder, config, steps),
            instruction="" if steps else _instruction(folder),
            allowlisted=_ALLOWLIST in modes,
            offline=_NO_NETWORK in modes,
            steps=steps,
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UnfitTaskError(f"its files cannot be read: {reason}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``task.toml``, with Harbor's models if there is Harbor.

    Raises:
        UnfitTaskError: It is missing, or not valid.
        OSError: It cannot be read.
    """
    path = folder / TASK_FILE
    if not path.is_file():
        raise UnfitTaskError(f"it has no {TASK_FILE}")
    text = path.read_text(encoding="utf-8")
    try:
        if not has_harbor():
            return tomllib.loads(text)
        return _harbor_config(text)
    except tomllib.TOMLDecodeError as error:
        raise UnfitTaskError(f"{TASK_FILE} is not valid TOML: {error}") from error


def _harbor_config(text: str) -> dict[str, Any]:
    from harbor.models.task.config import TaskConfig  # noqa: PLC0415 - an extra

    try:
        config: dict[str, Any] = TaskConfig.model_validate_toml(text).model_dump(mode="json")
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        raise UnfitTaskError(f"Harbor refuses its {TASK_FILE}: {problems_of(error)}") from None
    return config


def has_healthcheck(folder: Path) -> bool:
    """Whether a task's environment has a health check; ``True`` if its file cannot be read."""
    try:
        return bool(_table(read_config(folder), "environment").get("healthcheck"))
    except (OSError, UnicodeDecodeError, UnfitTaskError):
        return True


def network_modes(config: Mapping[str, Any]) -> set[str]:
    """Return the network modes that the agent runs under, one for each step.

    A step's own mode goes before the agent's, and that before the environment's;
    ``allow_internet = false`` is an older word for ``no-network`` and counts only where the
    environment says nothing newer.
    """
    environment = _table(config, "environment")
    baseline = environment.get("network_mode")
    if baseline is None and environment.get("allow_internet") is False:
        baseline = None if environment.get("allowed_hosts") is not None else _NO_NETWORK
    agent = _table(config, "agent").get("network_mode") or baseline or "public"
    steps = config.get("steps") or [{}]
    return {str(_table(step, "agent").get("network_mode") or agent) for step in steps}


def _table(config: Any, name: str) -> Mapping[str, Any]:
    value = config.get(name) if isinstance(config, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _steps(config: Mapping[str, Any]) -> tuple[str, ...]:
    steps = config.get("steps") or []
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise UnfitTaskError(f"{TASK_FILE}: steps is not an array of tables")
    return tuple(str(step.get("name", "")) for step in steps)


def _own_tests(folder: Path, config: Mapping[str, Any], steps: tuple[str, ...]) -> bool:
    system = str(_table(config, "environment").get("os") or "linux").lower()
    verifier = _table(config, "verifier")
    shared = folder / "tests"
    if not steps:
        return _has_script(shared, system) or _bundles_tests((verifier, shared))
    return all(
        _has_script(own, system)
        or _has_script(shared, system)
        or _bundles_tests((_table(step, "verifier"), own), (verifier, shared))
        for step in config["steps"]
        for own in (folder / "steps" / str(step.get("name", "")) / "tests",)
    )


def _bundles_tests(*levels: tuple[Mapping[str, Any], Path]) -> bool:
    """Whether a verifier has an environment of its own whose image holds the tests.

    The levels are a step's and the task's, the nearer one first.
    """
    separate = False
    for verifier, _ in levels:
        mode = verifier.get("environment_mode")
        if mode is not None or verifier.get("environment") is not None:
            separate = mode is None or mode == "separate"
            break
    return separate and any(
        _table(verifier, "environment").get("docker_image")
        or any((tests / name).is_file() for name in _DEFINITIONS)
        for verifier, tests in levels
    )


def _has_script(folder: Path, system: str) -> bool:
    return any((folder / f"test{ending}").is_file() for ending in _SCRIPTS.get(system, ()))


def _instruction(folder: Path) -> str:
    path = folder / INSTRUCTION
    return path.read_text(encoding="utf-8") if path.is_file() else ""
