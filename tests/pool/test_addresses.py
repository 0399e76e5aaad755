"""Lists of workers, names that are looked up again, and workers that are refused."""

from __future__ import annotations

import socket
import sys

import pytest
import trio
from pool.helpers import Agents, all_up, ask, front_over, net, start, statuses, until, worker_app
from support import local_backend, make_app

from rollout.errors import BackendConfigurationError, InvalidFieldError, RolloutServerError
from rollout.pool import PoolBackend, WorkerAddress, WorkerSource
from rollout.server import serve


@pytest.mark.parametrize(
    ("workers", "options", "message"),
    [
        ([], {}, "workers must not be empty: name a URL at least"),
        ("http://node1:8000", {}, "workers must be a list of URLs, or a WorkerSource"),
        (["node1:8000"], {}, "worker 1 of the list: url must be an http:// or https:// URL"),
        (["http://a:1", 7], {}, "worker 2 of the list: url must be a string"),
        (["unix:"], {}, "worker 1 of the list: url must name a path after unix:"),
        (["http://a:1", "http://a:1/"], {}, "worker a:1 is listed twice"),
        (["http://a:1"], {"max_queue_depth": 0}, "max_queue_depth must be a whole number"),
        (["http://a:1"], {"max_per_run": 1.5}, "max_per_run must be a whole number from 1 up"),
        (["http://a:1"], {"weights": {"a": 0}}, "weights['a'] must be a finite number above 0"),
        (["http://a:1"], {"api_key": ""}, "api_key must not be empty"),
    ],
)
def test_settings_that_cannot_be_used_are_named(workers, options, message):
    with pytest.raises(BackendConfigurationError) as caught:
        PoolBackend(workers, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_shows_no_secret():
    address = WorkerAddress("w", "http://me:secret@node1:8000", "a-key-of-the-workers")
    assert "secret" not in repr(address)
    assert "a-key" not in repr(address)
    with pytest.raises(InvalidFieldError, match="name must be a string"):
        WorkerAddress("", "http://node1:8000")


class Names:
    """A resolver whose names the test decides."""

    def __init__(self) -> None:
        self.numbers: list[str] = []

    async def getaddrinfo(self, host, port, *_):
        await trio.lowlevel.checkpoint()
        assert host == b"workers.test"
        if not self.numbers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 6, "", (number, port)) for number in self.numbers]

    async def getnameinfo(self, *_):
        raise AssertionError


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 has to be set up")
async def test_each_address_of_a_name_is_a_worker_while_the_name_has_it(monkeypatch):
    monkeypatch.setattr("rollout.pool.addresses.LOOKUP_SEC", 0.05)
    names, agents = Names(), Agents()
    trio.socket.set_custom_hostname_resolver(names)
    async with net() as servers:
        first = await servers.serve(worker_app(agents), "127.0.0.2:0")
        port = first.url.rpartition(":")[2]
        second = await servers.serve(worker_app(agents), f"127.0.0.3:{port}")
        pool = PoolBackend([f"http://workers.test:{port}"])
        async with front_over(pool) as (client, backend):
            names.numbers = ["127.0.0.2"]
            await all_up(backend, 1)
            (said,) = backend.health()["workers"]
            assert said["name"] == f"127.0.0.2:{port} (workers.test)"
            held = await start(client, "held", hold="held")
            await agents.until_started("held")
            names.numbers = ["127.0.0.2", "127.0.0.3"]
            await all_up(backend, 2)
            names.numbers = ["127.0.0.3"]
            await until(lambda: statuses(backend) == ["draining", "up"], backend)
            await ask(client, "other")
            assert "other" in second.app.registry._entries
            names.numbers = []  # a lookup that fails takes no worker away
            agents.go_on.set()
            await held
            await until(lambda: statuses(backend) == ["up"], backend)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 has to be set up")
