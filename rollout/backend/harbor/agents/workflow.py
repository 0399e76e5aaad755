"""A user's workflow as the agent of a trial: packaged here, run inside the sandbox."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout._files.claims import Claim
from rollout.backend.harbor.agents.spec import AgentSpec, timeout_fields
from rollout.backend.harbor.inside import bootstrap
from rollout.backend.harbor.inside.bundle import Bundle, make_bundle
from rollout.backend.harbor.inside.documents import (
    dump_config,
    load_config,
    make_payload,
    read_result,
)
from rollout.backend.harbor.plan import TrialPlan
from rollout.backend.references import (
    class_with,
    config_of,
    resolve_object,
    split_reference,
)
from rollout.errors import BackendConfigurationError
from rollout.types import AgentWorkflowConfig, RolloutSample

__all__ = ["PREFIX", "WorkflowAgent", "python_paths"]

PREFIX = "rollout-agent-"
"""What the names of folders with packaged workflows begin with."""

_AGENT = "rollout.backend.harbor.inside.agent:SandboxAgent"
_ARTIFACTS = "/logs/artifacts"
_OPTIONS = frozenset({"modules", "python", "requirements"})


class WorkflowAgent(AgentSpec):
    """A workflow that runs inside the sandbox, on a Python 3.11 or newer that is found there.

    Args:
        agent: An `AgentWorkflow` class, or ``"module:Class"``.
        config: Its config, ``"module:attr"`` of one, or ``None``. By its name it may hold
            anything; the object itself has to have fields of plain JSON.
        options: ``python``: which Python to run it on, by its name or path in the sandbox.
            ``requirements``: more distributions that it needs, as requirement strings, where
            no import statement shows them. ``modules``: more modules of the same kind.
        code: A folder of code or a wheel that goes into the sandbox whole. What is named by a
            string, agent or config, is then not imported here.

    Raises:
        BackendConfigurationError: The class cannot be found by a name, or the config cannot
            be sent.
    """

    on_host = False

    def __init__(
        self, agent: Any, config: Any, options: dict[str, Any], code: Path | None = None
    ) -> None:
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise BackendConfigurationError(
                f"agent_options of a workflow are {', '.join(sorted(_OPTIONS))}, "
                f"not {', '.join(unknown)}"
            )
        self._python = options.get("python")
        if self._python is not None and (not isinstance(self._python, str) or not self._python):
            raise BackendConfigurationError("agent_options.python must be a name or a path")
        self._requirements = _strings("requirements", options)
        modules = _strings("modules", options)
        self._code = code
        self._main: tuple[str, Path] | None = None
        if code is not None and isinstance(agent, str):
            self.reference = agent
            modules.append(split_reference(agent, name="agent")[0])
        else:
            cls = class_with("run", agent, "agent")
            self.reference = agent if isinstance(agent, str) else self._name(cls, "agent")
            modules += [self.reference.partition(":")[0], self._module(cls)]
        if code is None or not isinstance(config, str):
            config_of(config, AgentWorkflowConfig, "agent_config")
        if isinstance(config, str):
            modules.append(split_reference(config, name="agent_config")[0])
            self._config = dump_config(config, None)
        elif config is not None:
            modules.append(self._module(type(config)))
            self._config = dump_config(config, self._name(type(config), "agent_config's class"))
            self._try_config(config)
        else:
            self._config = None
        self._modules = [module for module in dict.fromkeys(modules) if module != self._main_name]
        self.name = self.reference
        self._staging: Path | None = None

    def _try_config(self, config: AgentWorkflowConfig) -> None:
        if type(config).__module__ == "__main__":
            return  # its class goes by another name in the sandbox
        if load_config(self._config) != config:
            raise BackendConfigurationError(
                "agent_config is not made again from its fields; put it into a module and give "
                "it as 'module:attr'"
            )

    @property
    def _main_name(self) -> str | None:
        return None if self._main is None else self._main[0]

    def _module(self, cls: type) -> str:
        """Return the name of a class's module in the sandbox."""
        if cls.__module__ != "__main__":
            return cls.__module__
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None:
            return str(spec.name)
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None or not Path(file).stem.isidentifier():
            raise BackendConfigurationError(
                f"{cls.__name__} is defined in no file that can be packaged; put it into a module"
            )
        self._main = (Path(file).stem, Path(file).absolute())
        return self._main[0]

    def _name(self, cls: type, what: str) -> str:
        reference = f"{self._module(cls)}:{cls.__qualname__}"
        if "<locals>" in cls.__qualname__:
            raise BackendConfigurationError(
                f"{what} {cls.__qualname__} is defined inside a function, where a sandbox "
                "cannot find it; define it at the top of a module"
            )
        if cls.__module__ != "__main__" and resolve_object(reference, name=what) is not cls:
            raise BackendConfigurationError(f"{what}: {reference} is another class")
        return reference

    # --- AgentSpec ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Package the workflow and what it imports; see `AgentSpec.prepare`.

        The files are removed with this object, or at the end of the process.

        Raises:
            BackendConfigurationError: Something of it cannot be packaged.
        """
        try:
            importlib.import_module(_AGENT.partition(":")[0])
        except ImportError as error:
            raise BackendConfigurationError(f"Harbor cannot be imported: {error}") from error
        bundle = make_bundle(
            self._modules, main=self._main, requirements=self._requirements, code=self._code
        )
        # Not closed by a with block: it stays until this object goes.
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        weakref.finalize(self, _clean_up, folder, Claim(Path(folder.name)))
        staging = Path(folder.name) / "in"
        staging.mkdir()
        self._stage(staging, bundle)
        self._staging = staging

    def _stage(self, folder: Path, bundle: Bundle) -> None:
        (folder / "site.zip").write_bytes(bundle.archive())
        needs = [
            {"requirement": need.requirement, "imports": need.imports} for need in bundle.needs
        ]
        (folder / "needs.json").write_text(json.dumps(needs))
        (folder / "bootstrap.py").write_bytes(Path(bootstrap.__file__).read_bytes())

    def fields(self, plan: TrialPlan) -> dict[str, Any]:
        """Write the payload of a trial into its workspace; see `AgentSpec.fields`."""
        if self._staging is None:
            raise BackendConfigurationError("the workflow has not been packaged")
        folder = _folder(plan)
        folder.mkdir(mode=0o700, exist_ok=True)
        payload = folder / "payload.json"
        payload.write_bytes(
            make_payload(
                plan.request,
                workflow=self.reference,
                config=self._config,
                instruction=plan.task.instruction,
                artifacts_dir=_ARTIFACTS,
            )
        )
        return {
            **timeout_fields(plan),
            "import_path": _AGENT,
            "kwargs": {
                "staging": str(self._staging),
                "payload": str(payload),
                "result": str(_result(plan)),
                "python": self._python,
            },
        }

    def sample(self, plan: TrialPlan) -> RolloutSample | None:
        """Return what the workflow handed back, with the request's label; see `AgentSpec`.

        Raises:
            InvalidFieldError: The result is torn, or no result.
        """
        try:
            sample = read_result(_result(plan)).sample
        except FileNotFoundError:
            return None
        if sample is not None and sample.label is None:
            sample.label = plan.request.label
        return sample


def _clean_up(folder: tempfile.TemporaryDirectory[str], claim: Claim) -> None:
    folder.cleanup()
    claim.release()


def _folder(plan: TrialPlan) -> Path:
    """Return the folder for payload and result, next to Harbor's trial folder."""
    return plan.workspace / "agent"


def _result(plan: TrialPlan) -> Path:
    return _folder(plan) / "result.json"


def _strings(name: str, options: dict[str, Any]) -> list[str]:
    value = options.get(name, [])
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BackendConfigurationError(f"agent_options.{name} must be a list of strings")
    found = list(value)
    if not all(isinstance(each, str) and each for each in found):
        raise BackendConfigurationError(f"agent_options.{name} must be a list of strings")
    return found


def python_paths() -> list[str]:
    """Return the folders of this process's Python and of its packages.

    For environments that show parts of this machine, as `NamespaceEnvironment` does with its
    ``read_only_paths``: a workflow then runs on the same Python, with all that is installed.
    """
    found: list[str] = []
    for path in (sys.base_prefix, sys.prefix, *map(_real, (sys.base_prefix, sys.prefix))):
        # What lies below another one is shown with it; /usr is there in any case.
        inside = any(Path(path).is_relative_to(other) for other in ("/usr", *found))
        if Path(path).is_dir() and not inside:
            found.append(path)
    return found


def _real(path: str) -> str:
    return str(Path(path).resolve())
