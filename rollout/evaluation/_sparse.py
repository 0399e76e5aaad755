"""Whole numbers by place, a few bytes each, where a long stretch without any costs nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

__all__ = ["SparseArray"]

_BLOCK = 512


class SparseArray:
    """An array without an end, all of whose places hold 0 at first.

    Args:
        typecode: The kind of number, as `array.array` names it.
    """

    def __init__(self, typecode: str) -> None:
        self._empty = array(typecode, [0]) * _BLOCK
        self._blocks: dict[int, array[int]] = {}

    def __getitem__(self, place: int) -> int:
        block = self._blocks.get(place // _BLOCK)
        return 0 if block is None else block[place % _BLOCK]

    def __setitem__(self, place: int, value: int) -> None:
        number, offset = divmod(place, _BLOCK)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._empty[:]
        block[offset] = value

    @staticmethod
    def places(*arrays: SparseArray) -> Iterator[int]:
        """Yield the places at which one of the arrays may hold something, in their order."""
        for number in sorted(set().union(*(each._blocks for each in arrays))):  # noqa: SLF001
            yield from range(number * _BLOCK, (number + 1) * _BLOCK)
