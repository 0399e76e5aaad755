"""Datasets and configs of the command line's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Files:
    """Writes the files of an evaluation into a folder.

    Attributes:
        folder: The folder.
        output: Where runs go by default.
    """

    def __init__(self, folder: Path, server: str, chat: str) -> None:
        self.folder = folder
        self.output = folder / "out"
        self._server = server
        self._chat = chat

    def rows(self, *scripts: dict[str, Any], name: str = "rows.jsonl") -> Path:
        """A dataset whose prompts tell `support.Script` what to do; all labels are 42."""
        lines = [
            {
                "messages": [{"role": "user", "content": f"row {number}", **script}],
                "ground_truth": "42",
            }
            for number, script in enumerate(scripts)
        ]
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def config(self, rows: Path, *, app: str | None = None, **run: Any) -> Path:
        """A config; values of [run] can be given by name."""
        server = f"url = {json.dumps(self._server)}" if app is None else f"app = {json.dumps(app)}"
        values = {"output": str(self.output), **run}
        lines = [
            "[server]",
            server,
            "[chat]",
            f"url = {json.dumps(self._chat)}",
            "[dataset]",
            f"path = {json.dumps(str(rows))}",
            "[run]",
            *(f"{name} = {json.dumps(value)}" for name, value in values.items()),
        ]
        path = self.folder / "eval.toml"
        path.write_text("\n".join(lines) + "\n")
        return path
