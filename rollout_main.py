"""The console script ``rollout``.

It is no part of the package, whose import takes a while: until the command's own module is
there, Ctrl-C ends the process as it ends any other program, without a traceback.
"""

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `rollout.cli.group` has the command
    from rollout.cli import main as run  # noqa: PLC0415 - this is what takes a while

    run()
