"""What a `RayPool` takes, and what it says without Ray. `tests/ray` has what it does with it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import trio
from click.testing import CliRunner
from support import make_app

from rollout.cli import main
from rollout.errors import BackendConfigurationError, RolloutServerError
from rollout.pool import PoolBackend
from rollout.pool.ray import RayPool


@pytest.fixture
def ray(monkeypatch):
    """Ray, as far as it is needed to name its cluster."""
    module = ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendConfigurationError, match=r'pip install "trio-rollout\[ray\]"'):
        RayPool("my_server:app")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"address": "banana"},
            "address must be auto, local, host:port or ray://host:port, not",
        ),
        ({"address": "http://head:8265"}, "address must be auto, local, host:port or ray://"),
        ({"address": "head:port"}, "address must be auto, local, host:port or ray://host:port"),
        ({"address": "ray://head:10001/x"}, "address must be auto, local, host:port or ray://"),
        ({"address": "[::1"}, "address must be auto, local, host:port or ray://host:port"),
        ({"address": None}, "address must be auto, local, host:port or ray://host:port"),
        ({"workers": -1}, "workers must be a whole number from 0 up"),
        ({"workers": 0}, "max_workers must be a whole number from 1 up"),
        ({"workers": 4, "max_workers": 3}, "max_workers must be a whole number from 4 up, or None"),
        ({"idle_sec": 0}, "idle_sec must be a finite number above 0"),
        ({"worker_resources": ["CPU"]}, "worker_resources must be a mapping"),
        ({"worker_resources": {"CPU": -1}}, r"worker_resources\['CPU'\] must be a finite number"),
        ({"worker_resources": {"": 1}}, "worker_resources must have names of resources as keys"),
        ({"runtime_env": "."}, "runtime_env must be a mapping"),
        ({"app": ""}, "app must be MODULE:APP or FILE.py:APP"),
    ],
)
@pytest.mark.usefixtures("ray")
def test_settings_that_cannot_be_used_are_named(settings, message):
    with pytest.raises(BackendConfigurationError, match=message):
        RayPool(**{"app": "my_server:app", **settings})


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (None, {"num_cpus": 1}),
        ({"CPU": 2}, {"num_cpus": 2}),
        ({"GPU": 0.5, "memory": 1e9}, {"num_cpus": 1, "num_gpus": 0.5, "memory": 1e9}),
        ({"CPU": 0, "big": 1}, {"num_cpus": 0, "resources": {"big": 1}}),
    ],
)
@pytest.mark.usefixtures("ray")
def test_resources_are_those_that_ray_names(given, options):
    assert RayPool("my_server:app", worker_resources=given)._resources == options


@pytest.mark.usefixtures("ray")
def test_a_file_is_looked_for_at_its_path_here_or_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uploaded = {"working_dir": "."}
    assert RayPool("my_server.py:app")._app == f"{tmp_path}/my_server.py:app"
    assert RayPool("my_server.py:app", runtime_env=uploaded)._app == "my_server.py:app"
    assert RayPool("my_server:app")._app == "my_server:app"


def test_the_command_line_says_what_goes_with_ray():
    done = CliRunner().invoke(main, ["serve", "served:app", "--max-workers", "3"])
    assert done.exit_code == 2
    assert "--max-workers, --worker-resources and --runtime-env go with --ray" in done.output


@pytest.mark.parametrize("prefix", ["", "ray://"])
@pytest.mark.usefixtures("ray")
async def test_an_address_where_nothing_listens_ends_the_pool_at_once(prefix):
    with trio.socket.socket() as taken:
        await taken.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RolloutServerError) as caught:
            async with make_app(PoolBackend(RayPool("my_server:app", address))).serving():
                await trio.sleep_forever()
    assert str(caught.value) == f"Ray at {address} cannot be reached: Connection refused"
