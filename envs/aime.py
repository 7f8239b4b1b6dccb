"""AIME: competition problems whose answer is an integer from 000 to 999, in up to three attempts.

Paper: appendix D, "AIME"; tau is 1000 there. It does not say which problems it used.
Data: the fields `problem` and `answer`, as in `AI-MO/aimo-validation-aime` (90 problems of the
years 2022 to 2024).

Without data: the greatest common divisor of four numbers up to 16, the smallest of them, or how
many are multiples of 2, 3 or 5. Apart from the order of the numbers, there are 12,931 problems for
training and 1,874 held out (full prompts: 5,942).
"""

import math
import re
from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np

from envs.answer_parsing import bare
from envs.question_answering import FEEDBACK, Problem, Question, QuestionAnswering

MAX_NUMBER = 16  # of a problem's numbers
MAX_VALUE = 7
GCD = "Find the greatest common divisor of"
SMALLEST = "Find the smallest of"
MULTIPLES = "Find how many multiples of"
AMONG = " there are among"


class AIME(QuestionAnswering):
    words = (
        GCD,
        SMALLEST,
        MULTIPLES,
        AMONG,
        *FEEDBACK,
        *(f" {n}" for n in range(1, MAX_NUMBER + 1)),
    )
    rules = "Solve this competition problem step by step; its answer is an integer from 000 to 999."
    form = "End your reply with the integer alone between tags, for example <answer>042</answer>."
    fields = ("problem", "answer")

    @staticmethod
    def read(answer: str) -> int | None:
        """Return an integer from 0 to 999 that stands alone, or None. It has one to three digits
        (7, 07 and 007 are equal), because competitors fill in three. A sign, a decimal point, words
        and expressions are not read."""
        digits = bare(answer)
        return int(digits) if re.fullmatch("[0-9]{1,3}", digits) else None

    @classmethod
    def problems(cls, style: str) -> Iterator[Problem]:
        """Yield all problems. Their content is the task in words and its numbers."""
        for numbers in combinations_with_replacement(range(1, MAX_NUMBER + 1), 4):
            answers = {GCD: math.gcd(*numbers), SMALLEST: numbers[0]}
            for divisor in (2, 3, 5):
                multiples = [n for n in numbers if n % divisor == 0]
                answers[f"{MULTIPLES} {divisor}{AMONG}"] = len(multiples)
            for task, answer in answers.items():
                if answer <= MAX_VALUE:
                    yield Problem(f"{answer:03d}", numbers, (task, numbers))

    def question_of(self, problem: Problem, rng: np.random.Generator) -> Question:
        task, numbers = problem.content
        listed = "".join(f" {n}" for n in rng.permutation(numbers))
        return Question(f"{task}{listed}.", problem.answer, listed)
