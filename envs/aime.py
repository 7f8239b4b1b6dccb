"""AIME: competition problems whose answer is an integer from 000 to 999, with three attempts.

Paper: appendix D, "AIME"; tau is 1000 there.
Data: the fields `problem` and `answer` (in any case: `Problem`, `Answer`), as in `AI-MO/aimo-validation-aime`, which
has one split, 90 problems of the years 2022 to 2024. The paper does not say which problems it used.

Without data, problems are GENERATED: a remainder, a greatest common divisor or a number of divisors, answers 000 to
007, each as likely. They are ours, not AIME's, and their numbers say nothing about AIME.
"""

import math
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from envs.answers import read_number
from envs.attempts import FEEDBACK, Attempts, Question

LARGEST = 16
ANSWERS = tuple(f"{n:03d}" for n in range(8))
REMAINDER, GCD, DIVISORS = "Find the remainder of", "Find the greatest common divisor of", "Find how many divisors"
# kind: what stands between its numbers, and after them
PHRASES = {REMAINDER: (" divided by", "."), GCD: (" and", "."), DIVISORS: ("", " has.")}


@cache
def generated_problems() -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    """answer: the kind and the numbers of every problem with this answer. No number exceeds 16."""
    numbers = range(1, LARGEST + 1)
    problems: list[tuple[int, tuple[str, tuple[int, ...]]]] = []
    problems += [(n % m, (REMAINDER, (n, m))) for n in numbers for m in range(2, 9)]
    problems += [(math.gcd(a, b), (GCD, (a, b))) for a in numbers for b in numbers if a != b]
    problems += [(sum(n % d == 0 for d in numbers), (DIVISORS, (n,))) for n in numbers]
    return {n: [problem for answer, problem in problems if answer == n] for n in range(len(ANSWERS))}


class AIME(Attempts):
    words = (*PHRASES, " divided by", " and", " has.", *FEEDBACK)
    words += (*(f" {n}" for n in range(1, LARGEST + 1)), *(f" {n}" for n in ANSWERS))
    generated_answers = ANSWERS
    fields = ("problem", "answer")
    rules = (
        "Solve this competition problem step by step; its answer is an integer from 000 to 999. You have {turns} "
        "attempts; after a wrong answer you may try again."
    )
    form = "Reply with your reasoning, then the integer alone in the form <answer> integer </answer>."

    @staticmethod
    def read(answer: str) -> Fraction | None:
        """An integer from 000 to 999; anything else is no answer."""
        value = read_number(answer)
        return value if value is not None and value.denominator == 1 and 0 <= value <= 999 else None

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        gold = cls.read(str(row["answer"]))
        if gold is None:
            raise ValueError(f"the field answer is {str(row['answer'])[:30]!r}, but must be an integer from 000 to 999")
        return Question(row["problem"], f"{int(gold):03d}")

    def generate(self, rng: np.random.Generator) -> Question:
        answer = int(rng.integers(len(ANSWERS)))
        problems = generated_problems()[answer]
        kind, numbers = problems[rng.integers(len(problems))]
        between, after = PHRASES[kind]
        quantities = between.join(f" {n}" for n in numbers)
        return Question(f"{kind}{quantities}{after}", ANSWERS[answer], quantities)


if __name__ == "__main__":
    from envs.play import main

    main(AIME)
