"""A Ray cluster of two nodes on this machine, with room for one worker each.

`nox -s ray` runs these tests, since Ray takes gigabytes and a minute of its own.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

pytest.importorskip("ray", reason="Ray is not installed; nox -s ray installs it")

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
APP = f"{Path(__file__).parent}/served.py:app"


def pytest_configure(config: pytest.Config) -> None:
    """Let Ray warn of what it does itself."""
    config.addinivalue_line("filterwarnings", "ignore::FutureWarning:ray")
    config.addinivalue_line("filterwarnings", "ignore:unclosed file .*/dev/null:ResourceWarning")


@define
class Nodes:
    """The nodes of the cluster; the first is its head."""

    cluster: Any
    second: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.join()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def join(self) -> None:
        self.second = self.cluster.add_node(**NODE)

    def kill(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)


@pytest.fixture(scope="session")
def nodes() -> Generator[Nodes, None, None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            yield Nodes(cluster)
        finally:
            cluster.shutdown()
