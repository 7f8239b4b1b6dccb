"""GSM8K: word problems whose answer is a number, in up to three attempts.

Paper: appendix D. The task is a control: the paper says that its model solves 93 % before training.
Data: the fields `question` and `answer` of `openai/gsm8k:main`, where the answer ends in `#### 72`.

A reply's answer is a number alone: an integer or a decimal, with a sign, commas between thousands,
or a sign of a currency or of percent if it likes. Words, units, fractions and expressions are not
read, because the answers of the data set are plain numbers.

Without data, a person has some things, and then gets or loses some.
terse  At most 7 things, 1 or 2 come or go at a time, one to six times (each number of times is
       equally likely): 12,289 problems for training and 1,589 held out, names and things aside.
full   At most 20 things, any number of them comes or goes, once: 267 and 123 problems, all there
       are. A reply may be one sentence in digits, as "Tom has 4 + 3 = 7 fish now.", because a model
       too small for longer instructions replies like this.
"""

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from envs.question_answering import FEEDBACK, Problem, Question, QuestionAnswering

NAMES = "Ann Ben Mia Tom".split()
THINGS = (" deer", " fish", " sheep", " squid")  # singular and plural are the same word
CHANGES = {1: " and gets 1", 2: " and gets 2", -1: " and loses 1", -2: " and loses 2"}
MAX_THINGS = 7  # things at any time
MAX_CHANGES = 6
MAX_THINGS_FULL = 20  # things at any time, in full prompts


class GSM8K(QuestionAnswering):
    words = (*NAMES, *THINGS, " has", *CHANGES.values(), ". How many", *FEEDBACK)
    rules = "Solve this problem step by step."
    form = "End your reply with the number alone between tags, for example <answer>42</answer>."

    fields = ("question", "answer")

    @staticmethod
    def gold(answer: str) -> str:
        return answer.rpartition("####")[2].strip()

    @classmethod
    def problems(cls, style: str) -> Iterator[Problem]:
        """Yield all problems of a style. Their content is (first, change, change, ...): the number
        of things at first, and what each change adds to it."""
        return one_change() if style == "full" else several_changes()

    def question_of(self, problem: Problem, rng: np.random.Generator) -> Question:
        first, *changes = problem.content
        name = rng.choice(NAMES)
        thing = rng.choice(THINGS)

        if self.style == "terse":
            events = "".join(CHANGES[change] for change in changes)
            text = f"{name} has {first}{thing}{events}. How many{thing}?"
            return Question(text, problem.answer, caption=f" {first}{events}")

        change = changes[0]
        event = f"gets {change}"
        when = "now"
        if change < 0:
            event = f"loses {-change}"
            when = "left"
        question = f"How many{thing} does {name} have {when}?"
        text = f"{name} has {first}{thing} and {event}. {question}"
        return Question(text, problem.answer, one_sentence=True)


def one_change() -> Iterator[Problem]:
    """Yield the problems of full prompts."""
    for first, last in permutations(range(MAX_THINGS_FULL + 1), 2):
        change = last - first
        # The answer must not be a number of the question.
        if last != abs(change):
            # 3 + 4 has the key of 4 + 3.
            key = tuple(sorted((first, change)))
            yield Problem(str(last), key, (first, change))


def several_changes() -> Iterator[Problem]:
    """Yield the problems of terse prompts. Their number of changes decides their kind."""
    contents: list[tuple[int, ...]] = [(first,) for first in range(MAX_THINGS + 1)]
    for kind in range(MAX_CHANGES):
        longer = [(*content, change) for content in contents for change in CHANGES]
        contents = [content for content in longer if 0 <= sum(content) <= MAX_THINGS]
        for content in contents:
            first, *changes = content
            yield Problem(str(sum(content)), (first, *sorted(changes)), content, kind)
