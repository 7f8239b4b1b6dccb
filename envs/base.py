"""Define an environment: a `gymnasium.Env` whose action is the text of the model's reply.

Paper: section 3.1 (the turn MDP) and appendix D. A turn is one reply; the environment answers with an `Observation`
and a reward. An episode ends after `max_turns` turns at the latest. docs/own_environment.md explains how to add one.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import gymnasium
import numpy as np
from gymnasium import spaces

# A seed determines the map, question or room. Training uses seeds below EVAL_SEEDS.
EVAL_SEEDS, WARM_START_SEEDS = 1_000_000_000, 2_000_000_000


def held_out(seed: int) -> bool:
    """Return whether a seed belongs to evaluation."""
    return EVAL_SEEDS <= seed < WARM_START_SEEDS


def tenth(key: object) -> int:
    """Return to which of ten parts, 0 to 9, the instance with this key belongs, by a hash. Part 0 is held out."""
    return hashlib.sha256(repr(key).encode()).digest()[0] % 10


def fits(key: object, seed: int) -> bool:
    """Return whether a seed may have the instance with this key: evaluation has one part of ten, training the rest."""
    return (tenth(key) == 0) == held_out(seed)


class Observation(NamedTuple):
    """Hold one user turn: images (uint8 [H, W, 3]) first, then text."""

    text: str
    images: tuple[np.ndarray, ...] = ()


class Instances(spaces.Space):
    """The space of all instances of a type. Gymnasium's own `Text` fixes an alphabet, its `Box` the size of images."""

    def __init__(self, kind: type):
        super().__init__()
        self.kind = kind

    def contains(self, x: Any) -> bool:
        return isinstance(x, self.kind)


