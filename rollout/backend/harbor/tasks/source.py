"""Find the Harbor task that a rollout runs.

Three steps, each in a module of its own: what the rollout's metadata says
(`rollout.backend.harbor.tasks.references`), where that is on this machine (here) or how it gets
there (`rollout.backend.harbor.tasks.fetch`), and what its files say
(`rollout.backend.harbor.tasks.files`). Mode ``template`` runs a copy of one task with the
rollout's prompt as its instruction; mode ``dataset`` runs the task that the metadata names, with
the task's own instruction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import attrs

from rollout._checks import backend_settings, check_choice, check_flag
from rollout.backend.harbor.errors import TaskFetchError, UnfitTaskError
from rollout.backend.harbor.plan import ResolvedTask
from rollout.backend.harbor.tasks.fetch import fetch_task
from rollout.backend.harbor.tasks.files import INSTRUCTION, TASK_FILE, describe
from rollout.backend.harbor.tasks.links import copy_tree
from rollout.backend.harbor.tasks.prompts import fill_template, instruction_of
from rollout.backend.harbor.tasks.references import parse_task, relative_path
from rollout.errors import BackendConfigurationError, InvalidFieldError
from rollout.types import ExecutionRequest

__all__ = ["TaskFetchError", "TaskMode", "TaskSource", "fetch_task"]

_TASK = "metadata.harbor_task"
_TASK_ID = "metadata.harbor_task_id"
_MODEL = "metadata.harbor_model"


class TaskMode(StrEnum):
    """How a rollout comes by its task; the values can be given as plain strings too."""

    TEMPLATE = "template"
    """The prompt is written into a copy of one task."""

    DATASET = "dataset"
    """The rollout's metadata names one of a folder of tasks."""


