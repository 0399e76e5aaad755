"""A headless Chromium that reports are opened in, and reports to open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluation.report.reading import chromium
from evaluation.report.runs import RunFolder, plausible, record

from rollout.evaluation.records import AttemptOutcome
from rollout.evaluation.report import write_report

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # Each launch has a new, empty profile.
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 4,000 attempts."""
    return write_report(plausible(tmp_path_factory.mktemp("large") / "run", rows=1000, n=4))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four attempts: 1, 0.25 and none as reward, and a failure; one has a long text."""
    run = RunFolder(tmp_path_factory.mktemp("small") / "run", rows=2, n=2)
    words = "\n".join(f"line {number} of many" for number in range(500))
    steps = [{"source": "user", "message": f"hello {number}"} for number in range(150)]
    run.add(record(0, 0, reward=1.0, passed=True, duration_sec=3.0), {"steps": steps})
    run.add(record(0, 1, reward=0.25), {"steps": [{"source": "user", "message": words}]})
    run.add(record(1, 0, removed=True))
    failed = {"outcome": AttemptOutcome.FAILURE, "err_category": "timeout"}
    run.add(record(1, 1, err_message="too slow", trajectory=None, **failed))
    return write_report(run.write())


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a report, and at the end checks that nothing was said, asked for or harmed."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_report(path: Path, anchor: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        address = path.as_uri()
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.split("#")[0] == address or request.url.startswith("blob:")
                else problems.append(f"request: {request.url}")
            ),
        )
        page.goto(address + anchor)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_report
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.harmed") is None
        context.close()
    assert problems == []
