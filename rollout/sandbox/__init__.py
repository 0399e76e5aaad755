"""Sandboxes of Linux namespaces: programs run on this machine, apart from it, without a daemon.

A sandbox has a root folder, processes and users of its own; of the host it sees the programs,
read-only. It starts in some 50 milliseconds and leaves nothing behind::

    async with Sandbox(binds=[Bind("/srv/models")]) as sandbox:
        await sandbox.upload_dir("project", "/app")
        result = await sandbox.run(["bash", "-c", "make test"], cwd="/app", timeout_sec=60)
        await sandbox.download_dir("/app/report", "report")

This is asyncio code; from trio, call it through `rollout.integrations.asyncio_bridge`. It needs
Linux. It keeps programs apart and the host clean, and does not stop code that wants to break out.

`_sandbox` starts and ends a sandbox, runs commands and copies files. `_root` builds the folder that
becomes the root, `_setup` is the program that turns it into one, `_init_process` runs that program
and keeps its namespaces. `_process_tree` finds and kills what a command started, `_output` reads
what it writes, `_extract` unpacks archives from inside.
"""

from __future__ import annotations

from rollout.sandbox._limits import Limits
from rollout.sandbox._root import Bind
from rollout.sandbox._sandbox import CommandResult, Sandbox, remove_abandoned
from rollout.sandbox._subprocesses import check_system
from rollout.sandbox._user import User, find_user
from rollout.sandbox.errors import (
    CommandTimeoutError,
    NamespaceError,
    NamespaceStartError,
    TransferError,
)

__all__ = [
    "Bind",
    "CommandResult",
    "CommandTimeoutError",
    "Limits",
    "NamespaceError",
    "NamespaceStartError",
    "Sandbox",
    "TransferError",
    "User",
    "check_system",
    "find_user",
    "remove_abandoned",
]
