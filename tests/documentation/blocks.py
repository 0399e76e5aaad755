"""The fenced blocks of the pages, found by what they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[2]
README = "README.md"
SDK = "docs/rollout-sdk.md"
CLI = "docs/cli.md"
SERVER = "docs/server.md"
PROTOCOL = "docs/protocol.md"
PAGES = [README, "CHANGELOG.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@frozen
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def compiled(self) -> Any:
        # The line feeds put the lines of a traceback where they are in the page.
        return compile("\n" * self.line + self.code, str(ROOT / self.page), "exec")


def _blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["code"])
        for match in re.finditer(
            r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", text, re.MULTILINE | re.DOTALL
        )
    ]


BLOCKS = [block for page in PAGES for block in _blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def find(page: str, marker: str, language: str = "python") -> Block:
    """The one block of a page that holds *marker*."""
    (found,) = (
        block
        for block in BLOCKS
        if block.page == page and block.language == language and marker in block.code
    )
    return found


def defined_by(block: Block, **names: Any) -> dict[str, Any]:
    """What a block defines, when it stands in a module that has *names* already."""
    namespace: dict[str, Any] = {"__name__": "documented", **names}
    exec(block.compiled, namespace)  # the project's own text
    return namespace
