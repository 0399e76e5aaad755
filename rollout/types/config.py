"""Configs of workflows and graders, which users subclass."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, dataclass_transform

import attrs
from attrs import field, frozen

from rollout._checks import check_whole, setting
from rollout.types._fields import instance_of, optional_field

__all__ = ["AgentWorkflowConfig", "BaseConfig", "ConcurrencyConfig", "GraderConfig"]


@frozen(kw_only=True)
class ConcurrencyConfig:
    """How many rollouts may be in one phase at a time.

    Attributes:
        max_concurrent: A whole number from 1 up; ``None`` sets no limit.

    Raises:
        InvalidFieldError: `max_concurrent` is anything else.
    """

    max_concurrent: int | None = field(default=None, validator=setting(check_whole, none=True))


def _copy_mutable_defaults(
    _: type, fields: list[attrs.Attribute[Any]]
) -> list[attrs.Attribute[Any]]:
    """Give each instance its own copy of a mutable default."""
    return [
        item.evolve(default=attrs.Factory(partial(copy.deepcopy, item.default)))
        if isinstance(item.default, (list, dict, set, bytearray))
        else item
        for item in fields
    ]


@dataclass_transform(kw_only_default=True, field_specifiers=(attrs.field,))
class _Config:
    """Makes every subclass an attrs class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__attrs_attrs__" in cls.__dict__:  # attrs.define builds slotted classes twice
            return
        body = dict(vars(cls))
        # No __setattr__ of attrs, which would stand in the way of a second decoration.
        attrs.define(
            cls,
            kw_only=True,
            slots=False,
            on_setattr=attrs.setters.NO_OP,
            field_transformer=_copy_mutable_defaults,
        )
        if cls.__dict__.get("__setattr__") is object.__setattr__:
            del cls.__setattr__
        # attrs takes the defaults out of the body; the user may decorate the class too.
        for name in body.keys() & _attributes(cls).keys():
            setattr(cls, name, body[name])

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
    description: str | None = optional_field(str, "a string or None")


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
