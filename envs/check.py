"""Check an environment of your own before it is trained on: play it, and say what is wrong."""

import math
from numbers import Real
from typing import Any

import numpy as np

from envs.base import Observation, TextEnv

# Columns of metrics.csv for every episode, which no metric of a task may have.
COLUMNS = ("success", "reward", "truncated", "turns", "invalid", "cut")
SHOWN = "an Observation of a text and a tuple of images, uint8 [H, W, 3]"
RESULT = f"{SHOWN}, a finite number, two bools, and a dict with `success`"


def check_environment(env: TextEnv) -> None:
    """Check the parts of an environment, and play a few episodes, each twice. Raises ValueError
    with one sentence about the first part that is wrong."""
    for part in ("actions", "words", "metrics", "settings"):
        value = getattr(env, part)
        require(env, isinstance(value, tuple), f"{part} is {value!r}, but must be a tuple")
    chosen = type(env).random_reply is not TextEnv.random_reply
    require(env, env.actions or chosen, "actions is empty, but the random policy chooses from them")
    for name in env.metrics:
        free = name not in COLUMNS and not hasattr(TextEnv, name)
        require(env, free, f"metrics has the name {name!r}, which something else has")

    for seed in range(8):
        same = play(env, seed) == play(env, seed)
        advice = "all that is random must follow from the seed"
        require(env, same, f"reset(seed={seed}) began two different episodes, but {advice}")

    env.reset(seed=0)
    try:
        env.step("a reply without an action")
    except Exception as error:
        require(env, False, f"step() raised {error!r:.200}, but no reply may raise an error")


def require(env: TextEnv, holds: Any, sentence: str) -> None:
    """Raise ValueError with a sentence about the environment unless something holds."""
    if not holds:
        raise ValueError(f"{type(env).__name__}.{sentence}")


def play(env: TextEnv, seed: int) -> list:
    """Play an episode of the random policy, and return all that it showed. Raises ValueError if a
    result is not what it must be."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    right = content(observation)
    require(env, right, f"observe() is {observation!r:.200}, but must be {SHOWN}")
    shown: list[Any] = [right]

    for _ in range(env.max_turns):
        reply = env.random_reply(rng)
        result = env.step(reply)
        require(env, is_result(result), f"step() is {result!r:.200}, but must be {RESULT}")

        observation, *numbers, info = result
        unread = f"step() could not read {reply!r} of random_reply(): its `valid` is False"
        require(env, info.get("valid", True), unread)
        shown.append((content(observation), numbers, info["success"]))
        if any(numbers[1:]):
            return shown
    require(env, False, f"step() did not end the episode in turn {env.max_turns}, its max_turns")
    return shown


def is_result(result: Any) -> Any:
    """Return whether a value is what `step` must return."""
    match result:
        case (observation, Real() as reward, _, _, {"success": _}):
            return content(observation) and math.isfinite(reward)
    return False


def content(observation: Any) -> tuple:
    """Return text and images of an observation as values that compare, or () if it is none."""
    match observation:
        case Observation(str() as text, tuple() as images):
            if all(image.dtype == np.uint8 and image.shape[2:] == (3,) for image in images):
                return text, [image.tobytes() for image in images]
    return ()
