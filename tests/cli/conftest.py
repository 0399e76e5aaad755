"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.harness import APPS, Cli, serving


@pytest.fixture
def cli() -> Cli:
    return Cli()


@pytest.fixture(scope="session")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module ``cli_apps``."""
    folder = tmp_path_factory.mktemp("apps")
    (folder / "cli_apps.py").write_text(APPS)
    return folder


@pytest.fixture(scope="session")
def server(apps: Path) -> Iterator[str]:
    """The URL of a server with one slot."""
    with serving(apps, "cli_apps:app", "--bind", "127.0.0.1:0") as (_, url):
        yield url


@pytest.fixture(scope="session")
def locked_server(apps: Path) -> Iterator[str]:
    """The URL of a server that asks for `SERVER_KEY`."""
    with serving(apps, "cli_apps.py:locked", "--bind", "127.0.0.1:0") as (_, url):
        yield url


@pytest.fixture
def on_call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do something right before a method of a class is called."""

    def patch(owner: type, name: str, action: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def patched(self: object, *args: object) -> object:
            action(*args)
            return original(self, *args)

        monkeypatch.setattr(owner, name, patched)

    return patch
