"""CliffWalking, as text: walk along the cliff to the goal, one step at a time.

Paper: section 4.3, appendix D "CliffWalking"; Table 2 (200 actions). It is a control: the paper's
on-policy training "solves it quickly". The dynamics are those of Gymnasium's `CliffWalking-v1`
(Sutton and Barto, example 6.6): 4x12 cells, -1 a step, and -100 for a fall, which leads back to the
start. All held-out seeds are the same task. `score` is the sum of rewards.

Where we differ: the optimal score is -13, the length of the shortest way. The paper's 0 comes from
a private package. The random policy scores -2079 in 200 turns (exact). The default here is 50
turns. In the tiny preset it is 30, and training starts along the way, more often near the goal.
From the task's own start hardly any episode arrives, and the policy learns to stand still.

Exercise 6 of docs/exercises.md is about this.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from envs.base import WARM_START_SEEDS, Observation, held_out
from envs.grid_world import FORM, GridWorld, Outcome, cell_name

COLUMNS = 12
# The cells (12 row + column) of the shortest way from the goal back to the start. Training begins
# in the start three times as often.
WAY_BACK = (*range(35, 23, -1), 36, 36, 36)

RULES = f"""\
You are walking along a cliff, on a grid of 4 rows and 12 columns. You start in row 4, column 1; \
the goal G is in row 4, column 12; the cells C between them are the cliff.
_ _ _ _ _ _ _ _ _ _ _ _
_ _ _ _ _ _ _ _ _ _ _ _
_ _ _ _ _ _ _ _ _ _ _ _
P C C C C C C C C C C G
Every step costs 1. Stepping over the cliff costs 100 and leads back to the start. At the edge of \
the grid you stay where you are. Reach the goal at the lowest cost; you have {{budget}} actions.
Actions: Left, Down, Right, Up.
{FORM}"""


class CliffWalking(GridWorld):
    """The environment. If `along_the_way`, training seeds start anywhere on the shortest way.

    The style "full" draws the grid once, and names row and column in every turn. "terse" names the
    cell, and marks what is above, right, below and left of it.
    """

    tiny: Mapping = {"along_the_way": True}
    max_turns = 50
    turn_reward = -1.0
    metrics = ("score",)
    actions = ("Up", "Right", "Down", "Left")  # Gymnasium's order
    words = (*actions, *(f" {letter}" for letter in "abcdefghijkl"), " #", " C", " G", " _")
    warm_start = ((600, 10), (150, 30))  # short episodes first: they are cheap

    def __init__(self, along_the_way: bool = False, **common: Any):
        super().__init__(**common)
        self.along_the_way = along_the_way
        self.cliff = gymnasium.make("CliffWalking-v1").unwrapped

    def start(self, seed: int) -> None:
        self.cliff.reset(seed=seed)
        rng = np.random.default_rng(seed)
        if seed >= WARM_START_SEEDS:
            # Any free cell, so that a model has seen them all.
            self.cliff.s = rng.integers(3 * COLUMNS + 1)
        elif self.along_the_way and not held_out(seed):
            # The power of 1.5 prefers cells near the goal.
            self.cliff.s = WAY_BACK[int(len(WAY_BACK) * rng.random() ** 1.5)]

    def act(self, action: int) -> Outcome:
        _, reward, ended, *_ = self.cliff.step(action)
        return reward, ended, ended

    def optimal_reply(self) -> str:
        """Return a step of the shortest way: up from the start, to the last column, down."""
        row, col = divmod(self.cliff.s, COLUMNS)
        if row == 3:
            return "<answer>Up</answer>"
        return "<answer>Right</answer>" if col < COLUMNS - 1 else "<answer>Down</answer>"

    def neighbours(self) -> Iterator[tuple[str, str]]:
        """Yield for each action the name of the cell to which it leads, and a mark: C cliff (which
        has the name X), G goal, # edge, or _ free."""
        for [(_, cell, reward, ended)] in self.cliff.P[self.cliff.s].values():
            name = cell_name(*divmod(cell, COLUMNS))
            if reward == -100:
                yield "X", "C"
            elif cell == self.cliff.s:
                yield name, "#"
            else:
                yield name, "G" if ended else "_"

    def caption(self) -> str:
        """Return the four neighbours, such as `Up c2 Right d3 Down X Left b3`."""
        named = zip(self.actions, self.neighbours())
        return " ".join(f"{action} {name}" for action, (name, _) in named)

    def observe(self) -> Observation:
        row, col = divmod(self.cliff.s, COLUMNS)
        if self.style == "terse":
            marks = " ".join(mark for _, mark in self.neighbours())
            return Observation(f" {cell_name(row, col)} {marks}")

        return Observation(self.prompt(RULES, f"You: row {row + 1}, column {col + 1}."))
