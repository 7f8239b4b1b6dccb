"""CliffWalking, as text: along the cliff to the goal, one step at a time.

Paper: section 4.3, appendix D "CliffWalking"; Table 2 (200 actions). A control: on-policy training solves it. The
dynamics are Gymnasium's own `CliffWalking-v1` (Sutton and Barto, example 6.6): 4x12 cells, -1 a step, -100 for a fall,
which leads back to the start. All held-out seeds are the same task; `score` is the sum of rewards.

Where we differ: the optimal score is -13, the length of the shortest way; the paper's 0 comes from a private package.
The random policy scores -2079 in 200 turns (exact, by `solve` of envs/frozenlake.py). The default here is 50 turns. In
the tiny preset it is 30, and training starts along the way, more often near the goal: from the task's own start hardly
any episode arrives, and the policy learns to stand still. Exercise: try `--epsilon 0.01` and watch `replay_success`:
good episodes have |r| up to 13, bad ones hundreds.
"""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from envs.base import WARM_START_SEEDS, Observation, held_out
from envs.grid_world import FORM, GridWorld, cell_name

COLUMNS = 12
WAY = (
    36,
    36,
    36,
    *range(24, 36),
)  # cells (12 row + column) of the shortest way, the start three times as often

RULES = f"""\
You are walking along a cliff, on a grid of 4 rows and 12 columns. You start in row 4, column 1; the goal G is in row \
4, column 12; the cells C between them are the cliff.
_ _ _ _ _ _ _ _ _ _ _ _
_ _ _ _ _ _ _ _ _ _ _ _
_ _ _ _ _ _ _ _ _ _ _ _
P C C C C C C C C C C G
Every step costs 1. Stepping over the cliff costs 100 and leads back to the start. At the edge of the grid you stay \
where you are. Reach the goal at the lowest cost; you have {{budget}}.
Actions: Left, Down, Right, Up.
{FORM}"""


class CliffWalking(GridWorld):
    """`style` "full" draws the grid once and names row and column in every turn; "terse" names the cell, and marks what
    is above, right, below and left. `along_the_way`: training seeds start anywhere on the shortest way."""

    settings = ("along_the_way",)
    max_turns = 50
    turn_reward = -1.0
    metrics = ("score",)
    actions = ("Up", "Right", "Down", "Left")  # Gymnasium's order
    words = (*actions, *(f" {letter}" for letter in "abcdefghijkl"), " #", " C", " G", " _")
    warm_start = ((600, 10), (150, 30))  # short episodes first: they are cheap

    def __init__(self, along_the_way: bool = False, **common: Any):
        super().__init__(**common)
        self.along_the_way = along_the_way

    def start(self, seed: int) -> None:
        self.cliff = gymnasium.make("CliffWalking-v1").unwrapped
        self.cliff.reset(seed=seed)
        rng = np.random.default_rng(seed)
        if seed >= WARM_START_SEEDS:  # any free cell, so that a model has seen them all
            self.cliff.s = int(rng.integers(3 * COLUMNS + 1))
        elif self.along_the_way and not held_out(seed):
            self.cliff.s = WAY[-1 - int(len(WAY) * rng.random() ** 1.5)]

    def act(self, action: int) -> tuple[float, bool, bool]:
        _, reward, ended, _, _ = self.cliff.step(action)
        return float(reward), bool(ended), bool(ended)

    def optimal_reply(self) -> str:
        """Return a step of the shortest way: up from the start, to the last column, down."""
        row, col = divmod(int(self.cliff.s), COLUMNS)
        return f"<answer>{'Up' if row == 3 else 'Right' if col < COLUMNS - 1 else 'Down'}</answer>"

    def around(self) -> Iterator[tuple[int, str]]:
        """Yield the cell to which each action leads, and its mark: C cliff, G goal, # the edge, _ free."""
        here = int(self.cliff.s)
        for [(_, cell, reward, ended)] in self.cliff.P[here].values():
            yield cell, "C" if reward == -100 else "#" if cell == here else "G" if ended else "_"

    def caption(self) -> str:
        """Return the four neighbours, such as `Up c2 Right d3 Down X Left b3`; X is the cliff."""
        cells = [
            "X" if mark == "C" else cell_name(*divmod(cell, COLUMNS))
            for cell, mark in self.around()
        ]
        return " ".join(f"{way} {cell}" for way, cell in zip(self.actions, cells, strict=True))

    def observe(self) -> Observation:
        row, col = divmod(int(self.cliff.s), COLUMNS)
        if self.style == "terse":
            return Observation(
                f" {cell_name(row, col)} {' '.join(mark for _, mark in self.around())}"
            )
        return Observation(
            self.prompt(
                RULES.format(budget=self.budget()), f"You: row {row + 1}, column {col + 1}."
            )
        )
