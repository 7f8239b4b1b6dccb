"""AIME: competition problems whose answer is an integer from 000 to 999, in up to three attempts.

Paper: appendix D, "AIME"; tau is 1000 there. It does not say which problems it used.
Data: the fields `problem` and `answer`, as in `AI-MO/aimo-validation-aime` (90 problems of the years 2022 to 2024).

Without data: the greatest common divisor of four numbers up to 16, the smallest of them, or how many are multiples of
2, 3 or 5. Their order aside, there are 12,931 problems for training and 1,874 held out (full prompts: 5,942).
"""

import math
import re
from collections.abc import Hashable, Iterator
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from envs.answer_parsing import bare
from envs.question_answering import FEEDBACK, Question, QuestionAnswering

LARGEST = 16
GCD, SMALLEST, MULTIPLES = (
    "Find the greatest common divisor of",
    "Find the smallest of",
    "Find how many multiples of",
)
AMONG = " there are among"


class AIME(QuestionAnswering):
    generated_answers = tuple(f"{n:03d}" for n in range(8))
    numbers = tuple(map(" {}".format, (*range(1, LARGEST + 1), *generated_answers)))
    words = (GCD, SMALLEST, MULTIPLES, AMONG, *FEEDBACK, *numbers)
    fields = ("problem", "answer")
    rules = "Solve this competition problem step by step; its answer is an integer from 000 to 999."
    form = "End your reply with the integer alone between tags, for example <answer>042</answer>."

    @classmethod
    def read(cls, answer: str) -> int | None:
        text = bare(answer)
        return int(text) if re.fullmatch("[0-9]{1,3}", text) else None

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        if (gold := cls.read(str(row["answer"]))) is None:
            raise ValueError(
                f"the field answer is {str(row['answer'])[:30]!r}, but must be an integer from 000 to 999"
            )
        return Question(str(row["problem"]), f"{gold:03d}")

    @classmethod
    def problems(cls, style: str) -> Iterator[tuple[str, int, Hashable, Any]]:
        for numbers in combinations_with_replacement(range(1, LARGEST + 1), 4):
            found = [(math.gcd(*numbers), GCD), (numbers[0], SMALLEST)]
            found += [
                (sum(n % m == 0 for n in numbers), f"{MULTIPLES} {m}{AMONG}") for m in (2, 3, 5)
            ]
            for answer, task in found:
                yield f"{answer:03d}", 0, numbers, (task, numbers)

    def question_of(self, content: Any, answer: str, rng: np.random.Generator) -> Question:
        task, numbers = content
        listed = "".join(f" {n}" for n in rng.permutation(numbers))
        return Question(f"{task}{listed}.", answer, listed)
