"""The table of attempts, column by column, as the page reads it."""

from __future__ import annotations

from typing import Any

from attrs import asdict, define, field

from rollout.evaluation.report.gather import STATES, Attempt, state_of
from rollout.evaluation.report.text import line, number

__all__ = ["Columns"]

_MESSAGE = 240
_MANY = 200
"""Categories that are told apart; a hostile server could invent one for each attempt."""


@define
class Columns:
    """Collects the attempts; names that repeat are kept once, and referred to by number."""

    row: list[int] = field(factory=list)
    attempt: list[int] = field(factory=list)
    state: list[int] = field(factory=list)
    reward: list[float | None] = field(factory=list)
    category: list[int] = field(factory=list)
    categories: list[str] = field(factory=list)
    duration: list[float | None] = field(factory=list)
    tokens_in: list[float | None] = field(factory=list)
    tokens_out: list[float | None] = field(factory=list)
    submitted: list[int] = field(factory=list)
    tries: list[int] = field(factory=list)
    message: list[str] = field(factory=list)
    prompts: dict[int, str] = field(factory=dict)
    block: list[int] = field(factory=list)
    slot: list[int] = field(factory=list)
    _category_numbers: dict[str, int] = field(factory=dict)

    def add(self, attempt: Attempt, prompt: str, place: tuple[int, int]) -> None:
        """Add an attempt whose conversation lies at *place*."""
        record = attempt.record
        self.row.append(record.row)
        self.attempt.append(record.attempt)
        self.state.append(STATES.index(state_of(record)))
        self.reward.append(number(record.reward))
        self.category.append(self._category(record.err_category))
        self.duration.append(_short(record.duration_sec))
        self.tokens_in.append(number(record.prompt_tokens))
        self.tokens_out.append(number(record.completion_tokens))
        self.submitted.append(round(record.submitted_at.timestamp() * 1000))
        self.tries.append(len(attempt.others) + 1)
        self.message.append(line(record.err_message or "", _MESSAGE))
        if prompt and record.row not in self.prompts:
            self.prompts[record.row] = prompt
        self.block.append(place[0])
        self.slot.append(place[1])

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in plain JSON types."""
        columns = asdict(self, recurse=False, filter=lambda field_, _: field_.name[0] != "_")
        return {**columns, "states": list(STATES)}

    def _category(self, name: str | None) -> int:
        """Return the number of a category, -1 for none."""
        if name is None:
            return -1
        name = line(name, 80)
        if name not in self._category_numbers:
            if len(self.categories) >= _MANY:
                name = "other"
            if name not in self._category_numbers:
                self._category_numbers[name] = len(self.categories)
                self.categories.append(name)
        return self._category_numbers[name]


def _short(seconds: float) -> float | None:
    found = number(seconds)
    return None if found is None else round(found, 4)
