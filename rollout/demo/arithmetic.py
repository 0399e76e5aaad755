"""A scripted stand-in for a language model: it does sums, and is wrong now and then.

No learning and no language is involved. The model finds the first expression such as
``6 * 7`` in the last user message and computes it. Whether it gets it wrong, by how much and
how long it takes all follow from the seed and the question alone, and from the seed of the
request if it has one, so that a run can be repeated whatever the order in which its requests
arrive.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from typing import Any

from attrs import field, frozen

from rollout._checks import check_number, setting
from rollout.errors import InvalidFieldError

__all__ = ["MODEL_NAME", "Problem", "ScriptedModel", "last_number", "make_problems", "make_sums"]

MODEL_NAME = "scripted-arithmetic"

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_EXPRESSION = re.compile(r"(-?\d{1,12})\s*([+\-*])\s*(-?\d{1,12})(?!\d)", re.ASCII)
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_OPERANDS = range(2, 100)
_SINGLE_DIGITS = range(1, 10)
_LARGEST_SLIP = 9
_SPREAD = 0.5


@frozen
class Problem:
    """A question and its right answer."""

    question: str
    answer: str


def make_problems(count: int, seed: int) -> list[Problem]:
    """Make *count* problems; the same seed gives the same ones, and more of them begin alike."""
    draw = random.Random(f"problems {seed}")  # noqa: S311 - repeatable on purpose
    problems = []
    for _ in range(count):
        left, right = draw.choice(_OPERANDS), draw.choice(_OPERANDS)
        symbol = draw.choice(list(_OPERATIONS))
        answer = _OPERATIONS[symbol](left, right)
        problems.append(Problem(f"What is {left} {symbol} {right}?", str(answer)))
    return problems


def make_sums(count: int, seed: int) -> list[Problem]:
    """Make *count* sums of two single digits, as `make_problems` makes its problems."""
    draw = random.Random(f"sums {seed}")  # noqa: S311 - repeatable on purpose
    pairs = [(draw.choice(_SINGLE_DIGITS), draw.choice(_SINGLE_DIGITS)) for _ in range(count)]
    return [Problem(f"What is {left} + {right}?", str(left + right)) for left, right in pairs]


def last_number(text: str) -> str | None:
    """Return the last whole number in *text*, which is where an answer ends."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


_finite_from_zero = setting(check_number, least=0)


def _at_most_one(_: Any, attribute: Any, value: Any) -> None:
    if value > 1:
        raise InvalidFieldError(attribute.name, "must be a number from 0 to 1")


@frozen(kw_only=True)
class ScriptedModel:
    """Answers questions; see the module.

    Attributes:
        seed: Decides which answers are wrong.
        error_rate: The share of wrong answers, from 0 to 1. An answer that is wrong at
            one rate is wrong at every higher one.
        think_sec: How long an answer takes on average, in seconds.

    Raises:
        InvalidFieldError: The rate or the time is out of its range.
    """

    seed: int = 0
    error_rate: float = field(default=0.25, validator=[_finite_from_zero, _at_most_one])
    think_sec: float = field(default=0.2, validator=_finite_from_zero)

    def answer(self, question: str, seed: int | None = None) -> str:
        """Return the reply to a user message.

        Args:
            question: The message.
            seed: The caller's own seed; another one may be another answer.
        """
        match = _EXPRESSION.search(question)
        if match is None:
            return "I am a script that does sums. Ask me something like: What is 6 * 7?"
        left, symbol, right = match.groups()
        value = _OPERATIONS[symbol](int(left), int(right))
        draw = self._draw("answer" if seed is None else f"answer {seed}", question)
        if draw.random() < self.error_rate:
            value += draw.choice((-1, 1)) * draw.randint(1, _LARGEST_SLIP)
        return f"{left} {symbol} {right} = {value}"

    def thinking_sec(self, question: str) -> float:
        """Return how long the reply takes, in seconds."""
        spread = self._draw("time", question).uniform(1 - _SPREAD, 1 + _SPREAD)
        return self.think_sec * spread

    def _draw(self, what: str, question: str) -> random.Random:
        # Encoded here, since a question out of JSON may hold half of a pair of surrogates.
        text = f"{what} {self.seed} {question}".encode("utf-8", "surrogatepass")
        return random.Random(text)  # noqa: S311 - repeatable on purpose
