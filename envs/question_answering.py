"""Ask a question and accept up to three replies: what GSM8K, AIME and GeoQA share.

Paper: appendix D ("if the first answer is incorrect, it receives feedback and may try again") and Table 2 (3 actions,
binary reward). A right answer earns 1 and ends the episode, a wrong one earns 0, and a reply without a readable answer
costs its attempt and the format penalty. Success: any attempt was right. `first_success`: the first one was.

Questions come from `data` (envs/data.py), which has held-out rows, or are generated from the seed. Generated problems
are divided by a hash of a key: 7 in 10 for training, 2 for the warm start of tiny models, 1 held out. Problems with the
same numbers and operations in another order, the same four numbers (AIME) or the same figure (GeoQA) have the same key,
so a held-out problem differs from every problem of training in more than words.
"""

import hashlib
import re
from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from envs.answer_parsing import final_answer
from envs.base import FORMAT_PENALTY, WARM_START_SEEDS, Observation, TextEnv, held_out, observations
from envs.data import data_summary, load_rows, row_for

MAX_QUESTION = 10_000  # characters
FEEDBACK = WRONG, RIGHT = "Wrong. ", "Right. "
UNREADABLE = "No answer could be read. "


class Question(NamedTuple):
    """A question as it is asked, the right answer as a reply would have it, and what the image is drawn from."""

    text: str
    gold: str
    caption: str = ""
    image: Any = None


class Problem(NamedTuple):
    """A generated problem: `key` decides its split, and the task makes a question of `content`."""

    answer: str
    key: Hashable
    content: Any


