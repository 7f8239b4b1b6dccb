"""Define an environment: a `gymnasium.Env` whose action is the text of the model's reply.

Paper: section 3.1 (the turn MDP) and appendix D. In each turn the model gives one reply, and the
environment answers with an `Observation` and a reward. An episode ends after `max_turns` turns at
the latest. docs/own_environment.md explains how to add an environment, and envs/check.py finds what
is wrong with it.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import gymnasium
import numpy as np

# A seed determines the map, question or room. Training uses the seeds below EVAL_SEEDS, evaluation
# those from EVAL_SEEDS on, and the warm start of tiny models those from WARM_START_SEEDS on.
EVAL_SEEDS = 1_000_000_000
WARM_START_SEEDS = 2_000_000_000

THOUGHT = r"think|thought|reason|reflect|analy|scratch|\bcot\b"  # in the names of a thought's tags
THOUGHT_TAG = rf"(?i)<(/?)[\w:-]{{,20}}(?:{THOUGHT})[\w:-]{{,20}} ?>"

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


class UserError(ValueError):
    """A sentence to the user, who can mend what it names. Any other error is a bug."""


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

    def contains(self, x: Any) -> bool:
        return isinstance(x, str | Observation)

    def sample(self, **_: Any) -> str:
        return self.random_reply(self.np_random)


class TextEnv(gymnasium.Env):
    """The base of every environment. `step` never raises an error for a reply, whatever it holds.

    The info of every step has `success` (bool) and `valid` (bool: the reply could be read), and in
    a dict `metrics` the numbers of the episode so far that the class lists. Those of the last turn
    are averaged over episodes and logged.
    """

    # Every task defines `step` and these.
    start: Callable[[int], None]  # set up the episode of a seed
    observe: Callable[[], Observation]

    max_turns = 10  # H of section 3.1
    metrics: tuple[str, ...] = ()  # names of attributes, which are 0 when an episode begins
    settings: tuple[str, ...] = ()  # names of settings of train.py that the task takes
    actions: tuple[str, ...] = ()  # of the random policy; or the task overrides `random_reply`

    # Tasks with questions replace these (envs/data.py).
    data = ""  # where the rows come from
    rows: Mapping[str, list] = {}  # by split

    # These are for the tiny preset alone.
    tiny: Mapping[str, Any] = {}  # arguments of `__init__` that make the task easier
    words: tuple[str, ...] = ()  # each is one token
    warm_start: tuple[tuple[int, int], ...] = ((300, 10),)  # batches, turns of their episodes

    def __init__(
        self,
        style: str = "terse",
        format_penalty: float = 0.15,
        max_turns: int = 0,
    ):
        """Store the settings that all tasks share.

        The style "full" writes out rules and reply format for a pretrained model. "terse" shows a
        tiny model the state alone, and small images. If `max_turns` is 0, the task's own holds.
        """
        self.action_space = self.observation_space = AnySpace(self.random_reply)
        self.style = style
        self.format_penalty = format_penalty
        self.max_turns = max_turns or self.max_turns
        self.cell_size = 14 if style == "terse" else 56  # pixels of a cell in an image

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Begin the episode of a seed. Returns the first observation and a dict."""
        super().reset(seed=seed)
        self.turn = 0
        self.feedback = ""
        for name in self.metrics:
            setattr(self, name, 0.0)
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
        # In `map` a StopIteration of an environment would end the list, and hide its line.
        return [env.step(reply) for env, reply in zip(envs, replies)]

    def caption(self) -> str:
        """Return a caption of the observation in `words`. Only the warm start needs it."""
        raise NotImplementedError

    def random_reply(self, rng: np.random.Generator) -> str:
        """Return the reply of the random policy: one of `actions`, drawn uniformly."""
        return f"<answer>{self.actions[rng.integers(len(self.actions))]}</answer>"

    def policy_levels(self, seed: int) -> dict[str, float]:
        """Return the success of the `random` policy in one episode of this seed, and of the
        `optimal` policy if the task defines `optimal_reply`."""
        rng = np.random.default_rng((seed, 1))  # independent of the stream that draws the task
        policies = {"random": lambda: self.random_reply(rng)}
        if hasattr(self, "optimal_reply"):
            policies["optimal"] = self.optimal_reply
        return {name: play_out(self, seed, reply)[1]["success"] for name, reply in policies.items()}


def play_out(
    env: TextEnv,
    seed: int,
    reply: Callable[[], str],
    unread: Callable[[str], object] = lambda text: None,
) -> tuple[float, dict]:
    """Play the episode of this seed with replies from `reply`, and give those that could not be
    read to `unread`. Returns the episode's return and the last info."""
    env.reset(seed=seed)
    total = 0.0
    while True:
        text = reply()
        _, reward, terminated, truncated, info = env.step(text)
        total += reward
        if not info.get("valid", True):
            unread(text)
        if terminated or truncated:
            return total, info


def outside_think(reply: str) -> str:
    """Return the reply without its thought, or "" if the thought is open or there are several.

    A thought is a block such as `<think>` or `<reasoning>`. An opening tag inside it is text like
    any other. If the reply has a closing tag alone, the chat template opened the block, and all
    before it is the thought.
    """
    match re.split(THOUGHT_TAG, reply):
        case [text]:
            return text
        case [before, "", *inside, "/", after] if "/" not in inside[1::2]:
            return before + after
        case [_, "/", after]:
            return after
    return ""


def parse_block(reply: str, names: str) -> tuple[str, str]:
    """Return name and text of the only block <name> ... </name>, without the spaces around the
    text. Returns ("", "") if there is not exactly one. `names` are alternatives: "search|answer".

    Tags are read in any case. Text around them and in a thought is ignored.
    """
    match re.split(f"(?ai)<(/?)({names})>", outside_think(reply)):
        case [_, "", name, text, "/", closed, _] if name.lower() == closed.lower():
            return name.lower(), text.strip()
    return "", ""


def parse_answer(reply: str) -> str:
    """Return the text of the only <answer> ... </answer>, or "" if there is not exactly one."""
    return parse_block(reply, "answer")[1]


def parse_action(reply: str, actions: Sequence[str]) -> int | None:
    """Return the index of the action between `<answer>` tags, or None if it is none of them.

    Case is ignored. So are marks around the action, as in **Right**, unless they belong to its
    name.
    """
    answer = parse_answer(reply).lower()
    names = [action.lower() for action in actions]
    for name in (answer, answer.strip(MARKS)):
        if name in names:
            return names.index(name)
    return None
