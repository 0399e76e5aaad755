"""A server in a thread of its own, and its page in a headless Chromium."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import trio
from evaluation.report.browser.conftest import browser
from server.faults import LLM_KEY, admission
from support import local_backend, make_app

from rollout.server import RolloutServer, serve

__all__ = ["browser", "opened", "site"]

HOSTILE = "<img src=x onerror=alert(1)>\u202egnp</script><script>alert(2)</script>"


class Site:
    """A server that can be stopped and started again at its address."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.url = ""
        self.app: RolloutServer | None = None
        self._thread: threading.Thread | None = None
        self._token: Any = None
        self._stop: trio.CancelScope | None = None

    def start(self) -> None:
        """Serve in a thread; return once the server listens."""
        ready = threading.Event()
        bind = self.url.removeprefix("http://") or "127.0.0.1:0"

        async def run() -> None:
            self.app = make_app(local_backend(max_concurrent=None), **self.options)
            self._token = trio.lowlevel.current_trio_token()
            async with trio.open_nursery() as nursery:
                self._stop = nursery.cancel_scope
                start = partial(serve, self.app, bind=bind, handle_signals=False)
                (self.url,) = await nursery.start(start)
                ready.set()

        self._thread = threading.Thread(target=trio.run, args=[run])
        self._thread.start()
        assert ready.wait(20)

    def stop(self) -> None:
        """Stop at once, as a kill would."""
        assert self._thread is not None
        if self._thread.is_alive():
            self._token.run_sync_soon(self._stop.cancel)
            self._thread.join(20)

    @property
    def headers(self) -> dict[str, str]:
        key = self.options.get("api_key")
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def admit(self, count: int = 1, **fields: Any) -> list[str]:
        """Admit rollouts; returns their ids."""
        bodies = [admission(**fields) for _ in range(count)]
        for start in range(0, count, 2000):
            part = {"rollouts": bodies[start : start + 2000]}
            answer = httpx.post(f"{self.url}/rollouts", json=part, headers=self.headers, timeout=60)
            assert {each["status_code"] for each in answer.json()["outcomes"]} == {202}
        return [body["rollout_id"] for body in bodies]


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    served = Site(**getattr(request, "param", {}))
    served.start()
    yield served
    served.stop()


@pytest.fixture
def opened(browser: Any, site: Site) -> Iterator[Callable[..., Any]]:
    """Opens the page, and at the end checks that it harmed nothing and nothing is in its URLs."""
    contexts: list[Any] = []
    problems: list[str] = []
    addresses: list[str] = []

    def open_page(*, ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("request", lambda request: addresses.append(request.url))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda message: (
                problems.append(message.text)
                if "Content Security Policy" in message.text or "Trusted" in message.text
                else None
            ),
        )
        page.goto(f"{site.url}/ui")
        if ready:
            page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert all(address.startswith(site.url) for address in addresses)
    secrets = [LLM_KEY, site.options.get("api_key") or LLM_KEY]
    assert not any(secret in address for secret in secrets for address in addresses)