class TaskSource:
    """Finds the task of each rollout.

    Args:
        tasks_dir: In mode ``template`` one Harbor task, in mode ``dataset`` a folder of tasks.
            ``None`` leaves the task to each rollout's ``metadata["harbor_task"]``.
        task_mode: The mode.
        allow_any_path: Let ``metadata["harbor_task"]`` name any folder of this machine, not only
            one below ``tasks_dir`` of mode ``dataset``. For callers who may read all of it.
        allow_local_git: Let it name a git repository of this machine.

    Raises:
        BackendConfigurationError: ``tasks_dir`` is not what the mode needs, or the template has
            several steps, links out of it, or a ``task.toml`` that is not valid.
    """

    def __init__(
        self,
        tasks_dir: str | os.PathLike[str] | None = None,
        task_mode: TaskMode | Literal["template", "dataset"] = TaskMode.TEMPLATE,
        *,
        allow_any_path: bool = False,
        allow_local_git: bool = False,
    ) -> None:
        with backend_settings():
            check_choice("task_mode", task_mode, [mode.value for mode in TaskMode])
            check_flag("allow_any_path", allow_any_path)
            check_flag("allow_local_git", allow_local_git)
        self.task_mode = TaskMode(task_mode)
        self.allow_any_path = allow_any_path
        self.allow_local_git = allow_local_git
        self.tasks_dir = None if tasks_dir is None else _folder(tasks_dir)
        if self.tasks_dir is not None and task_mode == "template":
            self._template(self.tasks_dir)
        elif self.tasks_dir is not None and (self.tasks_dir / TASK_FILE).is_file():
            raise BackendConfigurationError(
                f"tasks_dir is a task itself; mode 'dataset' needs the folder above it, and "
                f"mode 'template' runs one task: {self.tasks_dir}"
            )

    def __repr__(self) -> str:
        where = None if self.tasks_dir is None else str(self.tasks_dir)
        return f"<TaskSource {self.task_mode} {where!r}>"

    def resolve(self, request: ExecutionRequest, workspace: Path) -> ResolvedTask:
        """Find a rollout's task. Blocking.

        A task that is on this machine comes back complete; one of git or of the registry is left
        to `fetch_task`.

        Args:
            request: The rollout.
            workspace: The rollout's own folder, where a copy of a template goes.

        Raises:
            InvalidFieldError: The rollout names no task, or none that there is, or its messages
                cannot be an instruction.
            BackendConfigurationError: The task is not what Harbor asks for.
        """
        metadata = request.metadata or {}
        _check_model(metadata)
        named, task_id = metadata.get("harbor_task"), metadata.get("harbor_task_id")
        if named is not None and task_id is not None:
            raise InvalidFieldError(_TASK, "and metadata.harbor_task_id exclude each other")
        if named is not None:
            return self._named(named)
        if self.task_mode == "template":
            if task_id is not None:
                raise InvalidFieldError(
                    _TASK_ID, "is for a backend with task_mode='dataset'; this one has a template"
                )
            return self._from_template(request, workspace)
        if self.tasks_dir is None:
            raise InvalidFieldError(_TASK, "is required, since the backend has no tasks_dir")
        if task_id is None:
            raise InvalidFieldError(_TASK_ID, "is required: it names a task of the dataset")
        return self._from_dataset(task_id, _TASK_ID)

    def known(self) -> list[ResolvedTask]:
        """Return the tasks that are known before a rollout names one. Blocking.

        They are not read yet: `fetch_task` does that, and says what is wrong with them.
        """
        if self.tasks_dir is None:
            return []
        if self.task_mode == "template":
            return [_unread(self.tasks_dir, self.tasks_dir.name)]
        root = self.tasks_dir
        return [
            _unread(folder, folder.relative_to(root).as_posix()) for folder in _task_folders(root)
        ]

    def _named(self, value: Any) -> ResolvedTask:
        if (
            isinstance(value, str)
            and "/" not in value
            and self.task_mode == "dataset"
            and self.tasks_dir is not None
        ):
            return self._from_dataset(value, _TASK)
        reference = parse_task(value, allow_local_git=self.allow_local_git)
        if not isinstance(reference, str):
            return reference
        if Path(reference).is_absolute():
            return self._anywhere(Path(reference))
        if self.task_mode != "dataset" or self.tasks_dir is None:
            raise InvalidFieldError(_TASK, "may be a relative path only with task_mode='dataset'")
        return self._from_dataset(reference, f"{_TASK}.path")

    def _anywhere(self, path: Path) -> ResolvedTask:
        below = self.tasks_dir if self.task_mode == "dataset" else None
        real = Path(os.path.realpath(path))
        inside = below is not None and real != below and real.is_relative_to(below)
        if not self.allow_any_path and not inside:
            raise InvalidFieldError(f"{_TASK}.path", "leads out of the backend's tasks_dir")
        if not (real / TASK_FILE).is_file():
            raise InvalidFieldError(f"{_TASK}.path", "is not the folder of a task")
        return _read(real, os.path.relpath(real, below) if inside else real.name)

    def _from_dataset(self, value: Any, field: str) -> ResolvedTask:
        root, name = self.tasks_dir, relative_path(value, field)
        real = Path(os.path.realpath(Path(root or "") / name))
        if root is None or real == root or not real.is_relative_to(root):
            raise InvalidFieldError(field, "leads out of the backend's tasks_dir")
        if not (real / TASK_FILE).is_file():
            raise InvalidFieldError(field, "names no task of the backend's tasks_dir")
        return _read(real, name)

    def _template(self, folder: Path) -> ResolvedTask:
        task = _read(folder, folder.name, who=f"the template {folder.name}")
        if task.steps:
            raise BackendConfigurationError(
                f"the template {folder.name} has steps ({', '.join(task.steps)}), each with an "
                f"instruction of its own, so there is no one place for a rollout's prompt: use "
                f"task_mode='dataset' for it, or a task of one step"
            )
        return task

    def _from_template(self, request: ExecutionRequest, workspace: Path) -> ResolvedTask:
        template = self.tasks_dir
        if template is None:
            raise InvalidFieldError(_TASK, "is required, since the backend has no tasks_dir")
        prompt = instruction_of(request.prompt)
        # Read again for each rollout: an operator may edit a template while a server runs.
        task = self._template(template)
        folder = workspace / "task" / template.name
        folder.parent.mkdir(mode=0o700)
        instruction = fill_template(task.instruction or "", prompt)
        try:
            copy_tree(template, folder, without=INSTRUCTION)
        except UnfitTaskError as error:
            raise BackendConfigurationError(f"the template {template.name}: {error}") from error
        (folder / INSTRUCTION).write_text(instruction, encoding="utf-8")
        return attrs.evolve(task, folder=folder, source={"path": folder}, instruction=instruction)


def _unread(folder: Path, name: str) -> ResolvedTask:
    return ResolvedTask(name=name, source={"path": folder})


def _read(folder: Path, name: str, who: str | None = None) -> ResolvedTask:
    try:
        return describe(folder, name)
    except UnfitTaskError as error:
        raise BackendConfigurationError(f"{who or f'task {name}'}: {error}") from error


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(os.path.realpath(Path(path).expanduser()))
    if not folder.is_dir():
        raise BackendConfigurationError(f"tasks_dir is not a folder: {folder}")
    return folder


def _task_folders(root: Path) -> Iterator[Path]:
    """Yield the tasks below a folder; a task is not searched for more."""
    with os.scandir(root) as found:
        names = sorted(
            entry.name
            for entry in found
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        )
    for name in names:
        folder = root / name
        if (folder / TASK_FILE).is_file():
            yield folder
        else:
            yield from _task_folders(folder)


def _check_model(metadata: dict[str, Any]) -> None:
    model = metadata.get("harbor_model")
    if "harbor_model" in metadata and (not isinstance(model, str) or not model.strip()):
        raise InvalidFieldError(_MODEL, "is a string with the model's name")
