"""The rollout server: admission, leases, results, shutdown."""

from rollout.server.app import RolloutServer, create_rollout_server
from rollout.server.runner import serve
from rollout.server.shutdown import ShutdownBudget

__all__ = ["RolloutServer", "ShutdownBudget", "create_rollout_server", "serve"]
