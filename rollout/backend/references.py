"""Objects, classes and configs that are given as they are or named as ``"module:attr"``."""

from __future__ import annotations

import importlib
import inspect
from functools import reduce
from typing import Any, TypeVar

from rollout.errors import BackendConfigurationError
from rollout.types import BaseConfig

__all__ = ["application_of", "class_with", "config_of", "resolve_object", "split_reference"]

TBaseConfig = TypeVar("TBaseConfig", bound=BaseConfig)


def resolve_object(reference: Any, *, name: str) -> Any:
    """Return the object that a ``"module:attr"`` string names; anything else as it is.

    Args:
        reference: The string, or the object itself.
        name: The parameter that it was given for, for the message.

    Raises:
        BackendConfigurationError: The string has another form, the module cannot be found or
            has no such attribute. An error inside the module passes through.
    """
    if not isinstance(reference, str):
        return reference
    module_name, path = split_reference(reference, name=name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise BackendConfigurationError(f"{name}: there is no module {error.name!r}") from error
        raise
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        raise BackendConfigurationError(
            f"{name}: module {module_name!r} has no attribute {path!r}"
        ) from None


def split_reference(reference: str, *, name: str) -> tuple[str, str]:
    """Return the module and the path in it that a ``"module:attr"`` string names.

    Raises:
        BackendConfigurationError: The string has another form.
    """
    module_name, colon, path = reference.partition(":")
    if not colon or not all(map(str.isidentifier, module_name.split(".") + path.split("."))):
        raise BackendConfigurationError(
            f"{name} must be an object or 'module:attr', not {reference!r}"
        )
    return module_name, path


def class_with(method: str, reference: Any, name: str) -> type:
    """Return the class that *reference* is or names.

    Args:
        method: What it must be able to do.
        reference: The class, or ``"module:attr"`` of one.
        name: The parameter that it was given for, for the message.

    Raises:
        BackendConfigurationError: It is not a class with that method, or it is abstract.
    """
    cls = resolve_object(reference, name=name)
    if not isinstance(cls, type) or not callable(getattr(cls, method, None)):
        raise BackendConfigurationError(f"{name} must be a class with a method {method!r}")
    if inspect.isabstract(cls):
        raise BackendConfigurationError(f"{name} {cls.__name__} has abstract methods left")
    return cls


def application_of(workflow: type | str, grader: type | None) -> str:
    """Return the name of a workflow with its grader: ``module:Workflow/module:Grader``."""
    return "/".join(
        part if isinstance(part, str) else f"{part.__module__}:{part.__qualname__}"
        for part in (workflow, grader)
        if part is not None
    )


def config_of(reference: Any, kind: type[TBaseConfig], name: str) -> TBaseConfig | None:
    """Return the config that *reference* is or names; ``None`` if there is none.

    Args:
        reference: The config, ``"module:attr"`` of one, or ``None``.
        kind: What it must be an instance of.
        name: The parameter that it was given for, for the message.

    Raises:
        BackendConfigurationError: It is something else.
    """
    if reference is None:
        return None
    config = resolve_object(reference, name=name)
    if not isinstance(config, kind):
        raise BackendConfigurationError(f"{name} must be an instance of {kind.__name__}")
    return config
