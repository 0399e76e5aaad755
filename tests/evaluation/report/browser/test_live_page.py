"""The page of a run that goes on, in a browser."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from evaluation.report.browser.pages import column, count, wait_open
from evaluation.report.reading import chromium
from evaluation.report.runs import HOSTILE, RunFolder, harmful_document, record

from rollout.cli.eval.live import live_page
from rollout.evaluation.opening import EvaluationProgress
from rollout.evaluation.records import AttemptOutcome
from rollout.evaluation.report import write_report

pytest.importorskip(
    "playwright.sync_api", reason="the page is not opened in a browser: playwright is missing"
)
if chromium() is None:
    pytest.skip("the page is not opened in a browser: chromium is missing", allow_module_level=True)


class Served:
    """A run whose page is served from a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = RunFolder(folder, rows=3, n=1)
        self.manifest = self.files.manifest
        self.progress = EvaluationProgress(total=3)
        self.url = ""
        self.complete = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve,))

    def add(self, found: Any, document: Any = None) -> None:
        self.files.add(found, document)
        self.files.write(metrics=False)
        self.progress.add(found)

    async def _serve(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        async with live_page("127.0.0.1:0") as (page, self.url):
            page.begin(self)
            self._ready.set()
            await self._stop.wait()

    def start(self) -> str:
        self._thread.start()
        assert self._ready.wait(15)
        return self.url

    def stop(self) -> None:
        self._token.run_sync_soon(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def served(tmp_path):
    run = Served(tmp_path / "run")
    run.add(record(1, 0, reward=0.25), {"steps": [{"source": "user", "message": "the first"}]})
    run.start()
    yield run
    if run._thread.is_alive():
        run.stop()


@pytest.fixture
def page(browser, served):
    problems: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(15_000)
    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.goto(served.url)
    page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    assert page.evaluate("window.harmed") is None
    page.close()
    assert [line for line in problems if "ERR_CONNECTION" not in line] == []


def test_it_fills_and_becomes_the_report(page, served):
    assert count(page) == "1–1 of 1 attempts"
    page.fill("#search", "harmed")
    failed = record(
        0, 0, outcome=AttemptOutcome.FAILURE, err_category="timeout", err_message=HOSTILE
    )
    served.add(failed, harmful_document())
    page.wait_for_selector("#live:has-text('2 of 3 attempts')")
    page.wait_for_selector(".count:has-text('of 1 attempts')")
    assert column(page, "id") == ["0-0"]  # what was searched for stays so
    page.fill("#search", "")
    page.click("text=0-0")
    wait_open(page, "0-0")
    # Others come while it is open, also ahead of it.
    served.add(record(2, 0, reward=1.0, passed=True), {"steps": []})
    page.wait_for_selector("#live:has-text('3 of 3 attempts')")
    assert page.inner_text("#talk-title") == "Attempt 0-0"
    served.complete = True
    write_report(served.folder)
    served.stop()
    page.wait_for_selector("#live:has-text('The run is over')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".count:has-text('of 3 attempts')")
    # Its server is gone, and nothing is missing.
    page.click("text=1-0")
    assert "the first" in wait_open(page, "1-0").inner_text()
    page.keyboard.press("Escape")
    page.fill("#search", "the first")
    page.check("#deep")
    page.wait_for_selector(".count:has-text('of 1 attempts')")
    assert not page.locator("text=not complete").count()


def test_a_run_that_stops_leaves_the_table(page, served):
    served.stop()
    page.wait_for_selector("#live:has-text('The run has stopped: 1 of 3')")
    page.click("th.k-reward button")
    assert column(page, "reward") == ["0.250"]
    page.click("text=1-0")
    assert "the run's server does not give it" in wait_open(page, "1-0").inner_text()
