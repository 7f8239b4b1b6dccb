"""What an environment is here: a `gymnasium.Env` whose action is the text of the model's reply.

Paper: section 3.1 (the turn MDP) and appendix B. A turn is one assistant reply; the environment answers with
an `Observation` (text, and pictures for the VLM tasks) and a reward. An episode ends after `max_turns` turns.

To add your own: subclass `TextEnv` in a file of its own, give it `reset`, `step` and `random_reply`, and list
it in `envs/__init__.py`. `envs/frozenlake.py` is the worked example.
"""

import re
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

FORMAT_PENALTY = 0.15  # what an unparsable reply costs beside its turn (the authors' configuration)


class Observation(NamedTuple):
    """One user turn: pictures first, then text."""

    text: str
    images: tuple[np.ndarray, ...] = ()  # uint8 [H, W, 3]


class FreeText(spaces.Text):
    """Any string of at most `max_length` characters. (Gymnasium's own `Text` fixes an alphabet.)"""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class TextEnv(gymnasium.Env):
    """The base of every environment. `info["success"]` is a bool in every step's info."""

    max_turns: ClassVar[int] = 10  # H of section 3.1
    action_space = FreeText(min_length=0, max_length=100_000)

    def random_reply(self, rng: np.random.Generator) -> str:
        """A well-formed reply of a player that chooses uniformly among the actions."""
        raise NotImplementedError

    def observe(self) -> Observation:
        """What a player sees now."""
        raise NotImplementedError

    def caption(self) -> str:
        """What the current observation shows, in other words (used by the warm start only)."""
        raise NotImplementedError


def parse_answer(reply: str) -> str | None:
    """The stripped text between the only pair of `<answer>` tags, or None where there is not exactly one."""
    answers = re.findall(r"<answer>(.*?)</answer>", reply, re.DOTALL)
    if len(answers) != 1 or reply.count("<answer>") != 1 or reply.count("</answer>") != 1:
        return None
    return answers[0].strip()
