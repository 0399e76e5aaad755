"""Files that pages are made of, and the policy that lets a page run its own script alone."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

__all__ = ["content_policy", "read_assets"]

_HERE = "rollout._page"
_SHARED = frozenset(
    {"base.js", "charts.js", "conversation.js", "keys.js", "page.css", "symbols.svg"}
)


def read_assets(package: str, *names: str) -> str:
    """Read and join files of pages: those that pages share, and those in ``static`` of a package.

    Blocking.
    """
    return "".join(
        files(_HERE if name in _SHARED else package)
        .joinpath("static", name)
        .read_text(encoding="utf-8")
        for name in names
    )


def content_policy(script: str, style: str, *more: str) -> str:
    """Return the content security policy of a page with one script and one style sheet."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_hash(script)}'",
            f"style-src 'sha256-{_hash(style)}'",
            *more,
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
