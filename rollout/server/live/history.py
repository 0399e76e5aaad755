"""What has happened since a server's start, in a bounded number of bins. Pure."""

from __future__ import annotations

from typing import Any

from attrs import define, field, fields_dict

__all__ = ["History", "Recent"]

_MOST_BINS = 120
_RECENT_SEC = 60


@define
class _Bin:
    admitted: int = 0
    success: int = 0
    failure: int = 0
    cancelled: int = 0
    rewards: int = 0
    reward_sum: float = 0.0

    def add(self, other: _Bin) -> None:
        for name in fields_dict(_Bin):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@define
class History:
    """Counts over time: when there are too many bins, each two become one, twice as long.

    Attributes:
        since: When it begins, by the clock of whoever adds to it.
        bin_sec: The length of a bin, in seconds.
        bins: The bins, the oldest first; the last of them goes on.
    """

    since: float
    bin_sec: float = 1.0
    bins: list[_Bin] = field(factory=list)

    def at(self, now: float) -> _Bin:
        """Return the bin to count in at *now*."""
        while (place := int((now - self.since) / self.bin_sec)) >= _MOST_BINS:
            self.bin_sec *= 2
            halved = [_Bin() for _ in range((len(self.bins) + 1) // 2)]
            for index, each in enumerate(self.bins):
                halved[index // 2].add(each)
            self.bins = halved
        while len(self.bins) <= place:
            self.bins.append(_Bin())
        return self.bins[place]

    def state(self) -> dict[str, Any]:
        """Return it as JSON, by columns; a bin without rewards has no mean."""
        columns: dict[str, list[Any]] = {
            name: [getattr(each, name) for each in self.bins]
            for name in ("admitted", "success", "failure", "cancelled", "rewards")
        }
        columns["mean_reward"] = [
            round(each.reward_sum / each.rewards, 6) if each.rewards else None for each in self.bins
        ]
        return {"bin_sec": self.bin_sec, **columns}


@define
class Recent:
    """Counts events of the last minute, a second at a time."""

    _seconds: dict[int, int] = field(factory=dict)

    def add(self, now: float) -> None:
        """Count an event."""
        second = int(now)
        self._seconds[second] = self._seconds.get(second, 0) + 1
        if len(self._seconds) > 2 * _RECENT_SEC:
            self._drop(now)

    def rate(self, now: float, since: float) -> float:
        """Return events a second in the last minute, or since *since* if that is less."""
        self._drop(now)
        return round(sum(self._seconds.values()) / max(1.0, min(_RECENT_SEC, now - since)), 3)

    def _drop(self, now: float) -> None:
        first = int(now) - _RECENT_SEC
        self._seconds = {at: count for at, count in self._seconds.items() if at > first}
