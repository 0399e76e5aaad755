"""The page of a server, as people use it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server.browser.conftest import HOSTILE
from server.faults import API_KEY
from support import prompt

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect


def ids(page: Any) -> list[str]:
    return [each.get_attribute("data-id") for each in page.locator("tr[data-id]").all()]


def test_it_shows_figures_charts_and_rows(site, opened):
    running = site.admit(3, initial_messages=prompt(sleep=600), run="night")
    site.admit(2)
    page = opened()
    expect(page.locator(".chip[data-state=success] .quiet")).to_have_text("2")
    expect(page.locator(".card").first.locator(".card-value")).to_have_text("3")
    expect(page.locator(".card").nth(3).locator(".card-value")).to_have_text("1.000")
    assert page.locator("#charts svg[role=img]").count() == 4
    assert page.locator("#f-ended-over-time .fill.s-success").count() >= 1
    page.click(".chip[data-state=running]")
    assert sorted(ids(page)) == sorted(running)
    page.fill("#search", running[1])
    assert ids(page) == [running[1]]
    page.fill("#search", "nothing like that")
    page.wait_for_selector("text=No rollout fits these filters.")


def test_it_follows_what_changes(site, opened):
    page = opened()
    page.wait_for_selector("text=There are no rollouts yet.")
    (rollout_id,) = site.admit(1, initial_messages=prompt(sleep=600))
    row = page.locator(f"tr[data-id='{rollout_id}']")
    expect(row.locator(".k-status")).to_have_text("Running")


def test_a_rollout_is_cancelled_after_a_question(site, opened):
    (first, second) = site.admit(2, initial_messages=prompt(sleep=600))
    page = opened()
    page.click(f"tr[data-id='{first}'] .k-run")
    page.wait_for_selector("#talk[data-ready]")
    page.click("#talk .danger")
    page.click("#question >> text=Keep running")
    expect(page.locator("#talk-title ~ .outcome")).to_have_text("Running")
    page.click("#talk .danger")
    page.click("#question >> text=Cancel it")
    expect(page.locator("#talk-title ~ .outcome")).to_have_text("Cancelled")
    page.keyboard.press("Escape")
    expect(page.locator("#talk")).to_be_hidden()
    page.fill("#search", second)
    page.click("text=Cancel 1 shown…")
    page.click("#question >> text=Cancel it")
    expect(page.locator(f"tr[data-id='{second}'] .k-status")).to_have_text("Cancelled")


def test_hostile_text_stays_text(site, opened):
    script = prompt(**{"raise": HOSTILE})
    (rollout_id,) = site.admit(1, initial_messages=script, run=HOSTILE[:200])
    page = opened()
    row = page.locator(f"tr[data-id='{rollout_id}']")
    expect(row.locator(".k-err_message")).to_contain_text("<img src=x")
    expect(row.locator(".k-run .control")).to_have_text("U+202E")
    (rollout_id,) = site.admit(1, initial_messages=prompt(answer=HOSTILE))
    page.goto(f"{page.url}#rollout={rollout_id}")
    expect(page.locator("#talk .steps .from-agent")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0


def test_a_conversation_is_shown_and_keys_lead_on(site, opened):
    site.admit(2)
    page = opened()
    expect(page.locator("tr[data-id]")).to_have_count(2)
    order = ids(page)
    page.click(f"tr[data-id='{order[0]}'] a")
    expect(page.locator("#talk .step")).to_have_count(2)
    expect(page.locator("#talk .step.from-agent .prose")).to_have_text("42")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#talk-title")).to_have_text(order[1])
    assert page.url.endswith(f"#rollout={order[1]}")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("a/b")
    assert page.input_value("#search") == "a/b"


@pytest.mark.parametrize("site", [{"api_key": API_KEY}], indirect=True)
def test_it_asks_for_the_key_once(site, opened):
    answer = httpx.get(f"{site.url}/ui")
    assert answer.status_code == 200
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]
    assert httpx.get(f"{site.url}/rollouts/live").status_code == 401
    page = opened(ready=False)
    page.fill("#question input", "not the key")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=That was not the key.")
    page.fill("#question input", API_KEY)
    page.click("#question button")
    page.wait_for_selector("html[data-ready]")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("sessionStorage.length") == 1
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_it_connects_again_by_itself_and_says_so(site, opened):
    site.admit(1, initial_messages=prompt(sleep=600))
    page = opened()
    site.stop()
    expect(page.locator("#live.lost")).to_contain_text("Not connected")
    site.start()
    expect(page.locator("#live:not(.lost)")).to_contain_text("started anew")
    page.wait_for_selector("text=There are no rollouts yet.")


def test_ten_thousand_rows_are_drawn_as_they_are_scrolled_to(site, opened):
    site.admit(10_000, initial_messages=prompt(sleep=600))
    page = opened()
    expect(page.locator(".count")).to_have_text("10,000 of 10,000 rollouts")
    assert page.locator("tr[data-id]").count() < 100
    page.evaluate("document.querySelector('.rows').scrollTop = 37 * 5000")
    page.wait_for_function("document.querySelector('tr[aria-rowindex=\"5002\"]')")
    assert page.locator("tr[data-id]").count() < 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_and_dark(site, opened, scheme):
    page = opened(color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in paper.strip("rgb()").split(",")) > 380
    assert light == (scheme == "light")
