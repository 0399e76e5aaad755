"""Choose who grades a trial: the task's own tests, a user's grader, or neither."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import attrs

from rollout._json.text import utf8
from rollout._logs import get_logger
from rollout.backend.harbor.plan import LEAST_SEC, ResolvedTask, TrialPlan
from rollout.codec import dump_json
from rollout.errors import InvalidFieldError
from rollout.types import ExecutionRequest

__all__ = ["check_gradable", "verifier_fields", "with_placeholder_tests"]

logger = get_logger(__name__)

GRADER_VERIFIER = "rollout.backend.harbor.grading.grader_verifier:GraderVerifier"

_LONGEST_VARIABLE = 100_000
"""Linux takes no more than 128 KiB for one environment variable."""

# What Harbor would put a variable of this process in for.
_TEMPLATE = re.compile(r"\$\{[^}:]+(?::-.*)?\}")
_PLACEHOLDER = "tests/test.sh"
_PLACEHOLDER_TEXT = """\
#!/bin/bash
echo "this task is graded by the rollout server's grader" >&2
exit 1
"""


def check_gradable(request: ExecutionRequest, task: ResolvedTask, grader_cls: Any) -> None:
    """Check that a rollout can be graded, before its agent runs.

    Raises:
        InvalidFieldError: The rollout is to be graded and cannot be.
    """
    if not request.grade or task.own_tests:
        return
    if grader_cls is None:
        raise InvalidFieldError(
            "grade",
            f"is true, but the rollout cannot be graded: task {task.name} has no tests/test.sh, "
            "and this server has no grader (add tests, configure a grader, or send grade=false)",
        )
    if request.label is None and request.metadata is None:
        raise InvalidFieldError(
            "grade",
            "is true, but the rollout cannot be graded: the request has neither a label nor "
            "metadata (send one of them, or grade=false)",
        )


def verifier_fields(plan: TrialPlan) -> dict[str, Any]:
    """Return the fields of Harbor's ``VerifierConfig`` for a trial that can be graded.

    A task's own ``tests/test.sh`` goes before the grader. It gets the request's label and
    metadata as ``ROLLOUT_LABEL`` and ``ROLLOUT_METADATA`` (JSON).
    """
    if not plan.request.grade:
        return {"disable": True}
    fields: dict[str, Any] = {}
    if plan.grader_timeout_sec is not None:
        fields["override_timeout_sec"] = max(plan.grader_timeout_sec, LEAST_SEC)
    if plan.task.own_tests:
        fields["env"] = _environment(plan.request)
    else:
        fields["import_path"] = GRADER_VERIFIER
    return fields


def _environment(request: ExecutionRequest) -> dict[str, str]:
    values: dict[str, str] = {}
    if request.label is not None:
        values["ROLLOUT_LABEL"] = _literal("label", utf8(request.label))
    if request.metadata is not None:
        values["ROLLOUT_METADATA"] = dump_json(request.metadata).decode("ascii")
    for name in [name for name, value in values.items() if len(value) > _LONGEST_VARIABLE]:
        del values[name]
        logger.warning(
            "rollout %s: %s is too long for an environment variable; the tests do without",
            request.id,
            name,
        )
    return values


def _literal(name: str, value: str) -> str:
    """Escape a value that Harbor would expand as a variable of this process."""
    if "\0" in value:
        raise InvalidFieldError(name, "holds NUL, which no environment variable can")
    if not _TEMPLATE.fullmatch(value):
        return value
    if "\n" in value:
        raise InvalidFieldError(name, "looks like a template of an environment variable")
    return f"${{ROLLOUT_NEVER_SET:-{value}}}"


def with_placeholder_tests(task: ResolvedTask, workspace: Path) -> ResolvedTask:
    """Return a copy of a task without tests, with a script that fails. Blocking.

    Harbor refuses a task without a test script even where a verifier of another kind grades
    it. A task with tests comes back as it is.

    Args:
        task: The task, fetched.
        workspace: The rollout's folder; the copy goes there.
    """
    if task.own_tests or task.folder is None:
        return task
    copy = workspace / "graded" / task.folder.name
    shutil.copytree(task.folder, copy, symlinks=True)
    script = copy / _PLACEHOLDER
    script.parent.mkdir(exist_ok=True)
    script.write_text(_PLACEHOLDER_TEXT)
    return attrs.evolve(task, folder=copy, source={"path": str(copy)})
