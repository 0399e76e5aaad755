"""Read what a backend is given for a class or a config: the object, or ``"module:attr"``."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from rollout.backend.imports import resolve_object
from rollout.errors import BackendConfigurationError
from rollout.types import BaseConfig

__all__ = ["class_with", "config_of"]

TBaseConfig = TypeVar("TBaseConfig", bound=BaseConfig)


def class_with(method: str, reference: Any, name: str) -> type:
    """Return the class that *reference* is or names.

    Args:
        method: What it must be able to do.
        reference: The class, or ``"module:attr"`` of one.
        name: The parameter that it was given for, for the message.

    Raises:
        BackendConfigurationError: It is no class with that method, or it is abstract.
    """
    cls = resolve_object(reference, name=name)
    if not isinstance(cls, type) or not callable(getattr(cls, method, None)):
        raise BackendConfigurationError(f"{name} must be a class with a method {method!r}")
    if inspect.isabstract(cls):
        raise BackendConfigurationError(f"{name} {cls.__name__} has abstract methods left")
    return cls


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
