"""What a fuzzed grader judged wrongly, and the file that keeps it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import field, frozen

from rollout._checks import check_number, check_whole, is_finite_number, setting
from rollout._files.atomic import reason_of, write_atomic
from rollout.codec import parse_json, structure, unstructure
from rollout.errors import EvaluationError, InvalidBodyError, InvalidFieldError
from rollout.types._fields import count, instance_of, optional

__all__ = [
    "FAMILIES",
    "PLACE",
    "Finding",
    "FindingKind",
    "FuzzSettings",
    "GraderFindings",
    "read_findings",
    "save_findings",
]

FAMILIES = {
    "label": "the label itself, of every row",
    "whitespace": "the label between blanks and line breaks",
    "case": "the label in upper or lower case",
    "full-stop": "the label with a full stop",
    "punctuation": "the label in quotes, brackets or Markdown",
    "separators": "a number with or without thousands separators",
    "number": "a number in another format: 42.0, +42, 4.2e1",
    "latex": "the label in LaTeX: \\boxed{42}, $42$",
    "mixed": "two of these forms at once, of those that pass alone",
    "empty": "nothing, or blanks and punctuation alone",
    "prompt": "the prompt",
    "near": "another number or word, which holds the label",
    "denial": "a denial: the answer is not 42",
    "candidates": "several answers, the label among them",
    "digits": "the label in other digits: \u0664\u0662, \u2074\u00b2",
    "injection": "instructions to a judge",
    "huge": "long runs of one text",
    "odd": "names of numbers such as nan, control characters, odd Unicode",
}
"""The kinds of answers. Those up to ``mixed`` are right, the others deserve nothing."""

PLACE = "{answer}"
_SCHEMA = "rollout-grader-findings/1"

_text = instance_of(str, name="a string")
_object = instance_of(dict, name="an object")
_boolean = instance_of(bool, name="a boolean")


class FindingKind(StrEnum):
    """What is wrong with a grader's verdict."""

    REWARDED = "rewarded"
    """An answer that deserves nothing passed."""

    REFUSED = "refused"
    """A right answer did not pass."""

    FAILED = "failed"
    """The grader raised an exception, set no reward, or took too long."""


def _form(_: Any, attribute: Any, value: Any) -> None:
    _text(None, attribute, value)
    if PLACE not in value:
        raise InvalidFieldError(attribute.name, f"must have {PLACE} where the answer stands")


def _families(_: Any, attribute: Any, value: Any) -> None:
    for name in value:
        if name not in FAMILIES:
            raise InvalidFieldError(attribute.name, f"takes {', '.join(FAMILIES)}")


def _finite(_: Any, attribute: Any, value: Any) -> None:
    if not is_finite_number(value):
        raise InvalidFieldError(attribute.name, "must be a finite number")


@frozen(kw_only=True)
class FuzzSettings:
    """How a grader is fuzzed.

    Attributes:
        form: The form of a right answer, with ``{answer}`` where the label stands.
        examples: How many answers of each family are tried; shrinking what is found takes more.
        seed: Decides which answers are tried.
        pass_threshold: The reward from which an answer passes.
        grader_timeout_sec: Time for the grader for each answer, in seconds; ``None`` sets no bound.
        skip: Families of `FAMILIES` that are left out.

    Raises:
        InvalidFieldError: A field breaks its rule.
    """

    form: str = field(default=PLACE, validator=_form)
    examples: int = field(default=100, validator=setting(check_whole))
    seed: int = field(default=0, validator=count)
    pass_threshold: float = field(default=1.0, validator=_finite)
    grader_timeout_sec: float | None = field(
        default=10.0, validator=setting(check_number, above=0, none=True)
    )
    skip: tuple[str, ...] = field(default=(), converter=tuple, validator=_families)


@frozen(kw_only=True)
class Finding:
    """An answer that a grader judges wrongly, with all that it takes to grade it again.

    Attributes:
        kind: What is wrong.
        family: The kind of answer, see `FAMILIES`.
        row: The row of the dataset, from 0.
        answer: The answer, the last message of the conversation.
        deserving: Whether it is right.
        reward: The reward that it got, ``None`` for none.
        error: How the grader failed.
        prompt: The messages before the answer.
        label: The row's label.
        metadata: The row's metadata.

    Raises:
        InvalidFieldError: A field has the wrong type.
    """

    kind: FindingKind
    family: str = field(validator=_text)
    row: int = field(validator=count)
    answer: str = field(validator=_text)
    deserving: bool = field(validator=_boolean)
    reward: float | None = None
    error: str | None = field(default=None, validator=optional(_text))
    prompt: list[dict[str, Any]]
    label: str | None = field(default=None, validator=optional(_text))
    metadata: dict[str, Any] | None = field(default=None, validator=optional(_object))


@frozen(kw_only=True)
class GraderFindings:
    """The result of fuzzing a grader.

    Attributes:
        app: The application with the grader, as ``FILE.py:APP`` or ``MODULE:APP``.
        dataset: The dataset that the rows are of.
        settings: How it was fuzzed.
        complete: Whether all families were tried to the end.
        findings: What is wrong.
    """

    app: str = field(validator=_text)
    dataset: str = field(validator=_text)
    settings: FuzzSettings
    complete: bool = field(validator=_boolean)
    findings: list[Finding]


def save_findings(path: Path, found: GraderFindings) -> None:
    """Write findings to a file, as a whole or not at all. Blocking.

    Raises:
        EvaluationError: The file cannot be written.
    """
    document = {"schema": _SCHEMA, **unstructure(found)}
    try:
        write_atomic(path, json.dumps(document, indent=2).encode() + b"\n")
    except OSError as error:
        raise EvaluationError(f"{path} cannot be written: {reason_of(error)}") from None


def read_findings(path: Path | str) -> GraderFindings:
    """Read a file of findings. Blocking.

    Raises:
        EvaluationError: It cannot be read, or is something else.
    """
    foreign = f"{path} is not a file of rollout eval fuzz-grader"
    try:
        value = parse_json(Path(path).read_bytes())
    except InvalidBodyError:
        raise EvaluationError(f"{foreign}: it is not JSON") from None
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path} cannot be read: {reason_of(error)}") from None
    if not isinstance(value, dict) or value.get("schema") != _SCHEMA:
        raise EvaluationError(foreign)
    try:
        return structure(value, GraderFindings)
    except InvalidBodyError as error:
        raise EvaluationError(f"{path} is damaged: {error}") from None
