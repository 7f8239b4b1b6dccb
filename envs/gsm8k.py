"""GSM8K: word problems whose answer is a number, in up to three attempts.

Paper: appendix D; a control, since the paper's model solves 93 % of it before training.
Data: the fields `question` and `answer` of `openai/gsm8k:main`, where the answer ends in `#### 72`.

Without data: someone has up to seven things and then gets or loses one or two, one to six times (each as often), and
never has more than seven. There are 12,289 problems for training and 1,589 held out, names and things aside.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from envs.question_answering import FEEDBACK, Question, QuestionAnswering

NAMES = ("Ann", "Ben", "Mia", "Tom")
THINGS = (" deer", " fish", " sheep", " squid")  # singular and plural are the same word
CHANGES = {1: " and gets 1", 2: " and gets 2", -1: " and loses 1", -2: " and loses 2"}
MOST, MOST_CHANGES = 7, 6  # things at any time, changes


class GSM8K(QuestionAnswering):
    generated_answers = tuple(str(n) for n in range(MOST + 1))
    words = (*NAMES, *THINGS, " has", *CHANGES.values(), ". How many", *FEEDBACK, *map(" {}".format, generated_answers))
    fields = ("question", "answer")
    rules = "Solve this problem step by step."
    form = "End your reply with the number alone between tags, for example <answer>42</answer>."

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        gold = str(row["answer"]).rpartition("####")[2].strip()
        if cls.read(gold) is None:
            raise ValueError(f"the field answer must end in #### and a number, but ends in {gold[-30:]!r}")
        return Question(str(row["question"]), gold)

    @classmethod
    def problems(cls) -> Iterator[tuple[str, int, Hashable, Any]]:
        found: list[tuple[tuple[int, ...], int]] = [((first,), first) for first in range(MOST + 1)]
        for _ in range(MOST_CHANGES):
            found = [((*made, n), now + n) for made, now in found for n in CHANGES if 0 <= now + n <= MOST]
            for content, now in found:
                yield str(now), len(content), (content[0], *sorted(content[1:])), content

    def question_of(self, content: Any, answer: str, rng: np.random.Generator) -> Question:
        first, *changes = content
        name, thing = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
        events = "".join(CHANGES[n] for n in changes)
        return Question(f"{name} has {first}{thing}{events}. How many{thing}?", answer, f" {first}{events}")
