"""Define an environment: a `gymnasium.Env` whose action is the text of the model's reply.

Paper: section 3.1 (the turn MDP) and appendix D. In each turn the model gives one reply, and the
environment answers with an `Observation` and a reward. An episode ends after `max_turns` turns at
the latest. docs/own_environment.md explains how to add an environment.
"""

import hashlib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import gymnasium
import numpy as np

# A seed determines the map, question or room. Training uses the seeds below EVAL_SEEDS, evaluation
# those from EVAL_SEEDS on, and the warm start of tiny models those from WARM_START_SEEDS on.
EVAL_SEEDS = 1_000_000_000
WARM_START_SEEDS = 2_000_000_000

MARKS = " \n.,;:!*_`'\"()[]"  # ignored around an action


def held_out(seed: int) -> bool:
    """Return whether a seed belongs to evaluation."""
    return EVAL_SEEDS <= seed < WARM_START_SEEDS


def part_of_ten(key: object) -> int:
    """Return which tenth of the instances, 0 to 9, a key falls in, by a hash. 0 is held out."""
    return hashlib.sha256(repr(key).encode()).digest()[0] % 10


def same_split(key: object, seed: int) -> bool:
    """Return whether the instance with this key and the seed are both held out, or both not."""
    return (part_of_ten(key) == 0) == held_out(seed)


class Observation(NamedTuple):
    """Hold one user turn: images (uint8 [H, W, 3]) first, then text."""

    text: str
    images: tuple[np.ndarray, ...] = ()


Step = tuple[Observation, float, bool, bool, dict]  # what Gymnasium's `step` returns


class AnySpace(gymnasium.Space):
    """The space of all replies and observations. A sample is a reply of the random policy.

    Gymnasium's own `Text` fixes an alphabet, and its `Box` the size of images.
    """

    def __init__(self, random_reply: Callable[[np.random.Generator], str]):
        super().__init__()
        self.random_reply = random_reply

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnySpace)  # so vectors of environments can be made

    def __deepcopy__(self, memo: dict) -> "AnySpace":
        return AnySpace(self.random_reply)  # the environment is not copied

    def contains(self, x: Any) -> bool:
        return isinstance(x, str | Observation)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return self.random_reply(self.np_random)


class TextEnv(gymnasium.Env):
    """The base of every environment. `step` never raises an error for a reply, whatever it holds.

    The info of every step has `success` (bool) and `valid` (bool: the reply could be read), and in
    a dict `metrics` the numbers of the episode so far that the class lists. Those of the last turn
    are averaged over episodes and logged.
    """

    # Every task defines `step`, `observe`, and `start` or its own `reset`.
    start: Callable[[int], None]  # set up the episode of a seed
    observe: Callable[[], Observation]

    max_turns = 10  # H of section 3.1
    metrics: tuple[str, ...] = ()  # names of attributes, which are 0 when an episode begins
    settings: tuple[str, ...] = ()  # names of settings of train.py that the task takes
    actions: tuple[str, ...] = ()  # of the random policy; or the task overrides `random_reply`

    # Tasks with questions replace these (envs/data.py).
    data = ""  # where the rows come from
    rows: Mapping[str, list] = {}  # by split

    # These are for the tiny models alone.
    layers = 2
    words: tuple[str, ...] = ()  # each is one token
    warm_start: tuple[tuple[int, int], ...] = ((300, 10),)  # batches, turns of their episodes

    def __init__(self, style: str = "terse", format_penalty: float = 0.15, max_turns: int = 0):
        """Store the settings that all tasks share. Raises ValueError for an unknown style.

        The style "full" writes out rules and reply format for a pretrained model. "terse" shows a
        tiny model the state alone, and small images. If `max_turns` is 0, the task's own holds.
        """
        if style not in ("full", "terse"):
            raise ValueError(f"style must be full or terse, got {style}")
        self.action_space = self.observation_space = AnySpace(self.random_reply)
        self.style = style
        self.format_penalty = format_penalty
        self.max_turns = max_turns or self.max_turns
        self.cell_size = 14 if style == "terse" else 56  # pixels of a cell in an image

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Begin the episode of a seed. Returns the first observation and a dict.

        A task may define `reset` itself instead of `start`, and call this one for the seed.
        """
        super().reset(seed=seed)
        self.turn = 0
        self.feedback = ""
        for name in self.metrics:
            setattr(self, name, 0.0)
        if not hasattr(self, "start"):
            return ()  # the task's own `reset` returns the observation
        if seed is None:
            seed = int(self.np_random.integers(EVAL_SEEDS))
        self.start(seed)
        return self.observe(), {"success": False}

    def end_turn(self, reward: float, success: bool, ended: bool, valid: bool) -> Step:
        """Count the turn, and return what `step` returns. The last turn truncates the episode."""
        self.turn += 1
        metrics = {name: getattr(self, name) for name in self.metrics}
        info = {"success": success, "valid": valid, "metrics": metrics}
        return self.observe(), reward, ended, self.turn >= self.max_turns, info

    @classmethod
    def step_many(cls, envs: list[Self], replies: list[str]) -> Iterable[Step]:
        """Step each environment with its reply, and return the results of `step`.

        Tasks that query a service override this to send one request.
        """
        return map(cls.step, envs, replies)

    def budget(self, one: str = "action", several: str = "actions") -> str:
        """Return how many replies an episode has, in words."""
        return f"one {one}" if self.max_turns == 1 else f"{self.max_turns} {several}"

    def caption(self) -> str:
        """Return a caption of the observation in `words`. Only the warm start needs it."""
        return ""

    def random_reply(self, rng: np.random.Generator) -> str:
        """Return the reply of the random policy: one of `actions`, drawn uniformly."""
        return f"<answer>{self.actions[rng.integers(len(self.actions))]}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Return the success on this seed of the `random` policy, and of the `optimal` one if the
        task defines `optimal_reply`.

        Each policy plays one episode. Tasks that know the exact probability return it instead.
        """
        rng = np.random.default_rng((seed, 1))  # independent of the stream that draws the task
        replies = {"random": partial(self.random_reply, rng)}
        if hasattr(self, "optimal_reply"):
            replies["optimal"] = self.optimal_reply
        return {
            policy: play_out(self, seed, reply)[2]["success"] for policy, reply in replies.items()
        }

    def data_summary(self) -> str:
        """Return a sentence with the numbers of rows of `data`, or "" if the task has no data."""
        if not self.rows:
            return ""
        summary = (
            f"{self.data}: {len(self.rows['train'])} rows for training, "
            f"{len(self.rows['held_out'])} held out"
        )
        left_out = self.rows.get("left_out")
        if left_out:
            reason = "too long for --max_tokens, or with an image too narrow"
            summary += f", {len(left_out)} left out: {reason}"
        return summary


