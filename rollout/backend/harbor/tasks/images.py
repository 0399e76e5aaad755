"""Published images in place of those that a sandbox would build for a task.

A mapping from tasks to images, or a manifest of the official package with one. The task itself is
never written to: the image goes into a rollout's own copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rollout.backend.harbor.errors import UnfitTaskError
from rollout.backend.harbor.plan import ResolvedTask
from rollout.backend.harbor.tasks.files import TASK_FILE
from rollout.backend.harbor.tasks.links import copy_tree
from rollout.backend.harbor.validation import problems_of
from rollout.codec import parse_json
from rollout.errors import BackendConfigurationError, InvalidBodyError

__all__ = ["ImageBindings", "load_bindings", "with_images"]

ImageBindings = Mapping[str, Mapping[str, str]]
"""By task, and then by which of its environments."""

_NAME = "image_bindings"
_ENVIRONMENT = "environment"
_ROLE = re.compile(r"environment|(?:steps\.(\d+)\.)?verifier\.environment", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", re.ASCII)
_SCHEMA = "source-v1"


def load_bindings(value: Any) -> ImageBindings | None:
    """Return the images of tasks; ``None`` if none are given.

    Args:
        value: A mapping from each task to its image, or to its images by environment; or the
            path of a JSON file with such a mapping, or of a manifest of source images.

    Raises:
        BackendConfigurationError: It is something else, or the file cannot be read.
    """
    if isinstance(value, str | os.PathLike):
        try:
            value = parse_json(Path(value).read_bytes())
        except (OSError, InvalidBodyError) as error:
            raise BackendConfigurationError(f"{_NAME} cannot be read: {error}") from error
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BackendConfigurationError(f"{_NAME} is a mapping from tasks to images, or its file")
    if "schema_version" in value:
        value = _manifest(value)
    return {task: _images(task, images) for task, images in value.items()}


def _manifest(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the images of a manifest: one as published, or one with its keys resolved."""
    if document["schema_version"] != _SCHEMA:
        raise BackendConfigurationError(f"{_NAME}: the manifest is not of schema {_SCHEMA}")
    tasks = document.get("tasks")
    try:
        if isinstance(tasks, Mapping):
            return {
                task: {role: record["image"] for role, record in images.items()}
                for task, images in tasks.items()
            }
        known = {record["key"]: record["image"] for record in document["images"]}
        return {
            entry["task"]: {role: known[key] for role, key in entry["environments"].items()}
            for entry in tasks or ()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise BackendConfigurationError(
            f"{_NAME}: the manifest is damaged ({type(error).__name__}: {error})"
        ) from error


def _images(task: Any, images: Any) -> Mapping[str, str]:
    found = {_ENVIRONMENT: images} if isinstance(images, str) else images
    if not isinstance(task, str) or not isinstance(found, Mapping) or _ENVIRONMENT not in found:
        raise BackendConfigurationError(
            f"{_NAME}[{task!r}] is an image, or a mapping with one for 'environment'"
        )
    for role, image in found.items():
        if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
            raise BackendConfigurationError(
                f"{_NAME}[{task!r}]: {role!r} is not 'environment', 'verifier.environment' or "
                "'steps.N.verifier.environment'"
            )
        if not isinstance(image, str) or _IMAGE.fullmatch(image) is None:
            raise BackendConfigurationError(f"{_NAME}[{task!r}][{role!r}] is not an image's name")
    return dict(found)


def with_images(
    task: ResolvedTask, workspace: Path, bindings: ImageBindings | None
) -> ResolvedTask:
    """Return a copy of a task that names its images; the task as it is without bindings. Blocking.

    Args:
        task: The task, fetched.
        workspace: The rollout's folder. A task in there is a copy already.
        bindings: The images of all tasks.

    Raises:
        BackendConfigurationError: The task has no images, or its files cannot name them.
    """
    if bindings is None or task.folder is None:
        return task
    images = bindings.get(task.name)
    if images is None:
        raise BackendConfigurationError(f"task {task.name} has no image in {_NAME}")
    folder = task.folder
    try:
        if not folder.is_relative_to(workspace):
            folder = workspace / "images" / folder.name
            folder.parent.mkdir(mode=0o700)
            copy_tree(task.folder, folder)
        file = folder / TASK_FILE
        file.write_text(_bound(file.read_text("utf-8"), images), encoding="utf-8")
    except (UnfitTaskError, LookupError, TypeError, ValueError) as error:
        raise BackendConfigurationError(
            f"task {task.name} cannot have its images named: "
            f"{problems_of(error) if isinstance(error, ValueError) else error}"
        ) from error
    return attrs.evolve(task, folder=folder, source={"path": str(folder)})


def _bound(text: str, images: Mapping[str, str]) -> str:
    from harbor.models.task.config import TaskConfig  # noqa: PLC0415 - an extra

    config: Any = TaskConfig.model_validate_toml(text)
    for role, image in images.items():
        if role == _ENVIRONMENT:
            config.environment.docker_image = image
            continue
        step = _step(config, role)
        # Without an environment of its own, tests run in the image of the agent's.
        own = step.verifier.environment or config.verifier.environment
        if own is not None:
            step.verifier.environment = own.model_copy(update={"docker_image": image})
    return str(config.model_dump_toml())


def _step(config: Any, role: str) -> Any:
    match = _ROLE.fullmatch(role)
    index = match[1] if match is not None else None
    if index is None:
        return config
    steps = config.steps or []
    if int(index) >= len(steps):
        raise LookupError(f"it has no step {index}")
    return steps[int(index)]
