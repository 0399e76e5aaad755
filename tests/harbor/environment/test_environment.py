"""From what a user writes as an environment to Harbor's fields."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.validation import has_harbor
from rollout.errors import BackendConfigurationError

NAMESPACE = "rollout.backend.harbor.namespace:NamespaceEnvironment"
SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    ("spec", "name", "fields"),
    [
        (None, "docker", {"type": "docker"}),
        ({}, "docker", {"type": "docker"}),
        ("docker", "docker", {"type": "docker"}),
        ("modal", "modal", {"type": "modal"}),
        ("namespace", "namespace", {"import_path": NAMESPACE}),
        ({"type": "namespace"}, "namespace", {"import_path": NAMESPACE}),
        ({"import_path": NAMESPACE}, "namespace", {"import_path": NAMESPACE}),
        ("my.module:Env", "my.module:Env", {"import_path": "my.module:Env"}),
        (
            {"namespace": {"read_only_paths": ["/srv/x"]}},
            "namespace",
            {"import_path": NAMESPACE, "kwargs": {"read_only_paths": ["/srv/x"]}},
        ),
        (
            {"type": "namespace", "env": {"A": "1"}, "kwargs": None},
            "namespace",
            {"import_path": NAMESPACE, "env": {"A": "1"}},
        ),
        ({"modal": {"app": "x"}}, "modal", {"type": "modal", "kwargs": {"app": "x"}}),
        ({"kwargs": {"a": 1}}, "docker", {"type": "docker", "kwargs": {"a": 1}}),
        (
            {"import_path": "m:E", "shares_host_network": True, "override_cpus": 2},
            "m:E",
            {"import_path": "m:E", "override_cpus": 2},
        ),
        ({"type": SimpleNamespace(value="modal")}, "modal", {"type": "modal"}),
        (
            "daytona",
            "daytona",
            {
                "type": "daytona",
                "kwargs": {"auto_stop_interval_mins": 60, "auto_delete_interval_mins": 0},
            },
        ),
        (
            {"daytona": {"auto_stop_interval_mins": 5}},
            "daytona",
            {
                "type": "daytona",
                "kwargs": {"auto_stop_interval_mins": 5, "auto_delete_interval_mins": 0},
            },
        ),
        (
            {"type": "daytona", "delete": False},
            "daytona",
            {"type": "daytona", "delete": False},
        ),
        (
            SimpleNamespace(
                model_fields_set={"type", "kwargs"},
                type=SimpleNamespace(value="modal"),
                kwargs={"a": 1},
                env={"default": "left"},
            ),
            "modal",
            {"type": "modal", "kwargs": {"a": 1}},
        ),
    ],
)
def test_specs(spec, name, fields):
    environment = EnvironmentSpec(spec)
    assert environment.name == name
    assert environment.fields({}) == fields
    assert environment.is_opensandbox is False
    assert environment.domain({}) is None


@pytest.mark.parametrize(
    ("spec", "shares"),
    [("docker", False), ("namespace", True), ("singularity", True), ("m:E", True),
     ({"import_path": "m:E", "shares_host_network": False}, False),
     ({"type": "singularity", "shares_host_network": False}, False),
     ("opensandbox", False)],
)  # fmt: skip
def test_who_shares_the_network_of_the_host(spec, shares):
    assert EnvironmentSpec(spec).shares_host_network is shares


def test_fields_are_new_for_each_trial():
    kwargs = {"read_only_paths": ["/srv/x"]}
    environment = EnvironmentSpec({"namespace": kwargs})
    environment.fields({})["kwargs"]["read_only_paths"].append("/etc")
    kwargs["read_only_paths"].append("/root")
    assert environment.fields({})["kwargs"] == {"read_only_paths": ["/srv/x"]}


@pytest.mark.parametrize(
    "spec",
    [7, ["docker"], {"type": "docker", "import_path": "m:E"},
     {"type": "docker", "shares_host_network": "yes"}],
)  # fmt: skip
def test_what_is_no_environment(spec):
    with pytest.raises(BackendConfigurationError):
        EnvironmentSpec(spec)


def test_secrets_are_not_shown():
    environment = EnvironmentSpec(
        {"type": "modal", "kwargs": {"api_key": SECRET, "headers": [{"Auth": SECRET + "3"}]}}
    )
    assert SECRET not in repr(environment)
    assert environment.fields({})["kwargs"]["api_key"] == SECRET


def test_secrets_are_found():
    environment = EnvironmentSpec(
        {
            "type": "modal",
            "env": {"MY_TOKEN": "t-1234", "PLAIN": "plain"},
            "kwargs": {
                "api_key": SECRET,
                "image_auth": {"username": "robot", "password": "p-1234"},
                "app": "shown",
                "token": "abc",
                "keys": [1, None],
            },
        }
    )
    assert environment.secrets == sorted(["t-1234", SECRET, "robot", "p-1234"])


@pytest.mark.skipif(not has_harbor(), reason="needs Harbor")
def test_harbor_checks_the_fields():
    with pytest.raises(
        BackendConfigurationError, match=r"'dokcer' is not one of namespace, .*docker"
    ):
        EnvironmentSpec("dokcer")
    with pytest.raises(BackendConfigurationError, match="unknown to Harbor: kwarg"):
        EnvironmentSpec({"type": "docker", "kwarg": {}})
    with pytest.raises(BackendConfigurationError, match="override_cpus") as caught:
        EnvironmentSpec({"type": "docker", "override_cpus": SECRET})
    assert SECRET not in str(caught.value)


@pytest.mark.skipif(not has_harbor(), reason="needs Harbor")
def test_a_configuration_of_harbor_itself():
    from harbor.models.trial.config import EnvironmentConfig

    config = EnvironmentConfig(type="modal", env={"MY_API_KEY": SECRET}, kwargs={"a": 1})
    fields = EnvironmentSpec(config).fields({})
    assert fields == {"type": "modal", "env": {"MY_API_KEY": SECRET}, "kwargs": {"a": 1}}
    own = EnvironmentSpec(EnvironmentConfig(import_path="m:E", kwargs={"a": 1}))
    assert (own.name, own.shares_host_network) == ("m:E", True)
    assert own.fields({}) == {"import_path": "m:E", "kwargs": {"a": 1}}
    default = EnvironmentSpec(EnvironmentConfig())
    assert (default.name, default.fields({})) == ("docker", {"type": "docker"})