def play_out(env: TextEnv, seed: int, reply: Callable[[], str]) -> tuple[float, int, dict]:
    """Play the episode of this seed with replies from `reply`. Returns the episode's return, the
    number of its turns, and the last info."""
    env.reset(seed=seed)
    total, turns = 0.0, 0
    while True:
        _, reward, terminated, truncated, info = env.step(reply())
        total += reward
        turns += 1
        if terminated or truncated:
            return total, turns, info


# What the fields of a task must be, and what its methods must return. `keeps` checks it.
NUMBER = "a whole number above 0"
WORDS = "a tuple of strings, none of them empty"
SHOWN = "an Observation of a text and of images that are uint8 [H, W, 3]"
COLUMNS = ("success", "reward", "truncated", "turns", "invalid", "cut")  # of every episode
PROMISES = {
    "max_turns": NUMBER,
    "layers": NUMBER,
    "actions": WORDS,
    "words": WORDS,
    "metrics": WORDS,
    "settings": WORDS,
    "warm_start": "a tuple of pairs of whole numbers above 0",
    "random_reply()": "a string",
    "optimal_reply()": "a string",
    "baselines()": "a dict with the success of the `random` policy",
    "reset()": f"{SHOWN}, as observe() returns it, and a dict",
    "step()": f"{SHOWN}, a finite number below 1e30, two bools, and a dict with `success`, a bool",
}


def keeps(part: str, value: Any) -> bool:
    """Return whether a field or a result of a task is as PROMISES says. Results are checked part by
    part."""
    match part, value:
        case "max_turns" | "layers", int():
            return value > 0
        case "actions" | "words" | "metrics" | "settings", tuple():
            return all(isinstance(word, str) and word for word in value)
        case "warm_start", tuple():
            return all(keeps("pair", pair) for pair in value)
        case "pair", [int(batches), int(turns)]:
            return batches > 0 and turns > 0
        case "random_reply()" | "optimal_reply()", str():
            return True
        case "baselines()", {"random": _}:
            return True
        case "reset()", [observation, dict()]:
            return keeps("observation", observation)
        case "step()", [
            observation,
            reward,
            int() | np.bool_(),
            int() | np.bool_(),
            {"success": int() | np.bool_()},
        ]:
            return keeps("observation", observation) and keeps("number", reward)
        case "number", int() | float() | np.integer() | np.floating():
            return bool(-1e30 < value < 1e30)
        case "observation", Observation(str(), tuple() | list() as images):
            return all(
                getattr(image, "dtype", None) == np.uint8
                and image.size > 0
                and image.shape[2:] == (3,)
                for image in images
            )
    return False


def require(condition: bool, env: TextEnv, sentence: str) -> None:
    """Raise ValueError with a sentence about a part of the environment unless a condition holds."""
    if not condition:
        raise ValueError(f"{type(env).__name__}.{sentence}")


def checked(env: TextEnv, part: str, value: Any) -> Any:
    """Return the value of a part of the environment. Raises ValueError if it breaks its promise."""
    shown = reprlib.repr(value)
    require(keeps(part, value), env, f"{part} is {shown}, but must be {PROMISES[part]}")
    return value


