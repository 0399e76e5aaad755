"""Run rollouts as Harbor trials.

`rollout.backend.harbor.namespace` holds an environment for Harbor that needs no Docker. Importing
this package does not need Harbor.
"""

from __future__ import annotations

from rollout.backend.harbor.pythons import python_paths

__all__ = ["python_paths"]
