"""Turn ``"module:attr"`` into the object that it names."""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from rollout.errors import BackendConfigurationError

__all__ = ["resolve_object"]


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
    module_name, colon, path = reference.partition(":")
    if not colon or not all(map(str.isidentifier, module_name.split(".") + path.split("."))):
        raise BackendConfigurationError(
            f"{name} must be an object or 'module:attr', not {reference!r}"
        )
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
