"""Ask a question and accept up to three replies: what GSM8K, AIME and GeoQA share.

Paper: appendix D ("if the first answer is incorrect, it receives feedback and may try again") and Table 2 (3 actions,
binary reward). A right answer earns 1 and ends the episode, a wrong one earns 0, and a reply without a readable answer
costs its attempt and the format penalty. Success: any attempt was right. `first_success`: the first one was.

Questions come from `data` (envs/data.py) or are generated from the seed; scores on generated ones say nothing about the
data set. They are divided by a hash of a key: 7 in 10 for training, 1 held out, 2 for the warm start of tiny models;
full prompts have no warm start and hold these 2 out, too. Problems that differ in words or order alone (GeoQA: that
have the same figure) share their key.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envs.answer_parsing import read_number, read_sentence
from envs.base import WARM_START_SEEDS, Observation, TextEnv, held_out, parse_answer, tenth
from envs.data import load_rows, row_for

FEEDBACK = WRONG, RIGHT = "Wrong. ", "Right. "
UNREADABLE = "No answer could be read. "
SHORT = "Answer in one short sentence."
SPARE = {"terse": "warm_start", "full": "held_out"}  # of a style: where the 2 in 10 go


class Question(NamedTuple):
    text: str
    gold: str  # the right answer, as a reply would have it
    caption: str = ""
    image: Any = None  # what the image is drawn from
    one_sentence: bool = False  # full prompts ask for a reply of one sentence


class QuestionAnswering(TextEnv):
    """The base class. Every task defines what is declared here without a value."""

    settings = ("data",)
    rules: str  # the first sentence of a full prompt
    form: str  # how to reply
    fields: ClassVar[tuple[str, ...]]  # of a row of data
    from_row: Callable[
        [dict[str, Any]], Question
    ]  # a ValueError says what is wrong with which field
    generated_answers: tuple[str, ...]  # equally likely
    # of a style: answer, kind (equally likely), key and content
    problems: Callable[[str], Iterator[tuple[str, int, Hashable, Any]]]
    question_of: Callable[[Any, str, np.random.Generator], Question]  # from content and answer

    max_turns = 3
    metrics = ("first_success",)
    first_success = False

    def __init__(self, data: str = "", **common: Any):
        """`data` as in envs/data.py. Raises ValueError if a row of it is no question of this task."""
        super().__init__(**common)
        self.data, self.rows = data, load_rows(data, self.fields, self.from_row) if data else {}
        golds = (
            sorted({question.gold for question in self.rows["train"]})
            if data
            else self.generated_answers
        )
        self.actions = tuple(f" {gold}" for gold in golds)

    @classmethod
    def read(cls, answer: str) -> Any:
        """Return the value of an answer, or None if it is not one of this task's."""
        return read_number(answer)

    @staticmethod
    def right(value: Any, gold: Any) -> bool:
        """Return whether a value is the gold one."""
        return value == gold

    def images(self) -> tuple[np.ndarray, ...]:
        """Return the images of the current question, uint8 [H, W, 3]."""
        return ()

    @classmethod
    @cache
    def generated(cls, style: str) -> dict[tuple[str, str], dict[int, list[Any]]]:
        """Return the contents of all problems by split ("train", "warm_start" or "held_out") and answer, then kind."""
        contents: dict = defaultdict(lambda: defaultdict(list))
        tenths = "held_out", SPARE[style], SPARE[style], *["train"] * 7
        for answer, kind, key, content in cls.problems(style):
            contents[tenths[tenth(key)], answer][kind].append(content)
        return contents

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        seed = self.episode_seed(seed)
        if self.data:
            self.question = row_for(self.rows, seed)
        else:
            rng = np.random.default_rng(seed)
            split = (
                "held_out"
                if held_out(seed)
                else SPARE[self.style]
                if seed >= WARM_START_SEEDS
                else "train"
            )
            generated = self.generated(self.style)
            answers = [answer for answer in self.generated_answers if (split, answer) in generated]
            answer = answers[rng.integers(len(answers))]
            kinds = list(generated[split, answer].values())
            contents = kinds[rng.integers(len(kinds))]
            self.question = self.question_of(contents[rng.integers(len(contents))], answer, rng)
        self.turn, self.feedback, self.first_success = 0, "", False
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self.turn += 1
        answer = parse_answer(reply) or ""
        if not answer and self.question.one_sentence:
            answer = read_sentence(reply, self.question.text)

        value = self.read(answer)
        success = value is not None and self.right(value, self.read(self.question.gold))
        self.first_success |= success and self.turn == 1
        if value is not None:
            reward, self.feedback = float(success), RIGHT if success else WRONG
        else:  # terse prompts stay the same: a tiny model learns from the reward alone
            reward, self.feedback = (
                -self.format_penalty,
                UNREADABLE if self.style == "full" else self.feedback,
            )
        info = {
            "success": success,
            "valid": value is not None,
            "metrics": {"first_success": float(self.first_success)},
        }
        return self.observe(), reward, success, self.turn >= self.max_turns, info

    def observe(self) -> Observation:
        """Return feedback and question. Full prompts add rules, and in later turns show the feedback alone."""
        if self.style == "terse":
            return Observation(self.feedback + self.question.text, self.images())
        left, form = self.max_turns - self.turn, SHORT if self.question.one_sentence else self.form
        if self.turn == 0:
            several = f"You have {left} attempts; after a wrong answer you may try again."
            attempts = (
                several
                if left > 1
                else ""
                if self.question.one_sentence
                else "You have one attempt."
            )
            rules = attempts if self.question.one_sentence else f"{self.rules} {attempts}"
            return Observation(f"{rules}\n\n{self.question.text}\n\n{form}".strip(), self.images())
        again = (
            f"Try again; attempts left: {left}.\n{form}"
            if left > 0 and self.feedback != RIGHT
            else ""
        )
        return Observation((self.feedback + again).strip())

    def optimal_reply(self) -> str:
        return f"<answer> {self.question.gold}</answer>"

    @cached_property
    def action_values(self) -> list[Any]:
        """Return what the answers of the random policy are read as: once, since data has thousands."""
        return [self.read(answer) for answer in self.actions]

    def baselines(self, seed: int) -> dict[str, float]:
        """Return exact success: 1 - (1 - p)^H for a random policy, each of whose attempts is right with chance p."""
        self.reset(seed=seed)
        gold = self.read(self.question.gold)
        p = np.mean([self.right(value, gold) for value in self.action_values])
        return {"random": float(1.0 - (1.0 - p) ** self.max_turns), "optimal": 1.0}

    def caption(self) -> str:
        return self.question.caption
