"""The demo's task: sort digits. A question is a text such as `314159=`, and its answer is `113459`.

Pure. Demonstrations have mistakes on purpose: a model that imitates them sorts badly, and learns the right answer from rewards alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DIGITS = "0123456789"
END = "="


@dataclass(frozen=True, slots=True, kw_only=True)
class SortDigits:
    """`noise` is the share of a demonstration's digits that are drawn at random."""

    digits: int = 6
    noise: float = 0.3

    def question(self, chance: random.Random) -> str:
        """A new question."""
        return "".join(chance.choices(DIGITS, k=self.digits)) + END

    def answer(self, question: str) -> str:
        """The right answer."""
        return "".join(sorted(question.removesuffix(END)))

    def reward(self, question: str, answer: str) -> float:
        """1 for the right answer, 0 for any other."""
        return float(answer == self.answer(question))

    def demonstration(self, question: str, chance: random.Random) -> str:
        """An answer with mistakes."""
        return "".join(
            chance.choice(DIGITS) if chance.random() < self.noise else digit
            for digit in self.answer(question)
        )
