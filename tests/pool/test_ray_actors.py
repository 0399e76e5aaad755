"""What a `RayPool` asks of Ray: actors that end, do not answer, or are not needed any more.

Ray is a stand-in here, whose actors do what the test says. `tests/cluster` has the real one.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace

import pytest
import trio
from attrs import define, field

from rollout._tasks import background_tasks
from rollout.errors import RolloutServerError
from rollout.pool.ray import RayPool


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


@define(eq=False)
class Actor:
    """An actor of the stand-in; a call is a future, which it keeps."""

    ray: Ray
    name: str
    given: tuple[str, ...] = ()
    ended: Future[str | None] = field(factory=Future)
    waits: int = 0

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self._call(name, args))

    def _call(self, name, args):
        future: Future[object] = Future()
        if name == "start":
            self.given = args
            future.set_result(self.ray.answers.pop(0) if self.ray.answers else self.address)
        elif name == "wait":
            future = self.ended
            self.waits += 1
        elif not self.ended.done():
            self.ended.set_result("its server has shut down")
        return SimpleNamespace(future=lambda: future)

    @property
    def address(self):
        return f"http://node:{1 + self.ray.actors.index(self)}", None

    def fail(self, error):
        """Fail the call that waits for its end."""
        ended, self.ended = self.ended, Future()
        ended.set_exception(error)


class Ray(ModuleType):
    """The parts of Ray that are used."""

    def __init__(self):
        super().__init__("ray")
        self.exceptions = SimpleNamespace(
            RayError=RayError, ActorUnavailableError=ActorUnavailableError
        )
        self.actors: list[Actor] = []
        self.answers: list[tuple[str | None, str | None]] = []
        self.killed: list[str] = []
        self.options: dict[str, object] = {}
        self.said: list[str] = []

    def is_initialized(self):
        return False

    def init(self, address, **_):
        self.said.append(f"init {address}")

    def shutdown(self):
        self.said.append("shutdown")

    def remote(self, _):
        return SimpleNamespace(options=self._with_options)

    def _with_options(self, **options):
        self.options = options
        return SimpleNamespace(remote=self._create)

    def _create(self, name):
        self.actors.append(Actor(self, name))
        return self.actors[-1]

    def kill(self, actor):
        self.killed.append(actor.name)
        if not actor.ended.done():
            actor.ended.set_exception(RayError("killed"))


@define(eq=False)
class Member:
    """A worker, as far as its source sees it."""

    address: object
    status: str = "up"
    capacity: int = 2
    in_flight: int = 0
    trouble: str | None = None
    process_id: str = "1"
    lost: str | None = None

    def drain(self):
        self.status = "draining"


@define(eq=False)
class Pool:
    """What the source does with its pool, and what it sees of it."""

    members: list[Member] = field(factory=list)
    queued: int = 0
    said: list[tuple[str, ...]] = field(factory=list)

    def __iter__(self):
        return iter([each for each in self.members if each.lost is None])

    @property
    def in_flight(self):
        return sum(each.in_flight for each in self)

    def join(self, address):
        for each in self:
            if each.address == address:
                each.status = "up"
                return each
        self.members.append(Member(address))
        return self.members[-1]

    def drain(self, worker):
        worker.drain()

    async def drained(self, worker):
        while worker.in_flight and worker.lost is None:
            await trio.sleep(0.001)
        await trio.lowlevel.checkpoint()

    def lose(self, worker, reason):
        worker.lost = reason


@pytest.fixture
def ray(monkeypatch):
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    for name in ("ray._LOOK_SEC", "local._LOOK_SEC", "local.FIRST_DELAY_SEC"):
        monkeypatch.setattr(f"rollout.pool.{name}", 0.01)
    return stand_in


@asynccontextmanager
async def running(**options):
    pool, source = Pool(), RayPool("my_server:app", "local", **options)
    async with background_tasks(lambda: source.run(pool)):
        yield pool, source


async def until(condition):
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.001)


async def test_the_key_is_no_argument_of_a_constructor_and_everything_is_ended(ray):
    async with running(workers=2, worker_resources={"GPU": 1}) as (pool, source):
        await until(lambda: len(pool.members) == 2)
        assert sorted(actor.name for actor in ray.actors) == ["worker 1", "worker 2"]
        key = pool.members[0].address.api_key
        assert ray.actors[1].given == ("my_server:app", key, 2, True)
        assert (ray.options["num_gpus"], ray.options["scheduling_strategy"]) == (1, "SPREAD")
        assert "max_restarts" not in ray.options
        await source.shutdown()
        assert [each.lost for each in pool.members] == ["its server has shut down"] * 2
    assert sorted(ray.killed) == ["worker 1", "worker 2"]
    assert ray.said == ["init local", "shutdown"]


async def test_cancelled_it_kills_what_it_has(ray):
    async with running(workers=2) as (pool, _):
        await until(lambda: len(pool.members) == 2)
    assert sorted(ray.killed) == ["worker 1", "worker 2"]
    assert ray.said == ["init local", "shutdown"]


async def test_an_actor_that_is_out_of_sight_is_not_lost_and_one_that_is_dead_is(ray):
    async with running() as (pool, source):
        await until(lambda: pool.members)
        (actor,) = ray.actors
        await until(lambda: actor.waits == 1)
        actor.fail(ActorUnavailableError("Socket closed"))
        await until(lambda: actor.waits == 2)
        assert pool.members[0].lost is None
        actor.fail(RayError("It died.\nThe actor is dead because its node has died. More."))
        await until(lambda: len(pool.members) == 2)
        assert pool.members[0].lost == "its actor is dead because its node has died"
        assert source.health()["actors"][0]["restarts"] == 1


async def test_an_actor_that_does_not_answer_is_killed_and_created_again(ray):
    async with running(silence_sec=0.05) as (pool, _):
        await until(lambda: pool.members)
        pool.members[0].trouble = "no answer"
        await until(lambda: len(pool.members) == 2)
        assert pool.members[0].lost == "it did not answer for 0 s and was killed"


async def test_one_that_is_drained_is_taken_back_when_it_is_needed_again(ray):
    async with running(workers=1, max_workers=2, idle_sec=0.05) as (pool, _):
        await until(lambda: pool.members)
        pool.queued = 4
        await until(lambda: len(pool.members) == 2)
        pool.queued, pool.members[0].in_flight, pool.members[1].in_flight = 0, 1, 1
        await until(lambda: [each.status for each in pool].count("draining") == 1)
        pool.queued = 4
        await until(lambda: [each.status for each in pool] == ["up", "up"])
        assert (len(ray.actors), ray.killed) == (2, [])
        pool.queued = 0
        await until(lambda: [each.status for each in pool].count("draining") == 1)
        (leaving,) = (each for each in pool if each.status == "draining")
        assert leaving.lost is None
        leaving.in_flight = 0
        await until(lambda: len(ray.killed) == 1)
        assert len(list(pool)) == 1


async def test_starts_that_fail_one_after_the_other_end_the_pool(ray):
    ray.answers = [(None, "there is no module 'my_server'")] * 3
    with pytest.raises(RolloutServerError, match=r"no worker comes up on Ray.*no module 'my_serv"):
        async with running():
            await trio.sleep_forever()
    assert ray.killed == ["worker 1"] * 3
