"""Pack conversations into blocks that a browser inflates when it needs them.

A run of thousands of attempts has hundreds of megabytes of conversations that hardly anybody
opens. They lie in the page as blocks of compressed JSON, a few dozen conversations each, so
that the page opens at once, stays small on disk, and needs nothing but itself.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from attrs import define, field

__all__ = ["Packer"]

_BLOCK_CHARACTERS = 384 * 1024
_BLOCK_ENTRIES = 64


@define
class Packer:
    """Collects entries into blocks.

    Attributes:
        limit: Bytes of all blocks together from which on the packer is full.
        blocks: The blocks that are closed, each Base64 text of a gzip stream, which is a JSON
            array of its entries.
        size: Their bytes together.
    """

    limit: int
    blocks: list[bytes] = field(factory=list)
    size: int = 0
    _open: list[str] = field(factory=list)
    _open_characters: int = 0

    @property
    def full(self) -> bool:
        """Whether the blocks have reached the limit."""
        return self.size >= self.limit

    def add(self, entry: dict[str, Any]) -> tuple[int, int]:
        """Take an entry in plain JSON types and return its block, and its place in there."""
        place = (len(self.blocks), len(self._open))
        # ASCII alone, so that lone surrogates survive.
        text = json.dumps(entry, separators=(",", ":"))
        self._open.append(text)
        self._open_characters += len(text)
        if self._open_characters >= _BLOCK_CHARACTERS or len(self._open) >= _BLOCK_ENTRIES:
            self.close()
        return place

    def close(self) -> None:
        """Close the block that is open, if any."""
        if not self._open:
            return
        data = f"[{','.join(self._open)}]".encode("ascii")
        # The time would make two reports of the same run differ.
        block = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0))
        self.blocks.append(block)
        self.size += len(block)
        self._open, self._open_characters = [], 0
