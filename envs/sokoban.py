"""Sokoban, as text: push every box onto a target, and never into a corner.

Paper: section 4.1, appendix D "Sokoban"; Table 2 (10 actions). "Simple" is 6x6 with one box, "Hard" 8x8 with two, with
the authors' symbols and rewards: -0.1 a turn, +1 for a box pushed onto a target, -1 for one pushed off, +10 when the
last one is in place. `score`, the paper's number, is their sum. One of two boxes in place has |r| = 0: raise epsilon.

Where we differ: a seed gives random walls, and a start whose shortest solution takes exactly n turns, n uniform from
the number of boxes to `longest`: 10 turns, or 5 in the tiny preset. The authors' rooms may need more than 10. Rooms
with the same walls and targets are all held out, or none is.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from envs.base import Observation, fits
from envs.grid_world import FORM, GridWorld, cell_name

LONGEST = 10  # turns of the longest solution: Max Actions of Table 2

RULES = """\
You are in a warehouse, seen from above as a grid of {side} x {side} cells. Push every box onto a target: walk \
against a box and it moves one cell, if the cell behind it is free. You cannot pull, and you cannot push two boxes \
at once. You have {budget}.
Symbols: # wall, _ floor, O target, √ box on target, X box, P you, S you on a target.
Actions: Left, Down, Right, Up."""

STRIDE = 8
STEPS = (-1, STRIDE, 1, -STRIDE)  # of GridWorld.actions
Cells = frozenset[int]  # a cell is the number 8 row + column
State = tuple[Cells, int]  # boxes, player


def move(floor: Cells, boxes: Cells, player: int, step: int) -> State:
    """Return boxes and player after a step. They stay if a wall or a box is in the way."""
    ahead, behind = player + step, player + 2 * step
    if ahead in boxes and behind in floor - boxes:
        boxes ^= {ahead, behind}
    return boxes, ahead if ahead in floor - boxes else player


def turns_to_solve(floor: Cells, targets: Cells, horizon: int) -> dict[State, int]:
    """Return the turns of the shortest solution from each state, up to `horizon`: breadth-first search, backwards."""
    frontier = {(targets, player) for player in floor - targets}
    turns = dict.fromkeys(frontier, 0)
    for n in range(1, horizon + 1):
        earlier = set()
        for boxes, player in frontier:
            for step in STEPS:
                if (before := player - step) in floor and before not in boxes:
                    earlier.add((boxes, before))
                    if player + step in boxes:
                        earlier.add((boxes ^ {player, player + step}, before))
        frontier = earlier - turns.keys()
        turns |= dict.fromkeys(frontier, n)
    return turns


@lru_cache(maxsize=4096)
def random_room(seed: int, side: int, boxes: int, longest: int) -> tuple[Cells, Cells, State, int]:
    """Return the room of this seed: floor, targets, the state at its start, and the turns of its shortest solution.
    Walls and targets are drawn until a start with that many turns exists."""
    rng = np.random.default_rng(seed)
    shortest = int(rng.integers(boxes, longest + 1))
    while True:
        free = np.zeros((side, STRIDE), dtype=bool)
        free[1:-1, 1 : side - 1] = rng.random((side - 2, side - 2)) >= 0.2  # else walls
        cells = np.flatnonzero(free).tolist()
        if len(cells) <= 2 * boxes:
            continue
        floor, targets = (
            frozenset(cells),
            frozenset(cells[k] for k in rng.permutation(len(cells))[:boxes]),
        )
        if not fits((cells, sorted(targets)), seed):
            continue
        turns = turns_to_solve(floor, targets, shortest)
        starts = sorted(
            (sorted(b), player)
            for (b, player), n in turns.items()
            if n == shortest and not b & targets
        )
        if starts:
            placed, player = starts[rng.integers(len(starts))]
            return floor, targets, (frozenset(placed), player), shortest


class Sokoban(GridWorld):
    """`style` "terse" shows the grid alone, without its outer walls. Raises ValueError unless `side` is 6
    to 8 and `boxes` 1 or 2."""

    settings = ("longest",)
    metrics = ("score",)
    turn_reward = -0.1
    warm_start = ((900, 1), (150, 10))
    words = (
        *GridWorld.actions,
        "√",
        " X",
        " O",
        " #",
        " a",
        " b",
        " c",
        " d",
        " e",
        " f",
    )  # captions: column and row

    def __init__(self, side: int = 6, boxes: int = 1, longest: int = LONGEST, **common: Any):
        super().__init__(**common)
        if side not in (6, 7, 8) or boxes not in (1, 2):
            raise ValueError(f"side must be 6, 7 or 8 and boxes 1 or 2, got {side} and {boxes}")
        self.side, self.n_boxes, self.longest = side, boxes, longest

    def start(self, seed: int) -> None:
        room = random_room(seed, self.side, self.n_boxes, self.longest)
        self.floor, self.targets, (self.boxes, self.player), self.shortest = room

    def act(self, action: int) -> tuple[float, bool, bool]:
        before = len(self.boxes & self.targets)
        self.boxes, self.player = move(self.floor, self.boxes, self.player, STEPS[action])
        solved = self.boxes == self.targets
        return (
            self.turn_reward + len(self.boxes & self.targets) - before + 10.0 * solved,
            solved,
            solved,
        )

    def optimal_reply(self) -> str:
        """Return a step of the shortest solution, or any action if the turns that are left do not suffice."""
        turns = turns_to_solve(self.floor, self.targets, self.max_turns - self.turn)
        after = [move(self.floor, self.boxes, self.player, step) for step in STEPS]
        return f"<answer>{self.actions[np.argmin([turns.get(state, np.inf) for state in after])]}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        return super().baselines(seed) | {"optimal": float(self.shortest <= self.max_turns)}

    def grid(self) -> list[str]:
        """Return the rows of the room, each cell one of `# _ O √ X P S`."""
        cells = dict.fromkeys(self.floor, "_") | dict.fromkeys(self.targets, "O")
        cells |= {box: "√" if box in self.targets else "X" for box in self.boxes}
        cells[self.player] = "S" if self.player in self.targets else "P"
        return [
            "".join(cells.get(STRIDE * row + col, "#") for col in range(self.side))
            for row in range(self.side)
        ]

    def caption(self) -> str:
        """Return the cells of player, boxes, targets and inner walls, such as `P b1 X c2 O d3 # a2 b4`."""
        named, rows = "", self.grid()
        for mark, symbols in (("P", "PS"), (" X", "X√"), (" O", "O√S"), (" #", "#")):
            inner = np.ndindex(self.side - 2, self.side - 2)
            cells = [cell_name(row, col) for row, col in inner if rows[row + 1][col + 1] in symbols]
            named += " ".join([mark, *cells]) if cells else ""
        return named

    def observe(self) -> Observation:
        rows = self.grid()
        if self.style == "terse":
            return Observation("\n".join(row[1:-1] for row in rows[1:-1]))
        rules, grid = (
            RULES.format(side=self.side, budget=self.budget()),
            "\n".join(map(" ".join, rows)),
        )
        return Observation(self.prompt(rules, f"State:\n{grid}\n{FORM}"))
