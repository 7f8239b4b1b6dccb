"""A question and up to three attempts to answer it: what GSM8K, AIME and GeoQA share.

Paper: appendix D ("if the first answer is incorrect, it receives feedback and may try again"); Table env_details
(3 actions, binary reward). A right answer earns 1 whenever it comes, and ends the episode; a wrong one earns 0; a
reply without a readable answer costs its attempt and the format penalty. `success` is any attempt right, the metric
`first_success` the first one.

Questions come from `data` (envs/data.py), or, where it is empty, are generated from the seed, small enough for a
tiny model. Held-out seeds take theirs from the validation split.
"""

import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from envs.answers import final_answer
from envs.base import FORMAT_PENALTY, Observation, TextEnv, held_out, observations
from envs.data import load_rows, row_for

MAX_QUESTION = 10_000  # characters
FEEDBACK = WRONG, RIGHT = "Wrong. ", "Right. "
UNREADABLE = "No answer could be read. "


class Question(NamedTuple):
    """`gold` is the right answer in the form that replies have; `picture` is whatever the task draws it from."""

    text: str
    gold: str
    caption: str = ""
    picture: Any = None


class Attempts(TextEnv):
    """A task gives `fields`, `from_row`, `generate`, `read` and `right`, and the texts below."""

    max_turns = 3
    metrics = ("first_success",)
    rules = ""  # how the first turn of a full prompt opens; {turns} is the number of attempts
    form = ""  # what an answer looks like
    generated_answers: tuple[str, ...] = ()  # among which the random player chooses
    fields: tuple[str, ...] = ()  # of a row of data

    def __init__(
        self, style: str = "terse", format_penalty: float = FORMAT_PENALTY, max_turns: int = 0, data: str = ""
    ):
        """`data` as in envs/data.py. Raises ValueError where a row of it is no question of this task."""
        super().__init__(style, format_penalty, max_turns)
        self.data = data
        self.answers = self._questions("train")[1] if data else self.generated_answers
        if data:
            self._questions("validation")
        self.observation_space = observations(2 * MAX_QUESTION)

    def _questions(self, split: str) -> tuple[list[Question], tuple[str, ...]]:
        task: Any = type(self)
        return _questions(task, self.data, split)

    # -- what a task is ------------------------------------------------------------------------------------------

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        """The question in a row of data. Raises ValueError, saying what is wrong with which field."""
        raise NotImplementedError

    def generate(self, rng: np.random.Generator) -> Question:
        """A small question, its answer among `generated_answers`."""
        raise NotImplementedError

    @staticmethod
    def read(answer: str, /) -> Any:
        """The value of an answer, or None where it is not one of this task's."""
        raise NotImplementedError

    @staticmethod
    def right(value: Any, gold: Any) -> bool:
        """Whether a value is the gold one."""
        return value == gold

    def pictures(self) -> tuple[np.ndarray, ...]:
        """The pictures of the current question, uint8 [H, W, 3]."""
        return ()

    # -- an episode ----------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Observation, dict]:
        """One seed is one question; successive seeds go through the shuffled rows of `data`."""
        super().reset(seed=seed)
        seed = self.episode_seed(seed)
        if self.data:
            split = "validation" if held_out(seed) else "train"
            self.question = row_for(self._questions(split)[0], seed)
        else:
            self.question = self.generate(np.random.default_rng(seed))
        self.turn, self.feedback, self.first_success = 0, "", False
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self.turn += 1
        answer = final_answer(reply, last_number=self.style == "full")
        value = None if answer is None else self.read(answer)
        success = value is not None and self.right(value, self.read(self.question.gold))
        self.first_success |= success and self.turn == 1
        if value is not None:
            reward, self.feedback = float(success), RIGHT if success else WRONG
        else:  # in terse prompts nothing changes: a tiny model learns from the reward alone
            reward, self.feedback = -self.format_penalty, UNREADABLE if self.style == "full" else self.feedback
        info = {"success": success, "valid": value is not None, "metrics": {"first_success": float(self.first_success)}}
        return self.observe(), reward, success, self.turn >= self.max_turns, info

    def observe(self) -> Observation:
        """What a player sees now. Terse: the question every time, after whether the last answer was right, so that
        a tiny model finds everything at hand. Full: once, then only the feedback."""
        if self.style == "terse":
            return Observation(self.feedback + self.question.text, self.pictures())
        if self.turn == 0:
            rules = self.rules.format(turns=self.max_turns)
            return Observation(f"{rules}\n\n{self.question.text}\n\n{self.form}", self.pictures())
        left = self.max_turns - self.turn
        again = f"Try again; attempts left: {left}.\n{self.form}" if left > 0 and self.feedback != RIGHT else ""
        return Observation((self.feedback + again).strip())

    # -- players -------------------------------------------------------------------------------------------------

    def random_reply(self, rng: np.random.Generator) -> str:
        """One of the generated answers, or of the different answers in the training split."""
        return f"<answer> {self.answers[rng.integers(len(self.answers))]}</answer>"

    def optimal_reply(self) -> str:
        return f"<answer> {self.question.gold}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Exact: 1 - (1 - p)^H for a random player whose every attempt is right with probability p."""
        self.reset(seed=seed)
        gold = self.read(self.question.gold)
        p = sum(self.right(self.read(answer), gold) for answer in self.answers) / len(self.answers)
        return {"random": 1.0 - (1.0 - p) ** self.max_turns, "optimal": 1.0}

    def caption(self) -> str:
        return self.question.caption


@cache
def _questions(task: type[Attempts], data: str, split: str) -> tuple[list[Question], tuple[str, ...]]:
    """The checked questions of a split, and their different answers. Read once for all environments."""
    questions = []
    for row in load_rows(data, split, task.fields):
        try:
            question = task.from_row(row)
            if not isinstance(question.text, str) or len(question.text) > MAX_QUESTION:
                raise ValueError(f"the question must be text of at most {MAX_QUESTION} characters")
            if marker := re.search(r"<\|\w+\|>", question.text):  # would become a special token of the conversation
                raise ValueError(f"the question holds {marker[0]}, which belongs to chat templates")
        except ValueError as error:
            raise ValueError(f"{row['where']}: {error}") from error
        questions.append(question)
    return questions, tuple(sorted({question.gold for question in questions}))
