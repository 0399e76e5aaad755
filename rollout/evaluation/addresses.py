"""Addresses of datasets of the Hugging Face Hub."""

from __future__ import annotations

import re

__all__ = ["HUB", "parse_address"]

HUB = "hf://"
"""What an address begins with."""
_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([^@\s]+))?")


def parse_address(address: str) -> tuple[str, str | None] | None:
    """Split an address into the dataset's name and its revision; ``None`` if it is not one."""
    match = _ADDRESS.fullmatch(address)
    return None if match is None else (match[1], match[2])
