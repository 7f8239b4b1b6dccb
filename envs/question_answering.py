"""Ask a question and accept up to three replies: the base class of GSM8K, AIME and GeoQA.

Paper: appendix D ("if the first answer is incorrect, it receives feedback and may try again") and
Table 2 (3 actions, binary reward).

A right answer earns 1 and ends the episode. A wrong answer earns 0. A reply without a readable
answer uses up an attempt and costs the format penalty. The answer is the text between the only
<answer> tags of the reply. Every task says in its method `read` which forms of a text it reads. If
the question asks for one sentence, a whole sentence without tags is read, too
(envs/answer_parsing.py). `success` means that any attempt was right.

Questions come from `data` (envs/data.py) or are generated from the seed. Scores on generated
questions say nothing about the data set. A hash of a problem's key decides its split: 7 of 10
problems are for training, 1 is held out, and 2 are for the warm start of tiny models. Full prompts
have no warm start, so these 2 are held out, too. Problems that differ only in their words or their
order share a key, and so do the questions about one figure of GeoQA.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from envs.answer_parsing import read_number, read_sentence
from envs.base import (
    WARM_START_SEEDS,
    Observation,
    Step,
    UserError,
    held_out,
    parse_answer,
    part_of_ten,
)
from envs.data import QuestionEnv, as_text

WRONG = "Wrong. "
RIGHT = "Right. "
FEEDBACK = (WRONG, RIGHT)
WARM_START_SPLIT = {"terse": "warm_start", "full": "held_out"}  # by style


class Question(NamedTuple):
    text: str
    gold: str  # the right answer, in a form that a reply may have
    caption: str = ""
    image: Any = None  # an encoded image, or the figure that is drawn
    one_sentence: bool = False  # full prompts ask for a reply of one sentence


class Problem(NamedTuple):
    """A generated problem, not yet in words."""

    answer: str
    key: Hashable  # problems with equal keys belong to the same split
    content: Any  # what a task's `question_of` puts into words
    kind: int = 0  # the kinds of one answer are equally likely


class QuestionAnswering(QuestionEnv):
    """The base class. Every task defines what is declared here without a value."""

    rules: str  # the first sentence of a full prompt
    form: str  # the last sentence of a full prompt: the form of the reply
    fields: tuple[str, str]  # of a row of data: the question and the right answer
    # It yields all problems of a style. Their answers are numbers, and equally likely.
    problems: Callable[[str], Iterator[Problem]]
    question_of: Callable[[Problem, np.random.Generator], Question]

    max_turns = 3

    def __init__(self, **common: Any):
        """Read the questions of `data`, or generate them. The random policy chooses from the
        answers to the training questions."""
        super().__init__(**common)
        answers = {question.gold for question in self.rows.get("train", ())}
        in_order = sorted(answers) or sorted(self.generated(self.style)["train"], key=float)
        self.actions = tuple(f" {answer}" for answer in in_order)

    @staticmethod
    def read(answer: str) -> Any:
        """Return the value of an answer, or None if it has none of the forms that the task reads.
        This default reads a number alone, as `read_number` does."""
        return read_number(answer)

    @staticmethod
    def gold(answer: str, /) -> str:
        """Return the right answer in the field of a row."""
        return answer

    @classmethod
    def from_row(cls, row: dict) -> Question:
        """Return the question of a row. Raises UserError if a field or its answer is not read."""
        text, answer = (as_text(row.get(name), name) for name in cls.fields)
        gold = cls.gold(answer)
        if cls.read(gold) is None:
            raise UserError(f"the right answer is {gold[:99]!r}, which the task does not read")
        return Question(text, gold)

    @staticmethod
    def right(value: Any, gold: Any) -> bool:
        """Return whether the value of an answer is that of the gold answer."""
        return value == gold

    def images(self) -> tuple[np.ndarray, ...]:
        """Return the images of the current question, uint8 [H, W, 3]."""
        return ()

    @classmethod
    @cache
    def generated(cls, style: str) -> dict[str, dict]:
        """Return lists of all problems of a style: by split ("train", "warm_start" or "held_out"),
        then by answer, then by kind."""
        spare = WARM_START_SPLIT[style]
        splits = ["held_out", spare, spare, *7 * ["train"]]
        problems: dict = {split: {} for split in splits}
        for problem in cls.problems(style):
            split = splits[part_of_ten(problem.key)]
            kinds = problems[split].setdefault(problem.answer, {})
            kinds.setdefault(problem.kind, []).append(problem)
        return problems

    def generate(self, seed: int) -> Question:
        """Return the generated question of a seed. Its answer is drawn first, then the kind of its
        problem, then the problem."""
        split = "held_out" if held_out(seed) else "train"
        if seed >= WARM_START_SEEDS:
            split = WARM_START_SPLIT[self.style]

        rng = np.random.default_rng(seed)
        answers = self.generated(self.style)[split]
        kinds = answers[rng.choice(sorted(answers, key=float))]
        problems = kinds[rng.choice(list(kinds))]
        problem = problems[rng.integers(len(problems))]
        return self.question_of(problem, rng)

    def step(self, reply: str) -> Step:
        answer = parse_answer(reply)
        if not answer and self.question.one_sentence:
            answer = read_sentence(reply, self.question.text)

        value = self.read(answer)
        valid = value is not None
        success = valid and self.right(value, self.read(self.question.gold))

        reward = float(success) if valid else -self.format_penalty
        if valid:
            self.feedback = RIGHT if success else WRONG
        # Terse prompts stay the same: a tiny model learns from the reward alone.
        elif self.style == "full":
            self.feedback = "No answer could be read. "

        return self.end_turn(reward, success, success, valid)

    def observe(self) -> Observation:
        """Return feedback and question. Full prompts add the rules in the first turn, and show the
        feedback alone in later turns, unless they ask for one sentence."""
        question = self.question
        if self.style == "terse":
            return Observation(self.feedback + question.text, self.images())

        left = self.max_turns - self.turn
        if self.turn > 0 and (left == 0 or self.feedback == RIGHT):
            return Observation(self.feedback.strip())
        if question.one_sentence:
            # A model too small for longer instructions needs the question in each turn.
            text = f"{self.feedback}{question.text}\n\nAnswer in one short sentence."
            return Observation(text, self.images())
        if self.turn > 0:
            return Observation(f"{self.feedback}Try again; attempts left: {left}.\n{self.form}")

        attempts = "one attempt"
        if left > 1:
            attempts = f"{left} attempts; after a wrong answer you may try again"
        text = f"{self.rules} You have {attempts}.\n\n{question.text}\n\n{self.form}"
        return Observation(text, self.images())

    def optimal_reply(self) -> str:
        return f"<answer> {self.question.gold}</answer>"

    def caption(self) -> str:
        return self.question.caption
