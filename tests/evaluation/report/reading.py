"""Read a report back, the way a browser does."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import shutil
from array import array
from html.parser import HTMLParser
from itertools import groupby
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
        """The columns of the table; prompts by row, and ``None`` for a figure that is missing."""
        head = self.data["attempts"]
        found = {name: head[name] for name in ("states", "categories")}
        for name, kind in head["kinds"].items():
            values = array(kind, self._unpacked(f"column-{name}"))
            assert len(values) == head["size"]
            found[name] = [None if math.isnan(value) else value for value in values]
        for name in ("message", "answer"):
            found[name] = json.loads(self._unpacked(f"column-{name}"))
            assert len(found[name]) == head["size"]
        rows = [f"{row:.0f}" for row, _ in groupby(found["row"])]
        for name in ("prompt", "label"):
            texts = zip(rows, json.loads(self._unpacked(f"column-{name}")), strict=True)
            found[f"{name}s"] = {row: text for row, text in texts if text}
        return found

    def _unpacked(self, name: str) -> bytes:
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == name]
        return gzip.decompress(base64.b64decode(text, validate=True))

    def entries(self) -> dict[str, dict[str, Any]]:
        """What each attempt opens, by its name."""
        ids = [str(attributes.get("id")) for attributes, _ in self.scripts]
        blocks = {
            name: json.loads(self._unpacked(name)) for name in ids if name.startswith("block-")
        }
        columns = self.attempts
        return {
            f"{row:.0f}-{attempt:.0f}": blocks[f"block-{block}"][slot]
            for row, attempt, block, slot in zip(
                columns["row"], columns["attempt"], columns["block"], columns["slot"], strict=True
            )
        }


def chromium() -> str | None:
    """The browser of the system, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
