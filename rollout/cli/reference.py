"""Find the application that ``MODULE:APP`` or ``FILE.py:APP`` names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout.backend.signatures import signature_of
from rollout.cli.failures import CommandError, last_place
from rollout.server import RolloutServer

__all__ = ["load_app"]

_FORM = "MODULE:APP or FILE.py:APP"


def load_app(reference: str) -> RolloutServer:
    """Import what *reference* names and return the application.

    The current folder becomes importable, and so does the folder of a ``FILE.py``. A function
    without arguments is called; it returns the application then.

    Raises:
        CommandError: There is no such thing, it cannot be imported, or it is no application;
            the message says which, and where.
    """
    module_name, colon, path = reference.rpartition(":")
    if not colon or not module_name or not path:
        raise CommandError(
            f"the application must be given as {_FORM}, {_as_in(module_name or path)}"
        )
    _make_importable(Path.cwd())
    if module_name.endswith(".py"):
        module = _import_file(Path(module_name))
    else:
        module = _import_module(module_name)
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError:
        raise CommandError(f"{module_name} has no attribute {path!r}; {_known(module)}") from None
    return _app(found, reference)


def _as_in(name: str) -> str:
    module = name.removesuffix(".py").rpartition("/")[2]
    if not all(part.isidentifier() for part in module.split(".")):
        return f"not {name!r}"
    return f"as in {name}:app"


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _known(module: ModuleType) -> str:
    apps = [name for name, value in vars(module).items() if isinstance(value, RolloutServer)]
    if apps:
        return f"it has the application {', '.join(map(repr, apps))}"
    return "it holds no application; make one with rollout.server.create_rollout_server"


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise CommandError(
            f"{name!r} is not the name of a module; give {_FORM}, a file with its .py"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise CommandError(
                f"there is no module {error.name!r} here; is the current folder the right one?"
            ) from error
        raise _import_error(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_error(name, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"there is no file {str(path)!r}")
    path = path.resolve()
    _make_importable(path.parent)
    name = path.stem
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        name = f"rollout_app_{abs(hash(path))}"  # its own name would hide another module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{str(path)!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_error(path.name, error) from error
    return module


def _import_error(name: str, error: BaseException) -> CommandError:
    reason = f"{type(error).__name__}: {error}"
    return CommandError(f"importing {name} failed: {reason}{last_place(error)}")


def _app(found: Any, reference: str) -> RolloutServer:
    if isinstance(found, RolloutServer):
        return found
    if not callable(found):
        raise CommandError(
            f"{reference} is a {type(found).__name__}, not an application; make one with "
            "rollout.server.create_rollout_server"
        )
    try:
        signature_of(found).bind()
    except (TypeError, ValueError):
        raise CommandError(
            f"{reference} cannot be called without arguments; name an application, or a "
            "function without arguments that returns one"
        ) from None
    try:
        made = found()
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CommandError(f"calling {reference} failed: {reason}{last_place(error)}") from error
    if inspect.iscoroutine(made):
        made.close()
        raise CommandError(f"{reference} is async; use a plain function, and a lifespan for setup")
    if not isinstance(made, RolloutServer):
        raise CommandError(
            f"{reference} returned a {type(made).__name__}, not an application; make one with "
            "rollout.server.create_rollout_server"
        )
    return made