class QuestionAnswering(TextEnv):
    """The base class of the three tasks, which override its texts and the methods from `from_row` to `images`."""

    max_turns = 3
    metrics = ("first_success",)
    rules = ""  # the first sentence of a full prompt
    form = ""  # how to reply
    generated_answers: tuple[str, ...] = ()  # equally likely; the random policy chooses among them
    fields: tuple[str, ...] = ()  # of a row of data

    def __init__(
        self, style: str = "terse", format_penalty: float = FORMAT_PENALTY, max_turns: int = 0, data: str = ""
    ):
        """`data` as in envs/data.py. Raises ValueError if a row of it is no question of this task."""
        super().__init__(style, format_penalty, max_turns)
        self.data = data
        self.answers = self.generated_answers
        if data:
            self.rows = {split: self.questions(data, split) for split in ("train", "validation")}
            self.answers = tuple(sorted({question.gold for question in self.rows["train"]}))
        self.observation_space = observations(2 * MAX_QUESTION)

    def data_summary(self) -> str:
        """Return a sentence that counts the rows of `data` for training and those held out, "" without data."""
        return data_summary(self.data, self.fields)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        """Return the question in a row of data. Raises ValueError that says what is wrong with which field."""
        raise NotImplementedError

    @classmethod
    def problems(cls) -> Iterator[Problem]:
        """Yield every problem that can be generated; those with other answers than `generated_answers` are left out."""
        raise NotImplementedError

    def question_of(self, problem: Problem, rng: np.random.Generator) -> Question:
        """Put a generated problem into words, drawn by `rng`."""
        raise NotImplementedError

    @staticmethod
    def read(answer: str, /) -> Any:
        """Return the value of an answer, or None if it is not one of this task's."""
        raise NotImplementedError

    @staticmethod
    def right(value: Any, gold: Any, /) -> bool:
        """Return whether a value is the gold one."""
        return value == gold

    def images(self) -> tuple[np.ndarray, ...]:
        """Return the images of the current question, uint8 [H, W, 3]."""
        return ()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Observation, dict]:
        """Begin an episode. A seed is one question; successive seeds go through the shuffled rows of `data`."""
        super().reset(seed=seed)
        seed = self.episode_seed(seed)
        if self.data:
            self.question = row_for(self.rows["validation" if held_out(seed) else "train"], seed)
        else:
            split = "held_out" if held_out(seed) else "warm_start" if seed >= WARM_START_SEEDS else "train"
            rng = np.random.default_rng(seed)
            problems = self.generated()[split][self.answers[rng.integers(len(self.answers))]]
            self.question = self.question_of(problems[rng.integers(len(problems))], rng)
        self.turn, self.feedback, self.first_success = 0, "", False
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self.turn += 1
        answer = final_answer(reply, untagged=self.style == "full")
        value = None if answer is None else self.read(answer)
        success = value is not None and self.right(value, self.read(self.question.gold))
        self.first_success |= success and self.turn == 1
        if value is not None:
            reward, self.feedback = float(success), RIGHT if success else WRONG
        else:  # terse prompts stay the same: a tiny model learns from the reward alone
            reward, self.feedback = -self.format_penalty, UNREADABLE if self.style == "full" else self.feedback
        info = {"success": success, "valid": value is not None, "metrics": {"first_success": float(self.first_success)}}
        return self.observe(), reward, success, self.turn >= self.max_turns, info

    def observe(self) -> Observation:
        """Return the current observation. Terse: feedback and question, so that a tiny model has both in every turn.
        Full: rules and question, and in later turns the feedback alone."""
        if self.style == "terse":
            return Observation(self.feedback + self.question.text, self.images())
        left = self.max_turns - self.turn
        if self.turn == 0:
            several = f"You have {left} attempts; after a wrong answer you may try again."
            attempts = several if left > 1 else "You have one attempt."
            return Observation(f"{self.rules} {attempts}\n\n{self.question.text}\n\n{self.form}", self.images())
        again = f"Try again; attempts left: {left}.\n{self.form}" if left > 0 and self.feedback != RIGHT else ""
        return Observation((self.feedback + again).strip())

    @classmethod
    @cache
    def generated(cls) -> dict[str, dict[str, list[Problem]]]:
        """Return the problems of a task by split ("train", "warm_start", "held_out") and answer."""
        splits: dict[str, dict[str, list[Problem]]]
        splits = {name: {a: [] for a in cls.generated_answers} for name in ("train", "warm_start", "held_out")}
        for problem in cls.problems():
            tenth = hashlib.sha256(repr(problem.key).encode()).digest()[0] % 10
            if problem.answer in cls.generated_answers:
                splits["train" if tenth > 2 else "warm_start" if tenth else "held_out"][problem.answer].append(problem)
        return splits

    @classmethod
    @cache
    def questions(cls, data: str, split: str) -> list[Question]:
        """Return the checked questions of a split of `data`. Read once for all environments."""
        questions = []
        for row in load_rows(data, split, cls.fields):
            try:
                question = cls.from_row(row)
                if not isinstance(question.text, str) or len(question.text) > MAX_QUESTION:
                    raise ValueError(f"the question must be text of at most {MAX_QUESTION} characters")
                if marker := re.search(r"<\|\w+\|>", question.text):  # would become a special token
                    raise ValueError(f"the question holds {marker[0]}, which belongs to chat templates")
            except ValueError as error:
                raise ValueError(f"{row['where']}: {error}") from error
            questions.append(question)
        return questions

    def random_reply(self, rng: np.random.Generator) -> str:
        """Return one of the generated answers, or of the different answers in the training rows."""
        return f"<answer> {self.answers[rng.integers(len(self.answers))]}</answer>"

    def optimal_reply(self) -> str:
        return f"<answer> {self.question.gold}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Return exact success: 1 - (1 - p)^H for a random policy, each of whose attempts is right with chance p."""
        self.reset(seed=seed)
        gold = self.read(self.question.gold)
        p = sum(self.right(self.read(answer), gold) for answer in self.answers) / len(self.answers)
        return {"random": 1.0 - (1.0 - p) ** self.max_turns, "optimal": 1.0}

    def caption(self) -> str:
        return self.question.caption
