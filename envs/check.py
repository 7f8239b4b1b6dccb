"""Check an environment of your own before it is trained on: play it, and say what is wrong."""

import math
import reprlib
from collections.abc import Generator, Iterator
from numbers import Real
from typing import Any

import numpy as np

from envs.base import Observation, TextEnv

# Columns of metrics.csv for every episode, which no metric of a task may have.
COLUMNS = ("success", "reward", "truncated", "turns", "invalid", "cut")
SHOWN = "an Observation of a text and a tuple of images, uint8 [H, W, 3]"
RESULT = f"{SHOWN}, a finite number, two bools, and a dict with `success`, a bool"


def check_environment(env: TextEnv) -> None:
    """Check the parts of an environment, and play a few episodes, each twice. Raises ValueError
    with one sentence about the first part that is wrong."""
    for fault in faults(env):
        raise ValueError(f"{type(env).__name__}.{fault}")


def faults(env: TextEnv) -> Iterator[str]:
    """Yield a sentence about each part that is wrong."""
    task = type(env)
    if task.step is TextEnv.step:
        yield "step() is missing"
    if not hasattr(env, "observe"):
        yield "observe() is missing"
    if task.reset is TextEnv.reset and not hasattr(env, "start"):
        yield "start() is missing"

    for part in ("actions", "words", "metrics", "settings"):
        words = getattr(env, part)
        if not isinstance(words, tuple) or not all(isinstance(w, str) and w for w in words):
            yield f"{part} is {words!r}, but must be a tuple of strings, none of them empty"
    if task.random_reply is TextEnv.random_reply and not env.actions:
        yield "actions is empty, but the random policy chooses from them"
    for name in env.metrics:
        if name in COLUMNS or hasattr(TextEnv, name):
            yield f"metrics has the name {name!r}, which something else has"
    if np.shape(env.warm_start)[1:] != (2,) or np.min(env.warm_start) < 1:
        yield f"warm_start is {env.warm_start}, but must be pairs of numbers, as ((300, 10),)"

    for seed in range(8):
        first = yield from episode(env, seed)
        again = yield from episode(env, seed)
        if first != again:
            advice = "all that is random must follow from the seed"
            yield f"reset(seed={seed}) began two different episodes, but {advice}"

    env.reset(seed=0)
    try:
        observation, *_ = env.step("a reply without an action")
    except Exception as error:
        yield f"step() raised {error!r:.200}, but no reply may raise an error"
        return
    if content(env.observe()) != content(observation):
        yield "observe() does not return what step() returned before it"


def episode(env: TextEnv, seed: int) -> Generator[str, None, list]:
    """Play an episode of the random policy. Yields faults, and returns what the episode showed."""
    rng = np.random.default_rng(seed)
    started = env.reset(seed=seed)
    if type(started) is not tuple or len(started) != 2 or not content(started[0]):
        yield f"reset() is {reprlib.repr(started)}, but must be {SHOWN}, and a dict"
    shown: list[Any] = [content(started[0])]

    for _ in range(env.max_turns):
        reply = env.random_reply(rng)
        if not isinstance(reply, str):
            yield f"random_reply() is {reply!r}, but must be a string"
        result = env.step(reply)
        if not is_result(result):
            yield f"step() is {reprlib.repr(result)}, but must be {RESULT}"

        observation, *numbers, info = result
        if not info.get("valid", True):
            yield f"step() could not read {reply!r} of random_reply(): its `valid` is False"
        shown.append((content(observation), numbers, info["success"]))
        if any(numbers[1:]):
            return shown
    yield f"step() did not end the episode in turn {env.max_turns}, its last by max_turns"
    return shown


def is_result(result: Any) -> Any:
    """Return whether a value is what `step` must return."""
    match result:
        case (observation, Real() as reward, ended, truncated, {"success": success}):
            kinds = {type(flag) for flag in (ended, truncated, success)}
            return kinds <= {bool, np.bool_} and content(observation) and math.isfinite(reward)
    return False


def content(observation: Any) -> tuple:
    """Return text and images of an observation as values that compare, or () if it is none."""
    match observation:
        case Observation(str() as text, tuple() as images):
            if all(image.dtype == np.uint8 and image.shape[2:] == (3,) for image in images):
                return text, [image.tobytes() for image in images]
    return ()
