"""The official process of the session, and the ways round in which each scenario runs."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
import trio
from interop.sides import Control, FrontSide, OfficialSide, OurSide, Pair, command, environment

HERE = Path(__file__).parent
HANGS_SEC = 60
INSTALLED = all(importlib.util.find_spec(name) for name in ("osmosis_ai", "uvicorn"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder, with the reason, where the official package is not installed."""
    if INSTALLED:
        return
    reason = "the official package is not installed (run: nox -s interop)"
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def official_port(tmp_path_factory: pytest.TempPathFactory) -> Generator[int, None, None]:
    """The control port of the official process. What it logs shows up in failing tests."""
    home = tmp_path_factory.mktemp("official")
    with subprocess.Popen(
        command("interop.official", "control"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=home,
        env=environment(str(home)),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the official process did not start"
            yield int(line)
            process.stdin.close()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


@pytest.fixture
async def official(official_port: int) -> AsyncGenerator[OfficialSide, None]:
    """A control connection to the official process; ends a test that waits in vain."""
    async with (
        await trio.open_tcp_stream("127.0.0.1", official_port) as stream,
        trio.open_nursery() as nursery,
    ):
        control = Control(stream)
        nursery.start_soon(control.read_replies)
        nursery.start_soon(_expire)
        yield OfficialSide(control)
        nursery.cancel_scope.cancel()


async def _expire() -> None:
    await trio.sleep(HANGS_SEC)
    pytest.fail(f"hangs: not done within {HANGS_SEC} s")


@pytest.fixture
async def ours() -> AsyncGenerator[OurSide, None]:
    """Servers and clients of this package; they end with the test."""
    async with trio.open_nursery() as nursery:
        yield OurSide(nursery)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def fronts() -> AsyncGenerator[FrontSide, None]:
    """Fronts of this package over workers; they end with the test."""
    async with trio.open_nursery() as nursery:
        yield FrontSide(nursery)
        nursery.cancel_scope.cancel()


@pytest.fixture(
    params=["official-client-our-server", "official-client-our-front", "our-client-official-server"]
)
async def pair(
    request: pytest.FixtureRequest, official: OfficialSide, ours: OurSide, fronts: FrontSide
) -> Pair:
    """A client of one system and servers of the other, both ways round."""
    if request.param == "official-client-our-server":
        return Pair(official, ours)
    if request.param == "official-client-our-front":
        return Pair(official, fronts)
    return Pair(ours, official)


@pytest.fixture(params=["our-server", "our-front"])
async def official_to_ours(
    request: pytest.FixtureRequest, official: OfficialSide, ours: OurSide, fronts: FrontSide
) -> Pair:
    """The official client and our servers."""
    return Pair(official, ours if request.param == "our-server" else fronts)
