"""What users configure a workflow, a grader and their concurrency with."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from typing import Any, ClassVar, dataclass_transform, get_origin

import attrs
from attrs import field, frozen

from rollout.errors import InvalidFieldError
from rollout.types._fields import instance_of, is_whole_from_one, optional

__all__ = ["AgentWorkflowConfig", "BaseConfig", "ConcurrencyConfig", "GraderConfig"]


def _whole_number_from_one(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not is_whole_from_one(value):
        raise InvalidFieldError(attribute.name, "must be a whole number from 1 up, or None")


@frozen(kw_only=True)
class ConcurrencyConfig:
    """How many rollouts may be in one phase at a time.

    Attributes:
        max_concurrent: A whole number from 1 up; ``None`` sets no limit.

    Raises:
        InvalidFieldError: `max_concurrent` is anything else.
    """

    max_concurrent: int | None = field(default=None, validator=_whole_number_from_one)


_CLASS_VAR = re.compile(r"(?:\w+\.)*ClassVar\b")


def _class_var(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return _CLASS_VAR.match(annotation) is not None
    return annotation is ClassVar or get_origin(annotation) is ClassVar


def _default_of(value: Any) -> Any:
    """Give each instance its own copy of a mutable default."""
    if isinstance(value, (list, dict, set, bytearray)):
        return attrs.Factory(lambda: copy.deepcopy(value))
    return value


def _annotations(cls: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        # Names that only a type checker can see stay unresolved instead of failing.
        from annotationlib import Format, get_annotations  # noqa: PLC0415

        return get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)


def _collect_fields(cls: type) -> None:
    """Make *cls* an attrs class from its own annotations, leaving its body as it stands.

    The fields are handed over explicitly, since attrs would otherwise take the defaults out
    of the class body and a second decoration by the user would find them gone. For the same
    reason attrs writes no ``__setattr__`` here; `_Config` has one for all.
    """
    these: dict[str, Any] = {}
    for name, annotation in _annotations(cls).items():
        if _class_var(annotation):
            continue
        value = cls.__dict__.get(name, attrs.NOTHING)
        if isinstance(value, type(attrs.field())):
            these[name] = value
        else:
            these[name] = attrs.field(default=_default_of(value))
    attrs.define(
        cls,
        these=these,
        kw_only=True,
        slots=False,
        eq=True,
        auto_attribs=False,
        on_setattr=attrs.setters.NO_OP,
    )
    if cls.__dict__.get("__setattr__") is object.__setattr__:
        # What attrs writes below a base that the user decorated; it would stand in the way
        # of decorating this class too.
        del cls.__setattr__


@dataclass_transform(kw_only_default=True, field_specifiers=(attrs.field,))
class _Config:
    """Makes every subclass an attrs class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__attrs_attrs__" not in cls.__dict__:  # attrs.define builds slotted classes twice
            _collect_fields(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        attribute = _attributes(type(self)).get(name)
        if attribute is not None:
            value = attrs.setters.convert(self, attribute, value)
            attrs.setters.validate(self, attribute, value)
        super().__setattr__(name, value)


def _attributes(cls: Any) -> dict[str, attrs.Attribute[Any]]:
    return attrs.fields_dict(cls)


class BaseConfig(_Config):
    """Base of the configs; subclass it to add fields of your own, no decorator is needed.

    Example::

        class SolverConfig(AgentWorkflowConfig):
            temperature: float = 0.7
            tools: list[str] = []

        SolverConfig(name="solver", temperature=0.2)

    Annotated attributes become keyword-only fields, plain defaults and `attrs.field` both
    work, mutable defaults are copied for each instance. Decorating the subclass with
    `attrs.define` is fine too.

    Attributes:
        name: A name for people: logs and reports show it.
        description: What the component does, or ``None``.
    """

    name: str = field(validator=instance_of(str, name="a string"))
    description: str | None = field(
        default=None, validator=optional(instance_of(str, name="a string or None"))
    )


class AgentWorkflowConfig(BaseConfig):
    """Configuration of an `rollout.AgentWorkflow`; each rollout gets a deep copy.

    Attributes:
        concurrency: How many rollouts run at a time. Without a config the backend takes 4.
    """

    concurrency: ConcurrencyConfig = field(
        factory=ConcurrencyConfig,
        validator=instance_of(ConcurrencyConfig, name="a ConcurrencyConfig"),
    )


class GraderConfig(BaseConfig):
    """Configuration of a `rollout.Grader`.

    Attributes:
        concurrency: How many gradings run at a time, on top of the workflow's own limit.
    """

    concurrency: ConcurrencyConfig = field(
        factory=ConcurrencyConfig,
        validator=instance_of(ConcurrencyConfig, name="a ConcurrencyConfig"),
    )
