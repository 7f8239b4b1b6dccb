"""Sokoban, as text: push every box onto a target, and never into a corner.

Paper: section 4.1, appendix D "Sokoban"; Table 2 (10 actions). "Simple" is 6x6 with one box, "Hard"
8x8 with two. Symbols and rewards are the authors': -0.1 a turn, +1 for a box pushed onto a target,
-1 for one pushed off, and +10 when the last one is in place. `score`, the paper's number, is their
sum. An episode that ends with one of two boxes in place has |r| = 0: raise epsilon.

Where we differ: a seed gives random walls, and a start whose shortest solution takes exactly n
turns. n is uniform from the number of boxes to `longest`, which is 10 turns, or 5 in the tiny
preset. The authors' rooms may need more than 10. Rooms with the same walls and targets are all held
out, or none is.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from envs.base import Observation, same_split
from envs.grid_world import FORM, GridWorld, Outcome, name_cells

RULES = """\
You are in a warehouse, seen from above as a grid of {side} x {side} cells. Push every box onto a \
target: walk against a box and it moves one cell, if the cell behind it is free. You cannot pull, \
and you cannot push two boxes at once. You have {budget} actions.
Symbols: # wall, _ floor, O target, √ box on target, X box, P you, S you on a target.
Actions: Left, Down, Right, Up."""
CAPTION_MARKS = {"P": "PS", "X": "X√", "O": "O√S", "#": "#"}

STRIDE = 8
STEPS = (-1, STRIDE, 1, -STRIDE)  # of GridWorld.actions
Cells = frozenset[int]  # a cell is the number 8 row + column
State = tuple[Cells, int]  # boxes, player
Room = tuple[Cells, Cells, Cells, int]  # floor (everything but walls), targets, boxes, player


def move(floor: Cells, boxes: Cells, player: int, step: int) -> State:
    """Return boxes and player after a step. They stay if a wall or a box is in the way."""
    ahead = player + step
    beyond = ahead + step
    if ahead in boxes and beyond in floor - boxes:
        boxes ^= {ahead, beyond}
    if ahead in floor - boxes:
        player = ahead
    return boxes, player


def states_before(floor: Cells, boxes: Cells, player: int) -> Iterator[State]:
    """Yield the states from which one step leads to this state."""
    for step in STEPS:
        ahead = player + step
        before = player - step
        if before in floor - boxes:
            yield boxes, before  # the player walked
            if ahead in boxes:
                yield boxes ^ {ahead, player}, before  # the player pushed this box


def turns_to_solve(floor: Cells, targets: Cells, horizon: int) -> dict[State, int]:
    """Return the turns of the shortest solution from each state, up to `horizon`.

    This is breadth-first search backwards, from the states with all boxes on targets.
    """
    frontier = {(targets, player) for player in floor - targets}
    turns = dict.fromkeys(frontier, 0)
    for n in range(1, horizon + 1):
        earlier = {before for state in frontier for before in states_before(floor, *state)}
        frontier = earlier - turns.keys()
        turns |= dict.fromkeys(frontier, n)
    return turns


@lru_cache(maxsize=4096)
def random_room(seed: int, side: int, n_boxes: int, longest: int) -> Room:
    """Return the room of this seed.

    Walls and targets are drawn until there is a start whose shortest solution has the drawn number
    of turns. No box stands on a target at the start.
    """
    rng = np.random.default_rng(seed)
    shortest = int(rng.integers(n_boxes, longest + 1))
    while True:
        is_floor = rng.random((side - 2, side - 2)) >= 0.2  # within the outer walls
        rows, columns = np.nonzero(is_floor)
        cells = (STRIDE * (rows + 1) + columns + 1).tolist()
        targets = frozenset(rng.permutation(cells)[:n_boxes].tolist())
        if not same_split((cells, sorted(targets)), seed):
            continue

        floor = frozenset(cells)
        turns = turns_to_solve(floor, targets, shortest)
        # They are sorted, because the order of a set may change between versions of Python.
        starts = sorted(
            (sorted(boxes), player)
            for (boxes, player), n in turns.items()
            if n == shortest and not boxes & targets
        )
        if starts:
            boxes, player = starts[rng.integers(len(starts))]
            return floor, targets, frozenset(boxes), player


class Sokoban(GridWorld):
    """The environment. The style "terse" shows the grid alone, without its outer walls."""

    side = 6  # up to 8
    n_boxes = 1
    tiny: Mapping = {"longest": 5}
    metrics = ("score",)
    turn_reward = -0.1
    warm_start = ((900, 1), (150, 10))
    # Captions name columns by these letters, and rows by digits.
    words = (*GridWorld.actions, "√", " X", " O", " #", *(f" {letter}" for letter in "abcdef"))

    def __init__(self, longest: int = 10, **common: Any):
        """Store the largest number of turns of a solution: Max Actions of Table 2."""
        super().__init__(**common)
        self.longest = longest

    def start(self, seed: int) -> None:
        room = random_room(seed, self.side, self.n_boxes, self.longest)
        self.floor, self.targets, self.boxes, self.player = room

    def act(self, action: int) -> Outcome:
        in_place_before = len(self.boxes & self.targets)
        self.boxes, self.player = move(self.floor, self.boxes, self.player, STEPS[action])
        in_place = len(self.boxes & self.targets)

        solved = self.boxes == self.targets
        reward = self.turn_reward + in_place - in_place_before + 10.0 * solved
        return reward, solved, solved

    def optimal_reply(self) -> str:
        """Return a step of the shortest solution, or any action if too few turns are left."""
        turns = turns_to_solve(self.floor, self.targets, self.max_turns - self.turn)
        states = [move(self.floor, self.boxes, self.player, step) for step in STEPS]
        best = np.argmin([turns.get(state, np.inf) for state in states])
        return f"<answer>{self.actions[best]}</answer>"

    def grid(self) -> np.ndarray:
        """Return the symbols of all cells, [side, side]."""
        grid = np.full((self.side, STRIDE), "#")
        grid.put([*self.floor], "_")
        grid.put([*self.targets], "O")
        grid.put([*self.boxes], "X")
        grid.put([*self.boxes & self.targets], "√")
        grid.put(self.player, "S" if self.player in self.targets else "P")
        return grid[:, : self.side]

    def caption(self) -> str:
        """Return the cells of player, boxes, targets and inner walls: `P b1 X c2 O d3 # a2 b4`."""
        return name_cells(self.grid()[1:-1, 1:-1], CAPTION_MARKS)

    def observe(self) -> Observation:
        if self.style == "terse":
            inner = self.grid()[1:-1, 1:-1]
            return Observation("\n".join(map("".join, inner)))

        rows = "\n".join(map(" ".join, self.grid()))
        return Observation(self.prompt(RULES, f"State:\n{rows}\n{FORM}", side=self.side))


class SokobanHard(Sokoban):
    """The environment with two boxes."""

    side = 8
    n_boxes = 2
