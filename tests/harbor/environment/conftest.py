"""Harbor environments, and the sandboxes below them."""

from __future__ import annotations

import sys

from rollout.backend.harbor.validation import has_harbor

if sys.platform == "linux" and has_harbor():
    from sandbox_support import namespaces, nothing_left, run

    __all__ = ["namespaces", "nothing_left", "run"]
