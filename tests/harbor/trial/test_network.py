"""Whether a sandbox reaches the chat endpoint. No name is looked up for it."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from rollout._http import is_loopback_host
from rollout.backend.harbor.environment import EnvironmentSpec
from rollout.backend.harbor.plan import ResolvedTask, TrialPlan
from rollout.backend.harbor.trial import network
from rollout.backend.harbor.trial.network import (
    agent_extra_hosts,
    chat_host,
    chat_url_inside,
    check_chat_url,
)
from rollout.context import RolloutContext
from rollout.errors import InvalidFieldError
from rollout.types import ExecutionRequest

DOCKER = EnvironmentSpec("docker")
NAMESPACE = EnvironmentSpec("namespace")


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch):
    def lookup(*_args, **_kwargs):
        raise AssertionError("a name was looked up")

    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, lookup)


def plan(url="http://models.example:8000/v1", *, allowlisted=False, offline=False):
    return TrialPlan(
        request=ExecutionRequest(id="r1", prompt=[{"role": "user", "content": "hi"}]),
        context=RolloutContext(chat_completions_url=url, api_key="sk-1", rollout_id="r1"),
        workspace=Path("/nowhere"),
        name="r1-x",
        task=ResolvedTask(name="add", source={}, allowlisted=allowlisted, offline=offline),
    )


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://models.example:8000/v1", "models.example"),
        ("https://MODELS.example./v1", "models.example"),
        ("http://u:p@10.0.0.1/v1", "10.0.0.1"),
        ("http://[FD00::1]:80/v1", "fd00::1"),
        ("http://bücher.example/", "xn--bcher-kva.example"),
    ],
)
def test_hosts(url, host):
    assert chat_host(url) == host


@pytest.mark.parametrize(
    "url",
    ["", "models.example", "ftp://x/y", "http://", "http://:80/", "http://[::1", "http://a:b"],
)
def test_no_hosts(url):
    with pytest.raises(InvalidFieldError) as caught:
        chat_host(url)
    assert caught.value.field == "chat_completions_url"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.", "a.localhost", "localhost.localdomain", "ip6-localhost",
     "127.0.0.1", "127.255.3.4", "0.0.0.0", "::1", "[::1]", "::", "::ffff:127.0.0.1",
     "0:0:0:0:0:0:0:1", "127.1", "0x7f.1", "2130706433", "0"],
)  # fmt: skip
def test_loopback(host):
    assert is_loopback_host(host)


@pytest.mark.parametrize(
    "host",
    ["models.example", "host.docker.internal", "10.0.0.1", "172.17.0.1", "169.254.1.1",
     "localhost.example", "notlocalhost", "fe80::1%eth0", "::ffff:10.0.0.1", "128.0.0.1", ""],
)  # fmt: skip
def test_no_loopback(host):
    assert not is_loopback_host(host)


# --- Docker on macOS -----------------------------------------------------------------------------


@pytest.fixture
def macos(monkeypatch):
    monkeypatch.setattr(network, "platform", SimpleNamespace(system=lambda: "Darwin"))


@pytest.mark.parametrize(
    ("url", "inside"),
    [
        ("http://127.0.0.1:9000/v1", "http://host.docker.internal:9000/v1"),
        ("http://u:p@localhost/v1?a=1", "http://u:p@host.docker.internal/v1?a=1"),
        ("http://[::1]:80/v1", "http://host.docker.internal:80/v1"),
        ("http://models.example:8000/v1", "http://models.example:8000/v1"),
        ("", ""),
    ],
)
@pytest.mark.usefixtures("macos")
def test_docker_on_macos_has_a_name_for_the_hosts_loopback(url, inside):
    assert chat_url_inside(url, DOCKER) == inside
    assert chat_url_inside(url, NAMESPACE) == url
    there = attrs.evolve(plan(url, allowlisted=True), url_inside=inside)
    check_chat_url(there, agent_on_host=False, environment=DOCKER)
    assert agent_extra_hosts(there) == ([chat_host(inside)] if inside else [])


def test_docker_elsewhere_has_none():
    assert chat_url_inside("http://127.0.0.1:9000/v1", DOCKER) == "http://127.0.0.1:9000/v1"


# --- the allowlist --------------------------------------------------------------------------------


def test_the_endpoint_joins_an_allowlist():
    assert agent_extra_hosts(plan(allowlisted=True)) == ["models.example"]


def test_nothing_is_added_without_one():
    assert agent_extra_hosts(plan()) == []


def test_a_phase_without_a_network_is_never_widened():
    # Harbor would turn it into an allowlist as soon as a host is added.
    assert agent_extra_hosts(plan(offline=True)) == []
    assert agent_extra_hosts(plan(offline=True, allowlisted=True)) == []


def test_an_agent_on_the_host_needs_nothing():
    assert agent_extra_hosts(plan(allowlisted=True), agent_on_host=True) == []
    assert agent_extra_hosts(plan("", allowlisted=True)) == []


# --- the check ------------------------------------------------------------------------------------


def refused(found, environment):
    with pytest.raises(InvalidFieldError) as caught:
        check_chat_url(found, agent_on_host=False, environment=environment)
    assert caught.value.field == "chat_completions_url"
    return str(caught.value)


def test_a_loopback_url_leads_back_into_the_sandbox():
    found = plan("http://127.0.0.1:9000/v1")
    message = refused(found, DOCKER)
    assert "docker" in message
    assert "host.docker.internal" in message
    assert "namespace" in message
    check_chat_url(found, agent_on_host=True, environment=DOCKER)
    check_chat_url(found, agent_on_host=False, environment=NAMESPACE)
    own = {"import_path": "my.module:Environment"}
    check_chat_url(found, agent_on_host=False, environment=EnvironmentSpec(own))
    refused(found, EnvironmentSpec(own | {"shares_host_network": False}))


@pytest.mark.parametrize("environment", [DOCKER, NAMESPACE])
def test_a_sandbox_without_a_network_reaches_nothing(environment):
    for url in ("http://models.example/v1", "http://127.0.0.1/v1"):
        message = refused(plan(url, offline=True), environment)
        assert "without a network" in message
        assert "never widened" in message
        assert "terminus-2" in message
        check_chat_url(plan(url, offline=True), agent_on_host=True, environment=environment)


def test_what_can_be_reached_passes():
    for url in ("http://models.example/v1", "http://host.docker.internal/v1", ""):
        check_chat_url(plan(url), agent_on_host=False, environment=DOCKER)
        check_chat_url(plan(url, allowlisted=True), agent_on_host=False, environment=DOCKER)


def test_no_secret_of_the_url_is_said():
    found = plan("http://robot:hunter2@127.0.0.1/v1")
    assert "hunter2" not in refused(found, DOCKER)
    assert "hunter2" not in refused(plan("ftp://robot:hunter2@x/"), DOCKER)
