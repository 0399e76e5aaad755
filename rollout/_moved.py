"""Names of ``osmosis_ai.rollout`` that stand elsewhere here, or that something else replaces.

A program that moves over changes ``osmosis_ai.rollout`` to ``rollout`` in its imports. Modules
that only the official package has are made when they are imported: a name with a counterpart here
is that counterpart, and the import of any other fails with a message that says what to use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

__all__ = ["find_official_modules", "moved_names"]

_TRAJECTORY_FILE = "the trajectory file, described in docs/trajectories.md"
_HARBOR = "rollout.backend.harbor.HarborBackend, which does this itself"
_EVIDENCE = "rollout.backend.harbor.verify_trial_evidence"
_SANDBOX = f"{_HARBOR}; an image needs nothing of this library"
_REGISTRY = "rollout.server.create_rollout_server, whose registry is its own"

ELSEWHERE = {
    "agent_workflow": {"AgentWorkflow": "rollout.workflow:AgentWorkflow"},
    "backend.harbor.tasks": {"TaskMode": "rollout.backend.harbor:TaskMode"},
    "backend.local.backend": {"LocalBackend": "rollout.backend:LocalBackend"},
    "client.client": {
        "POLLING_LEASE_HEADER": "rollout.types:POLLING_LEASE_HEADER",
        "RolloutAdmissionTimeoutError": "rollout.errors:RolloutAdmissionTimeoutError",
        "RolloutProtocolError": "rollout.errors:RolloutProtocolError",
    },
    "container": {},
    "integrations.agents": {},
    "trajectory.converter": {
        "convert_sample_to_trajectory": "rollout.trajectory:convert_sample_to_trajectory",
    },
    "trajectory.save": {"save_trajectory": "rollout.trajectory:save_trajectory"},
    "types.sample": {
        "ExecutionOutcome": "rollout.types:ExecutionOutcome",
        "ExecutionRequest": "rollout.types:ExecutionRequest",
        "ExecutionResult": "rollout.types:ExecutionResult",
    },
    "utils": {},
    "utils.concurrency": {},
    "utils.errors": {"categorize_exception": "rollout.backend.failures:categorize_exception"},
    "utils.evidence": {
        "verify_trial_evidence": "rollout.backend.harbor:verify_trial_evidence",
    },
    "utils.file_artifacts": {},
    "utils.identifiers": {},
    "utils.imports": {},
    "utils.rewards": {},
}
"""Where names are, by the module in which the official package has them."""

INSTEAD = {
    "backend.harbor.artifacts": _HARBOR,
    "backend.harbor.diagnostics": f"{_HARBOR} and writes diagnostics.json",
    "backend.harbor.evidence": f"{_HARBOR}, and {_EVIDENCE}",
    "backend.harbor.harness_agent": _SANDBOX,
    "backend.harbor.native_agents": "HarborBackend(agent=...), see docs/harbor-agents.md",
    "backend.harbor.preview_agents": "SampleSource.get_preview, see docs/live.md",
    "backend.harbor.source": "HarborBackend(image_bindings=...), see docs/harbor-tasks.md",
    "container.files": _SANDBOX,
    "container.runner": _SANDBOX,
    "container.trajectories": _TRAJECTORY_FILE,
    "integrations.agents.openai_agents": (
        "rollout_model and run_agent of rollout.integrations.openai_agents, for any agent and "
        "session of the OpenAI Agents SDK"
    ),
    "integrations.agents.strands": (
        "rollout_model and run_agent of rollout.integrations.strands, for any agent of Strands"
    ),
    "server.lease": "rollout.rules, whose lease rules take the time",
    "server.observability": "ExecutionBackend.health and the log",
    "server.result_registry": _REGISTRY,
    "trajectory.atif": _TRAJECTORY_FILE,
    "trajectory.converter.ATIF_PRODUCER_NAME": _TRAJECTORY_FILE,
    "trajectory.preview": "SampleSource.get_preview, see docs/live.md",
    "types.harbor": "the arguments of rollout.backend.harbor.HarborBackend",
    "utils.concurrency.ConcurrencyLimiter": "trio.CapacityLimiter, or ConcurrencyConfig",
    "utils.errors.categorize_error_type": "rollout.backend.failures.categorize_exception",
    "utils.evidence.EVIDENCE_SCHEMA": _EVIDENCE,
    "utils.evidence.MAX_EVIDENCE_FILE_BYTES": _EVIDENCE,
    "utils.evidence.evidence_path": _EVIDENCE,
    "utils.evidence.evidence_rollout_id": _EVIDENCE,
    "utils.evidence.trial_evidence_inventory": f"{_EVIDENCE}, for each rollout",
    "utils.file_artifacts.ArtifactFileState": "ctx.artifacts_dir",
    "utils.file_artifacts.artifact_tree_state": "ctx.artifacts_dir",
    "utils.file_artifacts.copy_artifact_tree": "shutil.copytree",
    "utils.file_artifacts.create_rollout_artifacts_dir": "ctx.artifacts_dir",
    "utils.file_artifacts.default_artifact_root": (
        "LocalBackend(artifact_root=...) or the variable ROLLOUT_ARTIFACT_ROOT"
    ),
    "utils.identifiers.ensure_single_path_segment": "ExecutionRequest(id=...), which checks it",
    "utils.identifiers.is_single_path_segment": "ExecutionRequest(id=...), which checks it",
    "utils.imports.ensure_import_path": "LocalBackend(workflow='module:attr')",
    "utils.imports.resolve_object": "LocalBackend(workflow='module:attr')",
    "utils.imports.to_import_path": "LocalBackend(workflow='module:attr')",
    "utils.rewards.validate_sample_has_reward": "GraderContext.set_reward, which checks it",
    "utils.ttl_cache": "cachetools.TTLCache",
}
"""What to use instead, by module or by name."""

_INTERNALS = {
    "backend.harbor.backend": """
        CredentialScrubError HARNESS_AGENT_IMPORT_PATH PREWARM_PREFIX SHUTDOWN_TIMEOUT_SEC
        STATUS_RETENTION_SEC trial_cancelled
    """,
    "backend.harbor.environment": """
        apply_chat_endpoint_egress apply_opensandbox_defaults chat_endpoint_host is_loopback_url
        load_task_network_config rewrite_url_for_docker sandbox_reaches_host_loopback
        uses_local_docker_runtime
    """,
    "backend.harbor.tasks": """
        HarborTask SDK_REQUIREMENTS_FILENAME SDK_UV SDK_VENV discover_dataset_task_ids
        parse_task_ref patch_dockerfile_with_sdk task_has_healthcheck venv_or_fallback_install
        venv_or_fallback_script
    """,
    "backend.harbor.trial": """
        PendingTrial TRIAL_NAME_PREFIX get_agent_metadata log_trial_exception parse_rollout_id
    """,
    "utils.file_artifacts": """
        CREATE_ATTEMPTS CREATE_BACKOFF_SECONDS GRADER_ARTIFACTS_SNAPSHOT_DIRNAME
        HARBOR_ARTIFACTS_DIR
    """,
}
"""Names of the official package that only its own modules use."""

for _place, _names in _INTERNALS.items():
    _home = _HARBOR if "harbor" in _place else "ctx.artifacts_dir"
    INSTEAD.update({f"{_place}.{_name}": _home for _name in _names.split()})

_PACKAGE = "rollout."


def moved_names(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, for names that the official package has in it."""
    place = module.removeprefix(_PACKAGE)
    names = ELSEWHERE.get(place, {})

    def find(name: str) -> Any:
        if name in names:
            home, _, attribute = names[name].partition(":")
            return getattr(import_module(home), attribute)
        if (instead := INSTEAD.get(f"{place}.{name}")) is not None:
            raise ImportError(_message(f"{module}.{name}", instead), name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def _message(name: str, instead: str) -> str:
    return f"trio-rollout has no {name}; use {instead}"


class _Loader(Loader):
    """Makes a module of the official package, or says what to use instead of it."""

    def exec_module(self, module: ModuleType) -> None:
        place = module.__name__.removeprefix(_PACKAGE)
        if (instead := INSTEAD.get(place)) is not None:
            raise ImportError(_message(module.__name__, instead), name=module.__name__)
        module.__doc__ = "Names of the official package, with their places here."
        module.__dict__["__all__"] = sorted(ELSEWHERE[place])
        module.__dict__["__getattr__"] = moved_names(module.__name__)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = fullname.removeprefix(_PACKAGE)
        if place == fullname or (place not in ELSEWHERE and place not in INSTEAD):
            return None
        return spec_from_loader(fullname, _Loader(), is_package=place in _PACKAGES)


_PACKAGES = {place.rpartition(".")[0] for place in [*ELSEWHERE, *INSTEAD]}


def find_official_modules() -> None:
    """Let modules be imported that the official package has and this one does not."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
