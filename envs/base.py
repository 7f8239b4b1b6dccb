"""What an environment is here: a `gymnasium.Env` whose action is the text of the model's reply.

Paper: section 3.1 (the turn MDP) and appendix D. A turn is one assistant reply; the environment answers with
an `Observation` (text, and pictures for the VLM tasks) and a reward. An episode ends after `max_turns` turns.

To add your own: subclass `TextEnv` in a file of its own, give it `reset`, `step` and `observe`, for a tiny model also
`caption` and `random_reply`, and list it in `envs/__init__.py`. docs/own_environment.md tells more, and
`envs/frozenlake.py` is the worked example.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, Self

import gymnasium
import numpy as np
from gymnasium import spaces

FORMAT_PENALTY = 0.15  # what an unparsable reply costs beside its turn (the authors' configuration)

# Every seed is one map, one question, one puzzle. Held-out seeds lie where training never gets.
EVAL_SEEDS, WARM_START_SEEDS = 1_000_000_000, 2_000_000_000


def held_out(seed: int) -> bool:
    """Whether this seed belongs to evaluation: tasks with data take it from the validation split then."""
    return EVAL_SEEDS <= seed < WARM_START_SEEDS


class Observation(NamedTuple):
    """One user turn: pictures first, then text."""

    text: str
    images: tuple[np.ndarray, ...] = ()  # uint8 [H, W, 3]


class FreeText(spaces.Text):
    """Any string of at most `max_length` characters. (Gymnasium's own `Text` fixes an alphabet.)"""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


def observations(longest: int, height: int = 1, width: int = 1) -> spaces.Tuple:
    """The space of observations with at most `longest` characters and any number of pictures [height, width, 3];
    1 x 1 where a task shows none."""
    pictures = spaces.Sequence(spaces.Box(0, 255, (height, width, 3), np.uint8))
    return spaces.Tuple((FreeText(longest, min_length=0), pictures))


class TextEnv(gymnasium.Env):
    """The base of every environment.

    `info["success"]` is a bool in every step's info, `info["valid"]` says whether the reply could be read, and
    `info["metrics"]` holds a number for each of the class's `metrics`, which are averaged and logged.
    """

    max_turns: int = 10  # H of section 3.1
    metrics: ClassVar[tuple[str, ...]] = ()
    action_space = FreeText(min_length=0, max_length=100_000)
    # for the tiny models: what their tokenizer holds as one token each (all that replies and captions consist
    # of), and how many batches of random games of how many turns warm them up
    words: ClassVar[tuple[str, ...]] = ()
    warm_start: tuple[tuple[int, int], ...] = ((300, 10),)

    def __init__(self, style: str = "terse", format_penalty: float = FORMAT_PENALTY, max_turns: int = 0):
        """`style` "full" writes rules and form out for a pretrained model, "terse" the bare state for a tiny one.
        `max_turns` 0 leaves the task's own. Raises ValueError for another style."""
        if style not in ("full", "terse"):
            raise ValueError(f"style must be full or terse, got {style}")
        self.style, self.format_penalty = style, format_penalty
        self.max_turns = max_turns or self.max_turns

    def episode_seed(self, seed: int | None) -> int:
        """The seed that `reset` got; where it got none, a new one, of training."""
        return int(self.np_random.integers(EVAL_SEEDS)) if seed is None else seed

    @classmethod
    def step_many(cls, envs: list[Self], replies: list[str]) -> Iterable[tuple]:
        """One turn in each environment, one after the other. Tasks that ask a service override this to ask it once
        for all."""
        return (env.step(reply) for env, reply in zip(envs, replies, strict=True))

    def random_reply(self, rng: np.random.Generator) -> str:
        """A well-formed reply of a player that chooses uniformly among the actions."""
        raise NotImplementedError

    def observe(self) -> Observation:
        """What a player sees now."""
        raise NotImplementedError

    def caption(self) -> str:
        """What the current observation shows, in other words (used by the warm start only)."""
        raise NotImplementedError

    def baselines(self, seed: int) -> dict[str, float]:
        """Success of a `random` player on this seed and, where a task can tell, of an `optimal` one. Here: one
        random game. Tasks that know the exact probability say that instead."""
        rng = np.random.default_rng((seed, 1))  # a stream of its own: the task's is the seed's
        return {"random": float(play_out(self, seed, lambda: self.random_reply(rng))[2]["success"])}

    def has_exact_baselines(self) -> bool:
        """Whether `baselines` are probabilities, not games that were played."""
        return type(self).baselines is not TextEnv.baselines


def play_out(env: TextEnv, seed: int, reply: Callable[[], str]) -> tuple[float, int, dict]:
    """One game on this seed, with replies from `reply`: its return, its turns, and the info of the last."""
    env.reset(seed=seed)
    total, turns, ended = 0.0, 0, False
    while not ended:
        _, reward, terminated, truncated, info = env.step(reply())
        total, turns, ended = total + reward, turns + 1, terminated or truncated
    return total, turns, info


def outside_think(reply: str) -> str | None:
    """The reply without its <think> block; None where the block is not closed or there are several."""
    if "<think>" not in reply and "</think>" not in reply:
        return reply
    before, _, thought = reply.partition("<think>")
    _, closed, after = thought.partition("</think>")
    spoken = before + after
    return spoken if closed and "<think>" not in spoken and "</think>" not in spoken else None


def parse_tag(reply: str, tag: str) -> str | None:
    """The stripped text between the only `<tag>` and `</tag>` outside an optional `<think>` block, or None where
    there is not exactly one such pair. Linear in the length of the reply."""
    spoken = outside_think(reply)
    start, end = f"<{tag}>", f"</{tag}>"
    if spoken is None or spoken.count(start) != 1 or spoken.count(end) != 1:
        return None
    inner, closed, _ = spoken.partition(start)[2].partition(end)
    return inner.strip() if closed else None


def parse_answer(reply: str) -> str | None:
    """`parse_tag` for `<answer>`."""
    return parse_tag(reply, "answer")