class TextEnv(gymnasium.Env):
    """The base of every environment. `step` never raises for a reply, whatever it holds.

    Every step's info has `success` (bool), `valid` (bool: the reply could be read) and, if the class lists `metrics`,
    a dict `metrics` of those numbers, which are averaged over episodes and logged.
    """

    # every task defines these, `reset` and `step`
    observe: Callable[[], Observation]

    max_turns: int = 10  # H of section 3.1
    metrics: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[str, ...]] = ()  # names of settings of train.py that it takes
    actions: tuple[str, ...] = ()  # of the random policy; tasks without override `random_reply`
    # for the tiny models: layers, words of one token each, and the warm start's (batches, turns of their episodes)
    layers: int = 2
    words: ClassVar[tuple[str, ...]] = ()
    warm_start: tuple[tuple[int, int], ...] = ((300, 10),)
    data, rows = (
        "",
        dict[str, list](),
    )  # of tasks with questions: where they come from (envs/data.py), rows by split
    action_space, observation_space = Instances(str), Instances(Observation)

    def __init__(self, style: str = "terse", format_penalty: float = 0.15, max_turns: int = 0):
        """`style` "full" writes out rules and reply format for a pretrained model, "terse" shows a tiny model the state
        alone and small images. `max_turns` 0 keeps the task's own. Raises ValueError for another style."""
        if style not in ("full", "terse"):
            raise ValueError(f"style must be full or terse, got {style}")
        self.style, self.format_penalty = style, format_penalty
        self.cell_size = 14 if style == "terse" else 56  # pixels of a cell in an image
        self.max_turns = max_turns or self.max_turns

    def episode_seed(self, seed: int | None) -> int:
        """Return the seed given to `reset`, or a new training seed if it is None."""
        return int(self.np_random.integers(EVAL_SEEDS)) if seed is None else seed

    @classmethod
    def step_many(cls, envs: list[Self], replies: list[str]) -> Iterable[tuple]:
        """Step each environment with its reply. Tasks that query a service override this to send one request."""
        return (env.step(reply) for env, reply in zip(envs, replies, strict=True))

    def budget(self, one: str = "action", several: str = "actions") -> str:
        """Return how many replies an episode has, in words."""
        return f"one {one}" if self.max_turns == 1 else f"{self.max_turns} {several}"

    def caption(self) -> str:
        """Return what the observation shows, in words of the tiny model. Only its warm start needs this."""
        return ""

    def random_reply(self, rng: np.random.Generator) -> str:
        """Return the reply of the random policy: one of `actions`, drawn uniformly."""
        return f"<answer>{self.actions[rng.integers(len(self.actions))]}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Return the success of the `random` policy on this seed, and of the `optimal` one if there is `optimal_reply`.
        This default plays one episode of each; tasks that know the exact probability return that."""
        rng = np.random.default_rng((seed, 1))  # independent of the stream that draws the task
        policies = {
            "random": lambda: self.random_reply(rng),
            "optimal": getattr(self, "optimal_reply", None),
        }
        return {
            name: float(play_out(self, seed, reply)[2]["success"])
            for name, reply in policies.items()
            if reply
        }

    def data_summary(self) -> str:
        """Return a sentence that counts the rows of `data`, or "" without."""
        if not self.rows:
            return ""
        train, held_out, left_out = (
            len(self.rows.get(s, ())) for s in ("train", "held_out", "left_out")
        )
        reason = f", {left_out} left out: too long for --max_tokens, or with an image too narrow"
        return f"{self.data}: {train} rows for training, {held_out} held out{reason if left_out else ''}"


def check_environment(env: TextEnv) -> None:
    """Play a few episodes, each twice. Raises ValueError with one sentence if a task breaks a promise of `TextEnv`."""
    name = type(env).__name__

    def require(condition: bool, sentence: str) -> None:
        if not condition:
            raise ValueError(f"{name}.{sentence}")

    def content(observation: Any, method: str) -> tuple[str, list[bytes]]:
        fits = isinstance(observation, Observation) and isinstance(observation.text, str)
        require(
            fits, f"{method}() showed {observation!r}, but must show an Observation with a text"
        )
        forms = {(np.asarray(image).dtype, np.shape(image)[2:]) for image in observation.images}
        require(
            forms <= {(np.dtype(np.uint8), (3,))},
            f"{method}() showed images that are not uint8 [H, W, 3]",
        )
        return observation.text, [image.tobytes() for image in observation.images]

    def episode(seed: int) -> list[tuple]:
        rng, opened = np.random.default_rng(seed), env.reset(seed=seed)
        pair = type(opened) is tuple and len(opened) == 2
        require(pair, f"reset() returned {opened!r}, but must return an observation and a dict")
        seen: list[tuple] = [content(opened[0], "reset")]

        for turn in range(env.max_turns):
            ended = env.step(env.random_reply(rng) if offline else "")
            whole = type(ended) is tuple and len(ended) == 5
            require(
                whole,
                f"step() returned {ended!r}, but must return observation, reward, two bools and a dict",
            )
            observation, *outcome, info = ended
            require("success" in info, f"step() returned the dict {info!r}, which lacks `success`")
            seen.append((content(observation, "step"), outcome, info["success"]))
            if any(outcome[1:]) or turn == 100:
                return seen
        raise ValueError(
            f"{name}.step() did not end the episode in turn {env.max_turns}, its last by max_turns"
        )

    for method in ("reset", "step", "observe"):
        defined = getattr(type(env), method, None) is not getattr(gymnasium.Env, method, None)
        require(defined, f"{method}() is missing")
    for field in ("actions", "words"):
        require(
            isinstance(getattr(env, field), tuple),
            f"{field} is {getattr(env, field)!r}, but must be a tuple",
        )
    own_reply = type(env).random_reply is not TextEnv.random_reply
    require(
        own_reply or len(env.actions) > 0,
        "actions is empty, but the random policy chooses from them",
    )

    offline = "step_many" not in vars(type(env))  # else random replies may query a service
    for seed in range(8):
        advice = "all that is random must follow from the seed: begin with super().reset(seed=seed)"
        require(
            episode(seed) == episode(seed),
            f"reset(seed={seed}) began two different episodes, but {advice}",
        )


def play_out(env: TextEnv, seed: int, reply: Callable[[], str]) -> tuple[float, int, dict]:
    """Play one episode on this seed with replies from `reply`. Returns its return, its turns, and the last info."""
    env.reset(seed=seed)
    total, turns, ended = 0.0, 0, False
    while not ended:
        _, reward, terminated, truncated, info = env.step(reply())
        total, turns, ended = total + reward, turns + 1, terminated or truncated
    return total, turns, info


def split_tags(text: str, tag: str) -> list[str]:
    """Split at `<tag>` and `</tag>` in any case: [text, "" or "/", text, ...]. Linear in the length of the text."""
    return re.split(f"<(/?){tag}>", text, flags=re.ASCII | re.IGNORECASE)


def outside_think(reply: str) -> str:
    """Return the reply without its `<think>` block, or "" if the block is not closed or there are several."""
    parts = split_tags(reply, "think")
    if len(parts) == 1:
        return reply
    *opening, closing = parts[1::2]
    return parts[0] + parts[-1] if opening and closing == "/" and "/" not in opening else ""


def parse_answer(reply: str) -> str | None:
    """Return the stripped text of the only <answer> ... </answer> outside a `<think>` block, or None if there is not
    exactly one. Tags are read in any case, and text around them is ignored."""
    parts = split_tags(outside_think(reply), "answer")
    return parts[2].strip() if parts[1::2] == ["", "/"] else None


def parse_action(reply: str, actions: Sequence[str]) -> int | None:
    """Return the index of the action between `<answer>` tags, or None if it is none of them. Case is
    ignored. So are marks around the action and a verb before it, unless an action has them: **Right**, "move right"."""
    marks, answer = " \n.,;:!*_`'\"()[]", (parse_answer(reply) or "").lower()
    bare = re.sub(r"^(?:move|go|push)\s+", "", answer.strip(marks)).strip(marks)
    known = [action.lower() for action in actions]
    return next((known.index(text) for text in (answer, bare) if text in known), None)
