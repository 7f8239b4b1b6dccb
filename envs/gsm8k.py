"""GSM8K: word problems whose answer is a number, in up to three attempts.

Paper: appendix D; a control, since the paper's model solves 93 % of it before training.
Data: the fields `question` and `answer` of `openai/gsm8k:main`, where the answer ends in `#### 72`.

Without data: someone has some things, and then gets or loses some.
terse  at most 7 things, 1 or 2 at a time, one to six times (each as often): 12,289 problems for training and 1,589 held
       out, names and things aside
full   at most 20 things, any number of them, once: 267 and 123, all there are. A reply may be one sentence in digits,
       as "Tom has 4 + 3 = 7 fish now.": a model too small for longer instructions replies like this
"""

from collections.abc import Hashable, Iterator
from itertools import permutations
from typing import Any

import numpy as np

from envs.question_answering import FEEDBACK, Question, QuestionAnswering

NAMES = ("Ann", "Ben", "Mia", "Tom")
THINGS = (" deer", " fish", " sheep", " squid")  # singular and plural are the same word
CHANGES = {1: " and gets 1", 2: " and gets 2", -1: " and loses 1", -2: " and loses 2"}
MOST, MOST_CHANGES = 7, 6  # things at any time, changes
MOST_FULL = 20  # things at any time, in full prompts


class GSM8K(QuestionAnswering):
    generated_answers = tuple(str(n) for n in range(MOST + 1))
    words = (
        *NAMES,
        *THINGS,
        " has",
        *CHANGES.values(),
        ". How many",
        *FEEDBACK,
        *map(" {}".format, generated_answers),
    )
    fields = ("question", "answer")
    rules = "Solve this problem step by step."
    form = "End your reply with the number alone between tags, for example <answer>42</answer>."

    def __init__(self, data: str = "", style: str = "terse", **common: Any):
        if style == "full":
            self.generated_answers = tuple(str(n) for n in range(MOST_FULL + 1))
        super().__init__(data, style=style, **common)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        gold = str(row["answer"]).rpartition("####")[2].strip()
        if cls.read(gold) is None:
            raise ValueError(
                f"the field answer must end in #### and a number, but ends in {gold[-30:]!r}"
            )
        return Question(str(row["question"]), gold)

    @classmethod
    def problems(cls, style: str) -> Iterator[tuple[str, int, Hashable, Any]]:
        if style == "full":
            for first, now in permutations(range(MOST_FULL + 1), 2):
                if now != abs(now - first):  # the answer is no number of the question
                    yield (
                        str(now),
                        1,
                        tuple(sorted((first, now - first))),
                        (first, now - first),
                    )  # 4 + 3 is 3 + 4
            return
        found: list[tuple[tuple[int, ...], int]] = [((first,), first) for first in range(MOST + 1)]
        for _ in range(MOST_CHANGES):
            found = [
                ((*made, n), now + n)
                for made, now in found
                for n in CHANGES
                if 0 <= now + n <= MOST
            ]
            for content, now in found:
                yield str(now), len(content), (content[0], *sorted(content[1:])), content

    def question_of(self, content: Any, answer: str, rng: np.random.Generator) -> Question:
        first, *changes = content
        name, thing = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
        if self.style == "full":
            verb, when = ("gets", "now") if changes[0] > 0 else ("loses", "left")
            text = f"{name} has {first}{thing} and {verb} {abs(changes[0])}. How many{thing} does {name} have {when}?"
            return Question(text, answer, one_sentence=True)
        events = "".join(CHANGES[n] for n in changes)
        return Question(
            f"{name} has {first}{thing}{events}. How many{thing}?", answer, f" {first}{events}"
        )
