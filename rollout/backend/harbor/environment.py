"""Parse a backend's `environment` into fields of Harbor's ``EnvironmentConfig``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout._moved import moved_names
from rollout.backend.failures import describe_exception
from rollout.backend.harbor.opensandbox import OPENSANDBOX_IMPORT_PATH, with_defaults
from rollout.backend.harbor.validation import has_harbor, problems_of
from rollout.backend.references import resolve_object
from rollout.errors import BackendConfigurationError

__all__ = ["NAMESPACE", "EnvironmentSpec", "secrets_in"]

if not TYPE_CHECKING:
    __getattr__ = moved_names(__name__)

NAMESPACE = "namespace"
NAMESPACE_IMPORT_PATH = "rollout.backend.harbor.namespace:NamespaceEnvironment"
OPENSANDBOX = "opensandbox"
_DEFAULT = "docker"

_DAYTONA = {"auto_stop_interval_mins": 60, "auto_delete_interval_mins": 0}
"""Has Daytona delete a sandbox an hour after a server that was killed has left it."""

_SHARES_HOST_NETWORK = frozenset({NAMESPACE, "singularity"})
"""Singularity gives a container the network of its host by default."""

_OURS = "shares_host_network"
_SENSITIVE = re.compile(r"key|token|secret|password|passwd|credential|auth", re.IGNORECASE)
_SHORTEST_SECRET = 4


class EnvironmentSpec:
    """An environment for trials, checked once and turned into Harbor's fields for each.

    Args:
        spec: The name of one of Harbor's types, or ``"namespace"`` for
            `rollout.backend.harbor.namespace.NamespaceEnvironment`; ``None`` is Harbor's own
            default, ``docker``. Or a mapping with the fields of Harbor's ``EnvironmentConfig``
            (``type`` or ``import_path``, ``kwargs``, ``env``, ...), where ``type`` may be
            ``"namespace"`` too, and ``"shares_host_network": False`` says that processes of an
            environment by import path do not reach the loopback of this machine. Or a mapping with
            one name and its keyword arguments, as in
            ``{"namespace": {"read_only_paths": ["/srv/models"]}}``. Or an ``EnvironmentConfig``.

    Attributes:
        name: What it is called in health and messages: the type, or the import path.
        shares_host_network: Whether its processes reach the loopback of this machine, as far as
            is known: an environment by import path counts as one that does.

    Raises:
        BackendConfigurationError: There is no such type, or Harbor refuses the fields. No value
            is in the message.
    """

    def __init__(self, spec: Any = None) -> None:
        fields = _fields(spec)
        shares = fields.pop(_OURS, None)
        if shares is not None and not isinstance(shares, bool):
            raise BackendConfigurationError(f"environment: {_OURS} is True or False")
        kind, path = fields.get("type"), fields.get("import_path")
        if kind is not None and path is not None:
            raise BackendConfigurationError("environment: type and import_path exclude each other")
        if kind is None and path is None:
            kind = fields["type"] = _DEFAULT
        if kind == NAMESPACE:
            del fields["type"]
            fields["import_path"] = NAMESPACE_IMPORT_PATH
        elif path == NAMESPACE_IMPORT_PATH:
            kind = NAMESPACE
        elif path == OPENSANDBOX_IMPORT_PATH:
            kind = OPENSANDBOX
        self.name = str(kind or path)
        self.shares_host_network = (
            self.name in _SHARES_HOST_NETWORK or kind is None if shares is None else shares
        )
        self._values = fields
        _check(fields)

    def __repr__(self) -> str:
        return f"<EnvironmentSpec {self.name!r}>"

    @property
    def is_opensandbox(self) -> bool:
        """Whether it is Harbor's own OpenSandbox environment."""
        return self.name == OPENSANDBOX

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of the environment itself, as they were given."""
        return dict(self._values.get("kwargs") or {})

    def fields(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of Harbor's ``EnvironmentConfig``, new for each trial.

        Args:
            environ: The environment variables, where OpenSandbox has defaults.
        """
        fields: dict[str, Any] = _copied(self._values)
        if self.is_opensandbox:
            fields["kwargs"] = with_defaults(fields.get("kwargs") or {}, environ)
        if self.name == "daytona" and fields.get("delete", True):
            fields["kwargs"] = _DAYTONA | (fields.get("kwargs") or {})
        return fields

    def prepare(self) -> None:
        """Check that the environment can be imported and configured. Blocking.

        Raises:
            BackendConfigurationError: Its import path leads nowhere, what it needs is not
                installed, or it cannot enforce its limits.
        """
        from harbor.environments.factory import EnvironmentFactory  # noqa: PLC0415 - an extra
        from harbor.models.trial.config import EnvironmentConfig  # noqa: PLC0415 - an extra

        config = EnvironmentConfig.model_validate(self.fields({}))
        try:
            if config.import_path is not None:
                found = resolve_object(config.import_path, name="environment")
                if not isinstance(found, type):
                    raise BackendConfigurationError(f"environment: {self.name} is not a class")  # noqa: TRY301
            EnvironmentFactory.validate_resource_policies(config)
        except BackendConfigurationError:
            raise
        except Exception as error:  # importing a module runs it
            text = describe_exception(error, self.secrets)
            raise BackendConfigurationError(f"environment {self.name}: {text}") from error

    def domain(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the OpenSandbox server that trials use, ``None`` for other environments."""
        if not self.is_opensandbox:
            return None
        kwargs = self.fields(environ)["kwargs"]
        return str(kwargs.get("domain") or environ.get("OPENSANDBOX_DOMAIN") or "") or None

    @property
    def secrets(self) -> list[str]:
        """Values that are probably secrets; Harbor writes them into a trial's folder.

        Those are the texts under a name such as ``api_key``, ``token`` or ``password``.
        """
        return secrets_in(self._values)


def secrets_in(value: Any, *, within: bool = False) -> list[str]:
    """Return the strings under a name such as ``api_key``, ``token`` or ``password``."""
    if isinstance(value, str):
        return [value] if within and len(value) >= _SHORTEST_SECRET else []
    if isinstance(value, dict):
        items = [(item, _SENSITIVE.search(name) is not None) for name, item in value.items()]
    else:
        items = [(item, False) for item in value] if isinstance(value, list) else []
    found = (secrets_in(item, within=within or named) for item, named in items)
    return sorted({text for texts in found for text in texts})


def _fields(spec: Any) -> dict[str, Any]:
    if spec is None:
        return {}
    if isinstance(spec, str):
        return {"import_path": spec} if ":" in spec else {"type": spec}
    if isinstance(spec, Mapping):
        fields = _copied(spec)
        if len(fields) == 1 and isinstance(only := next(iter(fields.values())), dict):
            name = next(iter(fields))
            if name not in {"kwargs", "env", "override_tpu"}:
                return {"type": name, "kwargs": only}
        kind = fields.get("type")
        if kind is not None:
            fields["type"] = str(getattr(kind, "value", kind))
        return {name: value for name, value in fields.items() if value is not None}
    names = getattr(spec, "model_fields_set", None)
    if names is None:
        raise BackendConfigurationError(
            "environment is a name, a mapping, or an EnvironmentConfig of Harbor"
        )
    return _fields({name: getattr(spec, name) for name in names})


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _check(fields: dict[str, Any]) -> None:
    """Check fields against Harbor's models, if Harbor is installed."""
    if not has_harbor():
        return
    from harbor.models.environment_type import EnvironmentType  # noqa: PLC0415 - an extra
    from harbor.models.trial.config import EnvironmentConfig  # noqa: PLC0415 - an extra

    kinds = sorted(each.value for each in EnvironmentType)
    if fields.get("type", _DEFAULT) not in kinds:
        raise BackendConfigurationError(
            f"environment {fields['type']!r} is not one of {', '.join([NAMESPACE, *kinds])}; name "
            "one of your own by its import path, as in 'module:Class'"
        )
    unknown = sorted(set(fields) - set(EnvironmentConfig.model_fields) - {"mounts_json"})
    if unknown:
        raise BackendConfigurationError(
            f"environment: unknown to Harbor: {', '.join(unknown)}. Known are "
            f"{', '.join(sorted(EnvironmentConfig.model_fields))}. Arguments of an environment "
            "itself go into kwargs"
        )
    try:
        EnvironmentConfig.model_validate(_copied(fields))
    except ValueError as error:
        raise BackendConfigurationError(f"environment: {problems_of(error)}") from None
