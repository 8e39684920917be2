"""The demo's task: sort digits. A question is a text such as `314159=`, its answer `113459`, and anybody can check it.

Pure. Demonstrations are wrong here and there, on purpose: who imitates them sorts badly, and only the reward tells what is right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DIGITS = "0123456789"
END = "="


@dataclass(frozen=True, slots=True, kw_only=True)
class SortDigits:
    """`noise` is how many of a demonstration's digits are drawn at random."""

    digits: int = 6
    noise: float = 0.3

    def question(self, chance: random.Random) -> str:
        """A new question."""
        return "".join(chance.choices(DIGITS, k=self.digits)) + END

    def answer(self, question: str) -> str:
        """The one that is right."""
        return "".join(sorted(question.removesuffix(END)))

    def reward(self, question: str, answer: str) -> float:
        """1 for the right answer, 0 for any other."""
        return float(answer == self.answer(question))

    def demonstration(self, question: str, chance: random.Random) -> str:
        """An answer as a careless teacher writes it."""
        return "".join(
            chance.choice(DIGITS) if chance.random() < self.noise else digit
            for digit in self.answer(question)
        )
