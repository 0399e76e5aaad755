"""The report in a browser: headless Chromium opens it from a file, as people do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from evaluation.report.browser.pages import Open, column, count, nodes, wait_closed, wait_open
from evaluation.report.reading import chromium
from evaluation.report.runs import HOSTILE, RunFolder, hostile, record

from rollout.evaluation.report import write_report

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the report is not opened in a browser: playwright is missing"
)
if chromium() is None:
    pytest.skip(
        "the report is not opened in a browser: chromium is missing", allow_module_level=True
    )


class TestTable:
    def test_it_sorts_by_every_column_with_what_is_missing_last(
        self, opened: Open, large: Path
    ) -> None:
        page = opened(large)
        heads = page.locator(".attempts thead th button")
        assert heads.count() == 12
        for number in range(12):
            head = page.locator(".attempts thead th").nth(number)
            for _ in range(2):
                head.locator("button").click()
                assert head.get_attribute("aria-sort") in {"ascending", "descending"}
        page.click("th.k-reward button")
        rewards = column(page, "reward")
        assert rewards == ["1.000"] * 100
        page.click("th.k-reward button")
        assert set(column(page, "reward")) == {"0.000"}
        page.click(".pager [aria-label='Last page']")
        assert set(column(page, "reward")) == {"–"}

    def test_sorting_keeps_the_focus(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.focus("th.k-duration button")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.textContent") == "↓Duration"
        assert column(page, "id") == ["0-0", "0-1", "1-0", "1-1"]
        page.keyboard.press("Enter")
        assert column(page, "id") == ["0-1", "1-0", "1-1", "0-0"]

    def test_it_filters(self, opened: Open, small: Path) -> None:
        page = opened(small)
        assert count(page) == "1–4 of 4 attempts"
        page.click(".chip[data-state=failure]")
        assert column(page, "id") == ["1-1"]
        page.click(".chip[data-state=removed]")
        assert column(page, "id") == ["1-0", "1-1"]
        page.click("text=Clear filters")
        page.select_option("select[aria-label='Error category']", "=timeout")
        assert column(page, "id") == ["1-1"]
        page.click("text=Clear filters")
        page.fill("[aria-label='Least reward']", "0.2")
        page.fill("[aria-label='Greatest reward']", "0.5")
        page.keyboard.press("Enter")
        assert column(page, "id") == ["0-1"]
        page.click("text=Clear filters")
        page.fill("#search", "SLOW")
        sync_api.expect(page.locator(".attempts tbody tr")).to_have_count(1)
        assert column(page, "id") == ["1-1"]
        page.fill("#search", "no such words")
        page.wait_for_selector("text=No attempt fits these filters.")
        page.click("text=Clear filters")
        assert count(page) == "1–4 of 4 attempts"

    def test_conversations_are_searched_when_asked(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.fill("#search", "LINE 321 of")
        page.wait_for_selector("text=No attempt fits these filters.")
        page.check("#deep")
        sync_api.expect(page.locator(".count")).to_have_text("1–1 of 1 attempts")
        assert column(page, "id") == ["0-1"]
        page.fill("#search", "hello 149")
        sync_api.expect(page.locator(".attempts tbody td.k-id")).to_have_text("0-0")
        page.uncheck("#deep")
        page.wait_for_selector("text=No attempt fits these filters.")

    def test_a_bar_of_the_histogram_filters(self, opened: Open, large: Path) -> None:
        page = opened(large)
        bar = page.locator("#f-rewards .bar").last
        bar.hover()
        hint = page.inner_text(".tip")
        bar.click()
        found = re.search(r"Passed: ([\d,]+)", hint)
        assert found
        assert count(page) == f"1–100 of {found[1]} attempts"

    def test_a_category_filters(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.click(".rank")
        assert column(page, "id") == ["1-1"]

    def test_rows_are_grouped(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.check("#grouped")
        assert column(page, "id") == ["0", "1"]
        assert column(page, "passed") == ["1 of 2", "0 of 2"]
        page.click("th.k-passed button")
        page.click("th.k-passed button")
        assert column(page, "id") == ["1", "0"]
        page.click("a[href='#attempt=1-1']")
        wait_open(page, "1-1")

    def test_slash_goes_to_the_search(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.keyboard.press("/")
        page.keyboard.type("a/b")
        assert page.input_value("#search") == "a/b"


class TestConversation:
    def test_a_row_opens_it_and_escape_closes_it(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.focus(".attempts a[href='#attempt=0-0']")
        page.keyboard.press("Enter")
        dialog = wait_open(page, "0-0")
        assert "hello 0" in dialog.inner_text()
        page.wait_for_url("**#attempt=0-0")
        page.keyboard.press("Escape")
        wait_closed(page)
        sync_api.expect(page.locator(".attempts a[href='#attempt=0-0']")).to_be_focused()
        page.locator(".attempts td.k-duration").nth(3).click()
        assert "too slow" in wait_open(page, "1-1").inner_text()

    def test_back_closes_it(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.click(".attempts a[href='#attempt=0-0']")
        wait_open(page, "0-0")
        page.go_back()
        wait_closed(page)

    def test_what_is_closed_opens_again_at_once(self, opened: Open, small: Path) -> None:
        page = opened(small, "#attempt=0-0")
        wait_open(page, "0-0")
        escape = "new KeyboardEvent('keydown', {key: 'Escape', bubbles: true, cancelable: true})"
        for close in (
            "document.querySelector(\"[aria-label^='Close']\").click()",
            f"document.activeElement.dispatchEvent({escape})",
            "document.querySelector('dialog').click()",
        ):
            assert page.evaluate(f"() => {{ {close}; return location.hash; }}") == ""
            page.evaluate("location.hash = '#attempt=0-0'")
            wait_open(page, "0-0")

    def test_a_deep_link_opens_it_and_keys_go_on(self, opened: Open, large: Path) -> None:
        page = opened(large, "#attempt=12-3")
        dialog = wait_open(page, "12-3")
        assert "52 of 4,000" in dialog.inner_text()
        before = page.evaluate("history.length")
        page.keyboard.press("ArrowRight")
        wait_open(page, "13-0")
        page.keyboard.press("k")
        page.keyboard.press("ArrowLeft")
        wait_open(page, "12-2")
        assert page.evaluate("history.length") == before

    def test_going_on_keeps_to_filter_and_order(self, opened: Open, small: Path) -> None:
        page = opened(small)
        page.click(".chip[data-state=failure]")
        page.click(".chip[data-state=passed]")
        page.click(".attempts a[href='#attempt=0-0']")
        dialog = wait_open(page, "0-0")
        assert dialog.locator("[aria-label^='Previous']").is_disabled()
        page.keyboard.press("j")
        dialog = wait_open(page, "1-1")
        assert "2 of 2" in dialog.inner_text()
        assert dialog.locator("[aria-label^='Next']").is_disabled()

    @pytest.mark.parametrize("anchor", ["#attempt=9-9", "#attempt=__proto__", "#attempt=-1--1"])
    def test_a_link_to_nothing_opens_nothing(self, opened: Open, small: Path, anchor: str) -> None:
        page = opened(small, anchor)
        assert not page.locator("dialog").is_visible()

    def test_tool_calls_are_folded(self, opened: Open, large: Path) -> None:
        page = opened(large, "#attempt=12-3")
        dialog = wait_open(page, "12-3")
        calls = dialog.locator("details.call")
        assert calls.count() >= 1
        assert not calls.first.locator(".observation").first.is_visible()
        page.click("text=Unfold tool calls")
        assert calls.first.locator(".observation").first.is_visible()
        page.click("text=Fold tool calls")
        assert not calls.first.locator(".observation").first.is_visible()

    def test_long_text_shows_all_when_asked(self, opened: Open, small: Path) -> None:
        page = opened(small, "#attempt=0-1")
        dialog = wait_open(page, "0-1")
        assert "line 10 of many" in dialog.inner_text()
        assert "line 400 of many" not in dialog.inner_text()
        page.click("text=/^Show all/")
        assert "line 499 of many" in dialog.inner_text()

    def test_many_steps_come_a_few_at_a_time(self, opened: Open, small: Path) -> None:
        page = opened(small, "#attempt=0-0")
        dialog = wait_open(page, "0-0")
        assert dialog.locator(".step").count() == 60
        page.click("text=Show 60 more of 150 steps")
        page.click("text=Show 30 more of 150 steps")
        assert dialog.locator(".step").count() == 150
        assert not dialog.locator(".more-steps").is_visible()


class TestSealed:
    def test_hostile_text_is_shown_and_never_runs(self, opened: Open, tmp_path: Path) -> None:
        page = opened(write_report(hostile(tmp_path / "run")))
        for name in ("0-0", "0-1", "1-1", "2-1"):
            page.evaluate(f"location.hash = '#attempt={name}'")
            dialog = wait_open(page, name)
            page.evaluate(
                "for (const fold of document.querySelectorAll('details')) fold.open = true"
            )
            assert dialog.locator("script, img, iframe, object, embed, link, style").count() == 0
            page.keyboard.press("Escape")
        page.evaluate("location.hash = '#attempt=0-0'")
        text = wait_open(page, "0-0").inner_text()
        assert HOSTILE.split("\u2028")[0] in text
        assert "U+202E" in text
        assert "{{ 7*7 }}" in text
        assert not page.locator("a[href^='javascript']").count()
        page.keyboard.press("Escape")
        page.check("#grouped")
        for button in page.locator("th button").all():
            button.click()

    def test_the_policy_stops_what_would_run_or_connect(self, browser: Any, small: Path) -> None:
        context = browser.new_context()
        page = context.new_page()
        requests: list[str] = []
        page.goto(small.as_uri())
        page.on("request", lambda request: requests.append(request.url))
        stopped = page.evaluate(
            """async () => {
              const found = [];
              document.addEventListener("securitypolicyviolation",
                (event) => found.push(event.effectiveDirective));
              const attempt = (action) => {
                try { action(); } catch (error) { found.push(error.name); }
              };
              const script = document.createElement("script");
              attempt(() => { script.textContent = "window.harmed = 1"; });
              script.append("window.harmed = 1");
              document.body.append(script);
              const image = "<img src=x onerror='window.harmed = 1'>";
              attempt(() => { document.body.innerHTML = image; });
              attempt(() => { new Image().src = "http://127.0.0.1:9/"; });
              await fetch("http://127.0.0.1:9/").catch(() => found.push("fetch"));
              const sheet = document.createElement("style");
              sheet.append("body { background: url(http://127.0.0.1:9/) }");
              document.head.append(sheet);
              const all = [
                "connect-src", "img-src", "style-src-elem", "require-trusted-types-for",
              ];
              for (let turn = 0; turn < 500 && !all.every((one) => found.includes(one)); turn++) {
                await new Promise((resolve) => setTimeout(resolve, 10));
              }
              return found;
            }"""
        )
        assert page.evaluate("window.harmed") is None
        assert stopped.count("TypeError") == 2
        assert "fetch" in stopped
        assert {"connect-src", "img-src", "style-src-elem"} <= set(stopped)
        assert "require-trusted-types-for" in stopped
        # What is refused may be counted as asked for; nothing of it leaves the page.
        assert all(url.startswith("http://127.0.0.1:9/") for url in requests)
        context.close()


class TestSize:
    def test_thousands_of_attempts_are_a_page_of_rows(self, opened: Open, large: Path) -> None:
        page = opened(large)
        assert count(page) == "1–100 of 4,000 attempts"
        assert nodes(page) < 8_000
        page.check("#grouped")
        assert count(page) == "1–100 of 1,000 rows"
        page.click("th.k-reward button")
        page.click(".pager [aria-label='Last page']")
        page.uncheck("#grouped")
        page.fill("#search", "weekdays")
        sync_api.expect(page.locator(".count")).to_have_text("1–100 of 800 attempts")
        assert nodes(page) < 8_000

    def test_an_attempt_that_is_asked_for_while_another_one_closes_opens(
        self, opened: Open, small: Path
    ) -> None:
        page = opened(small, "#attempt=0-0")
        wait_open(page, "0-0")
        page.evaluate("document.querySelector('dialog').close(); location.hash = '#attempt=0-1'")
        wait_open(page, "0-1")
        page.wait_for_url("**#attempt=0-1")

    def test_what_was_opened_is_gone_once_it_is_closed(self, opened: Open, large: Path) -> None:
        page = opened(large)
        before = nodes(page)
        page.evaluate("location.hash = '#attempt=0-0'")
        wait_open(page, "0-0")
        page.keyboard.press("ArrowRight")
        wait_open(page, "0-1")
        page.keyboard.press("Escape")
        wait_closed(page)
        assert nodes(page) == before

    def test_a_browser_that_is_too_old_says_so(self, browser: Any, small: Path) -> None:
        context = browser.new_context()
        page = context.new_page()
        page.add_init_script("delete window.DecompressionStream")
        page.goto(small.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        for part in ("#table", "#charts"):
            assert "this browser is too old" in page.inner_text(part)
        page.keyboard.press("/")
        assert page.locator(".cards").is_visible()
        context.close()

    def test_a_page_that_is_cut_says_so(self, browser: Any, small: Path, tmp_path: Path) -> None:
        whole = small.read_bytes()
        cut = tmp_path / "cut.html"
        cut.write_bytes(whole[: whole.index(b'id="column-prompt"')])
        # Its script is gone with its end, so what is there is the headline.
        context = browser.new_context()
        page = context.new_page()
        page.goto(cut.as_uri())
        assert page.locator(".cards").is_visible()
        gone = tmp_path / "gone.html"
        gone.write_bytes(whole.replace(b'id="column-prompt"', b'id="other"'))
        page.goto(gone.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        assert "the page is not whole" in page.inner_text("#table")
        context.close()

    def test_a_run_without_attempts_says_so(self, opened: Open, tmp_path: Path) -> None:
        page = opened(write_report(RunFolder(tmp_path / "run", rows=2, n=2).write()))
        assert "This run has no attempts yet." in page.inner_text("#table")
        assert "There is nothing to draw yet." in page.inner_text("#charts")

    def test_what_hides_is_shown_by_its_number(self, opened: Open, tmp_path: Path) -> None:
        run = RunFolder(tmp_path / "run", rows=1, n=1)
        hidden = "a\xadb\u3164c\ufffad\U000e0041e\u200c\u2764\ufe0ff"
        run.add(record(), {"steps": [{"source": "user", "message": hidden}]})
        page = opened(write_report(run.write()), "#attempt=0-0")
        text = wait_open(page, "0-0").inner_text()
        for name in ("U+00AD", "U+3164", "U+FFFA", "U+E0041"):
            assert name in text
        assert "e\u200c\u2764\ufe0ff" in text

    @pytest.mark.parametrize("text", ["x" * 100_000, "\u202e" * 100_000, "\u202ex" * 50_000])
    def test_a_huge_text_is_few_elements(self, opened: Open, tmp_path: Path, text: str) -> None:
        run = RunFolder(tmp_path / "run", rows=1, n=1)
        run.add(record(), {"steps": [{"source": "user", "message": text}]})
        page = opened(write_report(run.write()), "#attempt=0-0")
        wait_open(page, "0-0")
        page.click("text=/^Show all/")
        assert nodes(page) < 2_500
        assert "\u202e" not in page.inner_text("body")
