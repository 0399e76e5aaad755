"""The command line: ``rollout serve``, ``rollout run``, ``rollout demo`` and their kin.

Theory of operation: `main` is a group that imports a command's module only when that command
is called, so that ``rollout --help`` need not load a web server. Commands raise; what they
raise becomes one line on stderr and an exit code in `rollout.cli.failures`, in one place.
"""

from rollout.cli.group import main

__all__ = ["main"]