def require_read(env: TextEnv, part: str, reply: str, info: dict) -> None:
    """Raise ValueError if `step` could not read a reply of the task's own."""
    sentence = f"step() could not read {reply!r} of {part}: its `valid` is False"
    require(info.get("valid", True), env, sentence)


def check_environment(env: TextEnv) -> None:
    """Check a task and play a few episodes, each twice.

    Raises ValueError with one sentence if the task breaks a promise of `TextEnv`.
    """
    own_reset = type(env).reset is not TextEnv.reset
    require(own_reset or hasattr(env, "start"), env, "start() is missing")
    require(type(env).step is not TextEnv.step, env, "step() is missing")
    require(hasattr(env, "observe"), env, "observe() is missing")

    for field in ("max_turns", "layers", "actions", "words", "metrics", "settings", "warm_start"):
        checked(env, field, getattr(env, field))
    if type(env).random_reply is TextEnv.random_reply:
        sentence = "actions is empty, but the random policy chooses from them"
        require(len(env.actions) > 0, env, sentence)
    for name in env.metrics:
        taken = name in COLUMNS or hasattr(TextEnv, name)
        require(not taken, env, f"metrics has the name {name!r}, which something else has")

    for seed in range(8):
        repeatable = checked_episode(env, seed) == checked_episode(env, seed)
        advice = "all that is random must follow from the seed"
        require(repeatable, env, f"reset(seed={seed}) began two different episodes, but {advice}")
    if hasattr(env, "optimal_reply"):
        env.reset(seed=0)
        reply = checked(env, "optimal_reply()", env.optimal_reply())
        *_, info = env.step(reply)
        require_read(env, "optimal_reply()", reply, info)
    checked(env, "baselines()", env.baselines(EVAL_SEEDS))

    env.reset(seed=0)
    try:
        result = env.step("a reply without an action")
    except Exception as error:
        require(False, env, f"step() raised {error!r}, but no reply may raise an error")
    observation, *_ = checked(env, "step()", result)
    same = content(env.observe()) == content(observation)
    require(same, env, "observe() does not return what step() returned before it")


def checked_episode(env: TextEnv, seed: int) -> list:
    """Play a random episode, check what `reset` and `step` return, and return what they showed."""
    rng = np.random.default_rng(seed)
    observation, _ = checked(env, "reset()", env.reset(seed=seed))
    shown = [content(observation)]

    for _ in range(env.max_turns):
        reply = checked(env, "random_reply()", env.random_reply(rng))
        observation, *results, info = checked(env, "step()", env.step(reply))
        metrics = info.get("metrics", {})
        complete = isinstance(metrics, dict) and metrics.keys() == set(env.metrics)
        sentence = f"step() has the metrics {metrics!r:.80}, but must have a number for each of "
        has_numbers = complete and all(keeps("number", value) for value in metrics.values())
        require(has_numbers, env, f"{sentence}{env.metrics}")
        require_read(env, "random_reply()", reply, info)
        shown += [content(observation), results, info["success"]]
        if any(results[1:]):
            return shown
    raise ValueError(
        f"{type(env).__name__}.step() did not end the episode in turn {env.max_turns}, "
        "its last by max_turns"
    )


def content(observation: Observation) -> tuple:
    """Return text and images of an observation in a form that can be compared."""
    return observation.text, [image.tobytes() for image in observation.images]


def split_tags(text: str, tag: str) -> list[str]:
    """Split a text at `<tag>` and `</tag>` in any case, in time linear in its length.

    Returns [text, tag, text, ..., text], in which a tag is "" if it opens and "/" if it closes.
    """
    return re.split(f"<(/?){tag}>", text, flags=re.ASCII | re.IGNORECASE)


def outside_think(reply: str) -> str:
    """Return the reply without its `<think>` block, or "" if it is not closed or there are several.

    A tag `<think>` inside the block is text like any other.
    """
    match split_tags(reply, "think"):
        case [text]:
            return text
        case [before, "", *inside, "/", after] if "/" not in inside[1::2]:
            return before + after
    return ""


def parse_answer(reply: str) -> str | None:
    """Return the text of the only <answer> ... </answer>, without the spaces around it.

    Returns None if there is not exactly one. Tags are read in any case. Text around them and in a
    `<think>` block is ignored.
    """
    match split_tags(outside_think(reply), "answer"):
        case [_, "", answer, "/", _]:
            return answer.strip()
    return None


def parse_action(reply: str, actions: Sequence[str]) -> int | None:
    """Return the index of the action between `<answer>` tags, or None if it is none of them.

    Case is ignored. So are marks around the action and a verb before it, unless they belong to an
    action's name: **Right**, "move right".
    """
    answer = (parse_answer(reply) or "").lower()
    bare = re.sub(r"^(?:move|go|push)\s+", "", answer.strip(MARKS)).strip(MARKS)

    names = [action.lower() for action in actions]
    for name in (answer, bare):
        if name in names:
            return names.index(name)
    return None
