"""Make the pictures of docs/report.md: a report of a run that is drawn, in headless Chromium.

No model took part in that run: prompts, conversations, rewards and times are drawn by
`evaluation.report.runs.plausible`, and are the same each time.

    python tests/evaluation/report/pictures.py              # into docs/_static
    python tests/evaluation/report/pictures.py --to FOLDER
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS))

from evaluation.report.browser.conftest import FLAGS  # noqa: E402 - found by the path above
from evaluation.report.reading import chromium  # noqa: E402
from evaluation.report.runs import plausible  # noqa: E402

from rollout.evaluation.report import write_report  # noqa: E402

WIDTH = 1280
ATTEMPT = "12-3"


def take(report: Path, folder: Path) -> None:
    """Take the pictures of a report."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 1130}, color_scheme="light")
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.wait_for_selector("#f-progress svg")
        page.screenshot(path=folder / "report.png")
        page.set_viewport_size({"width": WIDTH, "height": 860})
        page.evaluate(f"location.hash = '#attempt={ATTEMPT}'")
        page.wait_for_selector(f"dialog[data-ready='{ATTEMPT}']")
        page.locator("details.call summary").first.click()
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=folder / "report-attempt.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = TESTS.parent / "docs" / "_static"
    parser.add_argument("--to", type=Path, default=default, metavar="FOLDER")
    folder = parser.parse_args().to
    with tempfile.TemporaryDirectory() as temporary:
        take(write_report(plausible(Path(temporary) / "run", rows=1000, n=4)), folder)


if __name__ == "__main__":
    main()
