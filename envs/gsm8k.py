"""GSM8K: word problems whose answer is a number, in up to three attempts.

Paper: appendix D; a control, since the paper's model solves 93 % of it before training.
Data: the fields `question` and `answer` of `openai/gsm8k:main`, where the answer ends in `#### 72`.

Without data, problems are generated: someone has up to seven things and then gets or loses one or two, up to six
times, and never has more than seven. Answers 0 to 7 are equally likely. There are 12,289 problems for training and
1,589 held out, names and things aside. They are ours, and scores on them say nothing about GSM8K.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from envs.answer_parsing import read_number
from envs.question_answering import FEEDBACK, Problem, Question, QuestionAnswering

NAMES = ("Ann", "Ben", "Mia", "Tom")
THINGS = (" deer", " fish", " sheep", " squid")  # singular and plural are the same word
CHANGES = {1: " and gets 1", 2: " and gets 2", -1: " and loses 1", -2: " and loses 2"}
MOST, MOST_CHANGES = 7, 6  # things at any time, changes
ANSWERS = tuple(str(n) for n in range(MOST + 1))


class GSM8K(QuestionAnswering):
    words = (*NAMES, *THINGS, " has", *CHANGES.values(), ". How many", *FEEDBACK, *(f" {n}" for n in ANSWERS))
    generated_answers = ANSWERS
    fields = ("question", "answer")
    rules = "Solve this problem step by step."
    form = "End your reply with the number alone between tags, for example <answer>42</answer>."

    @staticmethod
    def read(answer: str) -> Fraction | float | None:
        number = read_number(answer)
        return None if number is None else number.value

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        """Return the question of a row, whose `answer` ends in `#### 1,250`."""
        _, mark, gold = str(row["answer"]).rpartition("####")
        if not mark or read_number(gold) is None:
            end = str(row["answer"])[-30:]
            raise ValueError(f"the field answer must end in #### and a number, but ends in {end!r}")
        return Question(row["question"], gold.strip())

    @classmethod
    def problems(cls) -> Iterator[Problem]:
        """Yield all problems. Those with the same changes in another order are in the same split."""
        found: list[tuple[tuple[int, ...], int]] = [((first,), first) for first in range(MOST + 1)]
        for _ in range(MOST_CHANGES):
            found = [((*made, n), now + n) for made, now in found for n in CHANGES if 0 <= now + n <= MOST]
            for content, now in found:
                yield Problem(str(now), (content[0], *sorted(content[1:])), content)

    def question_of(self, problem: Problem, rng: np.random.Generator) -> Question:
        first, *changes = problem.content
        name, thing = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
        events = "".join(CHANGES[n] for n in changes)
        text = f"{name} has {first}{thing}{events}. How many{thing}?"
        return Question(text, problem.answer, f" {first}{events}")


if __name__ == "__main__":
    from envs.play import main

    main(GSM8K)
