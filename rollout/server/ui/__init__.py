"""``GET /ui``: the page that shows a server while it runs. It holds no data."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import trio

from rollout._page.assets import content_policy, read_assets
from rollout.server.asgi import Answer

__all__ = ["UI_PATH", "ui_answer"]

UI_PATH = "/ui"

_PACKAGE = "rollout.server.ui"
_SCRIPTS = (
    *("base.js", "keys.js", "charts.js", "conversation.js"),
    *("stream.js", "figures.js", "rows.js", "rollout.js"),
)


async def ui_answer() -> Answer:
    """Return the page."""
    return await trio.to_thread.run_sync(_answer)


@cache
def _answer() -> Answer:
    style = read_assets(_PACKAGE, "page.css", "ui.css")
    script = read_assets(_PACKAGE, *_SCRIPTS)
    page = files(_PACKAGE).joinpath("page.html").read_text(encoding="utf-8")
    parts = {"style": style, "symbols": read_assets(_PACKAGE, "symbols.svg"), "script": script}
    for name, text in parts.items():
        page = page.replace(f"{{{name}}}", text, 1)
    policy = content_policy(script, style, "connect-src 'self'", "frame-ancestors 'none'")
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Answer(page.encode(), kind="text/html; charset=utf-8", headers=headers)
