from __future__ import annotations

import pytest

from rollout.evaluation import DatasetColumns, DatasetConfig
from rollout.evaluation.datasets import open_dataset


@pytest.fixture
def dataset(tmp_path):
    """Make a dataset of a file's bytes or text; `columns` takes the mapping."""

    def make(name, data, *, columns=None, **settings):
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return open_dataset(
            DatasetConfig(path=path, columns=DatasetColumns(**columns or {}), **settings)
        )

    return make
