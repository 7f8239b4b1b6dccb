"""GSM8K: word problems whose answer is a number, with three attempts.

Paper: appendix D, "GSM8K"; a control, since the paper's model solves 93 % of it before training.
Data: the fields `question` and `answer` of `openai/gsm8k:main`, where the answer ends in `#### 72`.

Without data, problems are GENERATED: one or two steps with small numbers, answers 0 to 9, each as likely. They are
ours, not GSM8K's, and their numbers say nothing about GSM8K.
"""

from functools import cache
from typing import Any

import numpy as np

from envs.answers import read_number
from envs.attempts import FEEDBACK, Attempts, Question

NAMES = ("Ann", "Ben", "Mia", "Tom")
THINGS = (" deer", " fish", " sheep", " squid")  # one or many, the word is the same
GETS, LOSES, GROUPS = " and gets", " and loses", " groups of"
ANSWERS = tuple("0123456789")
MIDDLE = {"plus": GETS, "minus": LOSES, "times": GROUPS, "both": GETS}  # between the first two numbers


@cache
def generated_problems() -> dict[str, dict[int, list[tuple[int, ...]]]]:
    """kind: answer: the numbers of every problem of this kind with this answer.

    plus a + b; minus a - b; times a * b; both a + b - c, where no sum exceeds 9.
    """
    digits = range(10)
    problems: dict[str, list[tuple[int, tuple[int, ...]]]] = {
        "plus": [(a + b, (a, b)) for a in digits for b in digits],
        "minus": [(a - b, (a, b)) for a in digits for b in digits],
        "times": [(a * b, (a, b)) for a in digits[2:] for b in digits],
        "both": [(a + b - c, (a, b, c)) for a in digits for b in digits[1:] for c in digits[1:] if a + b < 10],
    }
    return {
        kind: {n: [numbers for answer, numbers in rows if answer == n] for n in digits}
        for kind, rows in problems.items()
    }


def problem_text(kind: str, name: str, thing: str, numbers: tuple[int, ...]) -> str:
    a, b, *c = numbers
    if kind == "times":
        return f"{name} has {a}{GROUPS} {b}{thing}. How many{thing}?"
    second = f"{LOSES} {c[0]}" if c else ""
    return f"{name} has {a}{thing}{MIDDLE[kind]} {b}{second}. How many{thing}?"


class GSM8K(Attempts):
    words = (*NAMES, *THINGS, " has", GETS, LOSES, GROUPS, ". How many", *FEEDBACK, *(f" {n}" for n in ANSWERS))
    generated_answers = ANSWERS
    fields = ("question", "answer")
    rules = "Solve this problem step by step. You have {turns} attempts; after a wrong answer you may try again."
    form = "Reply with your reasoning, then the number alone in the form <answer> number </answer>."
    read = staticmethod(read_number)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        """`#### 1,250` at the end of `answer`."""
        _, mark, gold = str(row["answer"]).rpartition("####")
        value = read_number(gold.strip())
        if not mark or value is None:
            raise ValueError(
                f"the field answer must end in #### and a number, but ends in {str(row['answer'])[-30:]!r}"
            )
        return Question(row["question"], gold.strip())

    def generate(self, rng: np.random.Generator) -> Question:
        answer = int(rng.integers(10))
        kinds = {kind: by_answer[answer] for kind, by_answer in generated_problems().items() if by_answer[answer]}
        kind = list(kinds)[rng.integers(len(kinds))]
        numbers = kinds[kind][rng.integers(len(kinds[kind]))]
        name, thing = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
        quantities = f" {numbers[0]}{MIDDLE[kind]} {numbers[1]}" + (f"{LOSES} {numbers[2]}" if kind == "both" else "")
        return Question(problem_text(kind, name, thing, numbers), str(answer), quantities)


if __name__ == "__main__":
    from envs.play import main

    main(GSM8K)
