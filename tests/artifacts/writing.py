"""The process that writes the files of a store, looked at and interfered with from outside."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import trio


async def writer_pid(store):
    """Have the process started, and return its id."""
    await store.save("first", dict)
    return store._writer.pid


@contextmanager
def hanging(pid):
    """Stop the process for the block, as storage that hangs does."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until(condition):
    while not condition():
        await trio.lowlevel.checkpoint()


async def until_sent(store, count=1):
    """Wait until so many jobs are not answered, of which the process has some."""
    await until(lambda: len(store._writer._sent) + len(store._writer._waiting) == count)
    await until(lambda: store._writer._sent)
