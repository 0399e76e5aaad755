"""Rollouts on many cores and machines: a backend whose workers are rollout servers.

A front is a server with a `PoolBackend`. It admits rollouts, hands each to the worker with most
room, and passes on what becomes of it; to its callers it is a server like any other.
"""

from rollout.pool.backend import PoolBackend
from rollout.pool.local import LocalWorkers
from rollout.pool.source import Workers, WorkerSource
from rollout.pool.worker import Worker, WorkerAddress

__all__ = ["LocalWorkers", "PoolBackend", "Worker", "WorkerAddress", "WorkerSource", "Workers"]
