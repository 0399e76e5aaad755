"""What the tests read off an opened report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Open = Callable[..., Any]
"""Opens a report, as the fixture of that name does."""


def nodes(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def count(page: Any) -> str:
    return str(page.inner_text(".count"))


def column(page: Any, name: str) -> list[str]:
    return list(page.locator(f".attempts tbody td.k-{name}").all_inner_texts())


def wait_open(page: Any, name: str) -> Any:
    page.wait_for_selector(f"dialog[data-ready='{name}']")
    return page.locator("dialog")


def wait_closed(page: Any) -> None:
    page.wait_for_selector("dialog:empty", state="hidden")
    # What the browser tells of the address comes later than what the page knows.
    page.wait_for_url(lambda url: "#" not in url)
