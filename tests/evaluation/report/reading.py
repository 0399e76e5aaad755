"""Read a report back, the way a browser does."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """The elements of a report.

    Attributes:
        tags: Name and attributes of every element, in order.
        scripts: Attributes and content of every script element.
        styles: Content of every style element.
        text: Everything else.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.text = ""
        self._inside: str | None = None
        self.source = path.read_bytes().decode("utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in {"script", "style"} else None
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        elif self._inside == "style":
            self.styles.append(data)
        else:
            self.text += data

    @property
    def code(self) -> list[str]:
        """The scripts that a browser runs."""
        return [text for attributes, text in self.scripts if "type" not in attributes]

    @property
    def policy(self) -> dict[str, list[str]]:
        (content,) = [
            attributes["content"] or ""
            for tag, attributes in self.tags
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        return {name: values for name, *values in map(str.split, content.split(";"))}

    @property
    def data(self) -> dict[str, Any]:
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == "data"]
        return dict(json.loads(text))

    @property
    def attempts(self) -> dict[str, Any]:
        return dict(self.data["attempts"])

    def entries(self) -> dict[str, dict[str, Any]]:
        """What each attempt opens, by its name."""
        blocks = {
            str(attributes["id"]): json.loads(gzip.decompress(base64.b64decode(text)))
            for attributes, text in self.scripts
            if str(attributes.get("id")).startswith("block-")
        }
        columns = self.attempts
        return {
            f"{row}-{attempt}": blocks[f"block-{block}"][slot]
            for row, attempt, block, slot in zip(
                columns["row"], columns["attempt"], columns["block"], columns["slot"], strict=True
            )
        }


def chromium() -> str | None:
    """The browser of the system, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
