"""Define what FrozenLake, CliffWalking and Sokoban share: turns, captions and prompts.

Paper: appendix D. A reply is one of four directions.
"""

from collections.abc import Callable

import numpy as np

from envs.base import Step, TextEnv, parse_action

FORM = """\
Reply with one action in the form <answer> action </answer>, \
for example <answer> Right </answer>."""

Outcome = tuple[float, bool, bool]  # reward, success, whether the episode ends


def cell_name(row: int, col: int) -> str:
    """Return the name of a cell in captions, such as b3: columns are a, b, ... from the left, rows
    1, 2, ... from the top."""
    return f"{'abcdefghijkl'[col]}{row + 1}"


def name_cells(grid: np.ndarray, marks: dict[str, str]) -> str:
    """Return a caption of a grid of symbols [R, C], such as `P b1 O a2 c4`.

    `marks` maps each mark to symbols. The cells with these symbols follow the mark. A mark without
    cells is left out.
    """
    words = []
    for mark, symbols in marks.items():
        cells = [cell_name(*cell) for cell, symbol in np.ndenumerate(grid) if symbol in symbols]
        if cells:
            words += [mark, *cells]
    return " ".join(words)


class GridWorld(TextEnv):
    """The base class of the three tasks. Every task defines `start` and `act`.

    An unreadable reply earns `turn_reward` less the format penalty, and leaves the state as it is.
    `score`, where `metrics` lists it, is the sum of rewards without these penalties.
    """

    act: Callable[[int], Outcome]  # take an action

    actions = ("Left", "Down", "Right", "Up")
    turn_reward = 0.0  # of a turn without an action
    score = 0.0

    def step(self, reply: str) -> Step:
        action = parse_action(reply, self.actions)
        if action is None:
            self.score += self.turn_reward
            reward = self.turn_reward - self.format_penalty
            self.feedback = f"Your last reply could not be read. Reward: {reward:g}."
            return self.end_turn(reward, success=False, ended=False, valid=False)

        reward, success, ended = self.act(action)
        self.score += reward
        self.feedback = f"Reward: {reward:g}."
        return self.end_turn(reward, success, ended, valid=True)

    def prompt(self, rules: str, state: str, **blanks: object) -> str:
        """Return the text of the "full" style: rules (in later turns feedback), turn and state.

        The rules are a template. `blanks` fill it, together with the budget.
        """
        opening = self.feedback if self.turn else rules.format(budget=self.max_turns, **blanks)
        left = self.max_turns - self.turn
        return f"{opening}\nTurn {self.turn + 1}, actions left: {left}.\n{state}"
