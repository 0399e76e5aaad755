"""Commands in sandboxes, for their tests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rollout.backend.harbor._namespace.processes import pid_namespace


def bash(box, command, **options):
    return box.run(["bash", "-c", command], **options)


async def says(box, command, **options):
    """What a command wrote, which must succeed."""
    result = await bash(box, command, **options)
    assert result.return_code == 0, result
    return result.stdout


async def until(box, condition):
    """Wait inside until a shell condition holds; a FIFO or a file tells, not the time."""
    await says(box, f"until {condition}; do sleep 0.01; done")


def others(box_numbers):
    """Processes in a pid namespace that live, but for the first, as `stat` shows them."""
    number, first = box_numbers
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal() or pid_namespace(int(path.name)) != number:
            continue
        with contextlib.suppress(OSError):
            line = (path / "stat").read_text()
            if int(path.name) != first and line.rpartition(")")[2].split()[0] not in "ZX":
                found.append(line[:60])
    return found
