"""Names of runs: generated ones, and what a name may be."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

__all__ = ["RUN_NAME", "unused_name"]

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_FIRST = """
    amber ample brisk civil copper crisp dapper early fair frosty golden hardy hazel ivory level
    little merry misty modest navy olive placid plain ready rosy rustic sandy silver steady sunny
    tidy velvet
""".split()  # noqa: SIM905 - a list would take a page
_SECOND = """
    acorn aspen barley beech birch cedar clover cypress elder fern fig heather holly iris ivy
    juniper larch lilac linden maple mint moss oak poplar reed rowan sage spruce thistle walnut
    willow yew
""".split()  # noqa: SIM905
_NUMBERS = range(1000)


def unused_name(folder: Path) -> str:
    """Generate the name of a run, as in ``sandy-maple-417``, that *folder* has nothing by."""
    while True:
        name = "-".join(str(random.choice(part)) for part in (_FIRST, _SECOND, _NUMBERS))  # noqa: S311
        if not os.path.lexists(folder / name):
            return name