async def test_an_address_that_comes_back_is_used_again(monkeypatch):
    monkeypatch.setattr("rollout.pool.addresses.LOOKUP_SEC", 0.05)
    names, agents = Names(), Agents()
    trio.socket.set_custom_hostname_resolver(names)
    names.numbers = ["127.0.0.2"]
    async with net() as servers:
        first = await servers.serve(worker_app(agents), "127.0.0.2:0")
        port = first.url.rpartition(":")[2]
        pool = PoolBackend([f"http://workers.test:{port}"])
        async with front_over(pool) as (client, backend):
            await all_up(backend, 1)
            held = await start(client, "held", hold="held")
            await agents.until_started("held")
            names.numbers = ["127.0.0.9"]
            await until(lambda: "draining" in statuses(backend), backend)
            names.numbers = ["127.0.0.2"]
            await all_up(backend, 1)
            agents.go_on.set()
            await held
            assert (await ask(client, "next")).status == "success"


async def test_another_application_is_refused_and_named(caplog):
    async with net() as servers:
        first = await servers.serve(worker_app())
        second = await servers.serve(make_app(local_backend(grader=None)))
        async with front_over(PoolBackend([first.url, second.url])) as (_, backend):
            await until(lambda: sorted(statuses(backend)) == ["refused", "up"], backend)
            health = backend.health()
            reason = next(each["reason"] for each in health["workers"] if "reason" in each)
            assert "support:Script/support:Compare" in reason
    (line,) = [each for each in caplog.messages if "is refused" in each]
    assert "it serves support:Script" in line


async def test_another_version_is_refused(monkeypatch):
    async with net() as servers:
        worker = await servers.serve(worker_app())
        monkeypatch.setattr("rollout.pool.source.package_version", lambda: "9.9")
        async with front_over(PoolBackend([worker.url])) as (_, backend):
            await until(lambda: statuses(backend) == ["refused"], backend)
            (said,) = backend.health()["workers"]
            assert "of trio-rollout, not 9.9" in said["reason"]


async def test_a_server_that_confirms_no_starts_is_refused(monkeypatch):
    async with net() as servers:
        worker = await servers.serve(worker_app())
        monkeypatch.setattr("rollout.server.registry.EXTENSIONS", ("admission-keys",))
        async with front_over(PoolBackend([worker.url])) as (_, backend):
            await until(lambda: statuses(backend) == ["refused"], backend)
            (said,) = backend.health()["workers"]
            assert "it does not announce confirmed-start" in said["reason"]


async def test_a_server_under_two_urls_is_one_worker():
    async with net() as servers:
        worker = await servers.serve(worker_app())
        other = worker.url.replace("127.0.0.1", "localhost")
        async with front_over(PoolBackend([worker.url, other])) as (_, backend):
            await until(lambda: sorted(statuses(backend)) == ["refused", "up"], backend)
            health = backend.health()
            reason = next(each["reason"] for each in health["workers"] if "reason" in each)
            assert "it is the same server as worker" in reason
            assert health["concurrency"]["max_concurrent"] == 4


async def test_a_wrong_key_is_named():
    async with net() as servers:
        worker = await servers.serve(worker_app(api_key="a-key-of-the-workers"))
        async with front_over(PoolBackend([worker.url], api_key="another-key")) as (_, backend):
            await until(lambda: "401" in backend.health()["workers"][0]["reason"], backend)
            assert "another-key" not in str(backend.health())


class Broken(WorkerSource):
    async def run(self, workers):
        await trio.lowlevel.checkpoint()
        raise RolloutServerError("no cluster at ray://nowhere:10001")


async def test_a_source_that_fails_ends_the_server_with_its_line():
    with pytest.raises(RolloutServerError, match=r"^no cluster at ray://nowhere:10001$"):
        await serve(make_app(PoolBackend(Broken())), bind="127.0.0.1:0", handle_signals=False)


async def test_a_source_keeps_names_apart():
    class Twice(WorkerSource):
        async def run(self, workers):
            workers.join(WorkerAddress("w", "http://127.0.0.1:9"))
            assert workers.join(WorkerAddress("w", "http://127.0.0.1:9")) in workers
            assert len(workers) == 1
            workers.join(WorkerAddress("w", "http://127.0.0.1:10"))

    with pytest.raises(RolloutServerError, match="two workers of the pool are called w"):
        await serve(make_app(PoolBackend(Twice())), bind="127.0.0.1:0", handle_signals=False)


def test_a_key_does_not_go_with_a_source():
    with pytest.raises(BackendConfigurationError, match="api_key goes with a list of URLs"):
        PoolBackend(Broken(), api_key="a-key-of-the-workers")
