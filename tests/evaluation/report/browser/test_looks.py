"""How the report looks: in the dark, on a phone, on paper, and to a screen reader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from evaluation.report.browser.pages import Open, wait_closed, wait_open
from evaluation.report.reading import chromium
from evaluation.report.runs import RunFolder, hostile, record

from rollout.evaluation.report import write_report

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the report is not opened in a browser: playwright is missing"
)
if chromium() is None:
    pytest.skip(
        "the report is not opened in a browser: chromium is missing", allow_module_level=True
    )


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (channels) => {
    const [r, g, b] = channels.map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || node.closest("script, style, svg, .none, :disabled, .tip")) continue;
    if (!node.getClientRects().length) continue;
    const text = rgba(getComputedStyle(node).color);
    const [a, b] = [light(text.slice(0, 3)), light(behind(node).slice(0, 3))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${node.className || node.tagName}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(low)];
}"""


def boxes(chart, selector):
    return [each.bounding_box() for each in chart.locator(selector).all()]


CUT_HEADERS = """
[...document.querySelectorAll('.attempts th')]
  .filter((header) => header.scrollWidth > header.clientWidth).map((header) => header.className)
"""
"""The headers of the table that do not fit into their columns."""


class TestLooks:
    def colours(self, page: Any) -> tuple[str, str]:
        return tuple(
            page.evaluate(f"getComputedStyle(document.body).{name}")
            for name in ("backgroundColor", "color")
        )

    def test_dark_follows_the_system_and_the_choice(self, opened: Open, small: Path) -> None:
        page = opened(small, color_scheme="dark")
        dark = self.colours(page)
        page.emulate_media(color_scheme="light")
        light = self.colours(page)
        assert dark != light
        page.check(".theme input[value=dark]", force=True)
        assert self.colours(page) == dark
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        assert self.colours(page) == dark
        page.check(".theme input[value=auto]", force=True)
        assert self.colours(page) == light

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_can_be_read(self, opened: Open, large: Path, scheme: str) -> None:
        page = opened(large, "#attempt=12-3", color_scheme=scheme)
        wait_open(page, "12-3")
        low = page.evaluate(CONTRASTS)
        assert low == []

    @pytest.mark.parametrize("width", [320, 390, 768, 1024])
    def test_nothing_sticks_out(self, opened: Open, large: Path, width: int) -> None:
        page = opened(large, viewport={"width": width, "height": 800})
        for grouped in (False, True):
            page.locator("#grouped").set_checked(grouped)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CUT_HEADERS) == []
        page.evaluate("location.hash = '#attempt=3-0'")
        wait_open(page, "3-0")
        assert page.evaluate("document.querySelector('.talk-body').scrollWidth") <= width

    @pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.05 * n for n in range(15)]])
    def test_the_threshold_is_drawn_and_no_name_of_a_mark_hides_a_bar(
        self, opened: Open, tmp_path: Path, rewards: list[float]
    ) -> None:
        """Between single values as on a scale, and where nothing reaches it."""
        run = RunFolder(tmp_path / "run", rows=len(rewards), n=1)
        for row, reward in enumerate(rewards):
            run.add(record(row, reward=reward, passed=reward >= 0.8, duration_sec=1.0 + row))
        page = opened(write_report(run.write()))
        page.wait_for_selector("#f-progress svg")
        assert page.locator("#f-rewards .marker-text").all_text_contents() == ["pass from 0.8"]
        for name in ("rewards", "durations"):
            chart = page.locator(f"#f-{name}")
            lowest = max(each["y"] + each["height"] for each in boxes(chart, ".marker-text"))
            assert lowest <= min(each["y"] for each in boxes(chart, ".fill")) + 1
        states = page.locator(".mini-bar").evaluate_all("bars => bars.map((bar) => bar.className)")
        assert set(states) == {"mini-bar s-below"} | {"mini-bar s-passed"} & set(states)

    def test_hostile_text_does_not_stick_out(self, opened: Open, tmp_path: Path) -> None:
        path = write_report(hostile(tmp_path / "run"))
        page = opened(path, "#attempt=0-0", viewport={"width": 390, "height": 800})
        wait_open(page, "0-0")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.querySelector('.talk-body').scrollWidth") <= 390

    def test_print_leaves_the_tools_out(self, opened: Open, small: Path) -> None:
        page = opened(small, color_scheme="dark")
        page.emulate_media(media="print")
        assert not page.locator(".tools").is_visible()
        assert page.locator(".cards").is_visible()
        assert self.colours(page)[0] == "rgb(255, 255, 255)"

    def test_print_of_an_open_attempt_is_that_attempt_to_its_end(
        self, opened: Open, small: Path
    ) -> None:
        page = opened(small, "#attempt=0-0", color_scheme="dark")
        dialog = wait_open(page, "0-0")
        page.locator(".more-steps").click()
        page.locator("dialog .step").nth(60).scroll_into_view_if_needed()
        page.locator(".talk-buttons button").last.focus()
        scrolled = page.evaluate("document.querySelector('.talk-body').scrollTop")
        assert scrolled > 0

        printed = page.pdf(format="A4")  # asks for both events of printing
        assert len(re.findall(rb"/Type /Page\b", printed)) > 2
        assert dialog.locator(".step").count() > 60
        assert page.evaluate("document.querySelector('.talk-body').scrollTop") == scrolled
        assert page.evaluate("document.activeElement.title") == "Close (Esc)"

        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert not page.locator(".cards").is_visible()
        assert not page.locator(".talk-buttons").is_visible()
        assert page.locator("#talk-title").is_visible()
        assert page.locator(".step").last.is_visible()
        page.emulate_media(media="screen")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.keyboard.press("Escape")
        wait_closed(page)

    def test_bars_are_there_where_the_system_decides_on_colours(
        self, opened: Open, large: Path
    ) -> None:
        page = opened(large, forced_colors="active")
        page.locator(".chip").first.click()
        for bar in (".stack > *", ".mini-bar", ".rank-bar"):
            colour = page.locator(bar).first.evaluate(
                "node => getComputedStyle(node).backgroundColor"
            )
            assert colour not in {"rgb(255, 255, 255)", "rgba(0, 0, 0, 0)"}, bar
        pressed = page.locator("[aria-pressed=true]").first
        assert pressed.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"

    def test_everything_has_a_name(self, opened: Open, large: Path) -> None:
        page = opened(large, "#attempt=12-3")
        wait_open(page, "12-3")
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("button, a, input, select, svg[role=img]")]
              .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim()
                || node.closest("label")?.textContent.trim()))
              .map((node) => node.outerHTML)"""
        )
        assert unnamed == []
        # Each chart has its figures as text too.
        assert page.locator("svg[role=img]").count() == 4
        assert page.locator(".as-table table").count() == 4
