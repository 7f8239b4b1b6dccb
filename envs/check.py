"""Check an environment of your own before it is trained on: play it, and say what is wrong."""

import math
from typing import Any

import numpy as np

from envs.base import Observation, TextEnv, UserError, play_out

# Columns of metrics.csv for every episode, which no metric of a task may have.
COLUMNS = "success reward truncated turns invalid cut".split()


def check_environment(env: TextEnv) -> None:
    """Check the parts of an environment, and play a few episodes, each twice. Raises UserError
    with one sentence about the first part that is wrong."""
    for part in ("actions", "words", "metrics", "settings"):
        value = getattr(env, part)
        require(env, isinstance(value, tuple), f"{part} is {value!r}, but must be a tuple")
    chosen = type(env).random_reply is not TextEnv.random_reply
    require(env, env.actions or chosen, "actions is empty, but the random policy chooses from them")
    for name in env.metrics:
        free = name not in COLUMNS and not hasattr(TextEnv(), name)
        require(env, free, f"metrics has the name {name!r}, which something else has")

    for seed in range(8):
        same = play(env, seed) == play(env, seed)
        require(env, same, f"reset(seed={seed}) began two different episodes: draw from the seed")
        if hasattr(env, "optimal_reply"):
            play(env, seed, "optimal_reply")

    env.reset(seed=0)
    env.step("a reply without an action")  # no reply may raise an error


def require(env: TextEnv, holds: Any, sentence: str) -> None:
    """Raise UserError with a sentence about the environment unless something holds."""
    if not holds:
        raise UserError(f"{type(env).__name__}.{sentence}")


def play(env: TextEnv, seed: int, policy: str = "random_reply") -> list:
    """Play an episode with the replies of a method, and return all that it showed. Raises
    UserError if a part of it is not what it must be."""
    arguments = [np.random.default_rng(seed)] if policy == "random_reply" else []
    shown: list[Any] = []

    def reply() -> str:
        require(env, len(shown) < env.max_turns, "step() did not end the episode in its max_turns")
        shown.append(content(env))
        return getattr(env, policy)(*arguments)

    def unread(text: str) -> None:
        require(env, False, f"step() could not read {text!r:.200}, which {policy}() returned")

    total, info = play_out(env, seed, reply, unread)
    require(env, math.isfinite(total), f"step() gave rewards with the sum {total}")
    require(env, "success" in info, f"step() returned the info {info}, but it must have `success`")
    return [*shown, content(env), total, info["success"]]


def content(env: TextEnv) -> Any:
    """Return text and images of the current observation as values that compare."""
    observation = env.observe()
    match observation:
        case Observation(str() as text, tuple() as images):
            if all(image.dtype == np.uint8 and image.shape[2:] == (3,) for image in images):
                return text, [image.tobytes() for image in images]
    shown = "an Observation of a text and a tuple of images, uint8 [H, W, 3]"
    return require(env, False, f"observe() is {observation!r:.200}, but must be {shown}")
