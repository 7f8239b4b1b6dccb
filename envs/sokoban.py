"""Sokoban, as text and as pictures: push every box onto a target, and never into a corner.

Paper: section 4.1, appendix D "Sokoban"; Table env_details (10 actions). "Simple" is 6x6 with one box, "Hard" 8x8
with two, as the authors ran it, and so are the symbols and the rewards: -0.1 a turn, +1 for a box pushed onto a
target, -1 for one pushed off, +10 when the last one is in place, which ends the game.

`score`, the paper's number, is the sum of these rewards. An unreadable reply costs its turn like any other (or it
would be cheaper than a move) and the format penalty, which counts in the return but not in the score. A game that
puts no box in place scores -1 after 10 turns: the paper's lower bound. A room solved in n turns scores 10 + boxes
- n / 10, far above the paper's +3: its 2.304 can only be a mean over solved and unsolved rooms, of which about 0.29
were solved. So the success rate stands beside the score.

Each seed is a room: walls at random, then a start from which the shortest solution takes exactly n turns, n uniform
over 1..10 (2..10 with two boxes). So every room is solvable within the turn limit, none is solved already, and no
box starts on a target. The start comes from reverse play, of all games at once: `turns_to_solve` works backwards from
the solved states through every state of the room (some 200 with one box, 13,000 with two). The same table of states
gives the exact baselines and the optimal player. Where we differ: the authors' rooms come from one random reverse
game and need not be solvable within 10 turns.

With |r| + epsilon as the priority a failure has |r| = 1, but one with a box in place (two boxes) |r| = 0: partial
success is replayed least unless epsilon is of the order of 1.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import combinations, permutations
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from envs.base import FORMAT_PENALTY, Observation, TextEnv, observations, parse_answer

ACTIONS = ("Left", "Down", "Right", "Up")
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
LONGEST = 10  # turns of the longest solution: Max Actions of Table env_details
WALL_PROBABILITY = 0.2

RULES = """\
You are in a warehouse, seen from above as a grid of {side} x {side} cells. Push every box onto a target: walk \
against a box and it moves one cell, if the cell behind it is free. You cannot pull, and you cannot push two boxes \
at once. You have {turns} actions.
{legend}
Actions: Left, Down, Right, Up.
"""
LEGEND = "Symbols: # wall, _ floor, O target, √ box on target, X box, P you, S you on a target."
PICTURE_LEGEND = (
    "In the picture the blue figure is you, red rings are targets, crates are boxes: green ones are in place."
)
FORM = "Reply with one action in the form <answer> action </answer>, for example <answer> Right </answer>."

Cell = tuple[int, int]  # row, column


class Room(NamedTuple):
    """A room at its start."""

    floor: np.ndarray  # bool [side, side]: where there is no wall
    targets: tuple[Cell, ...]
    boxes: tuple[Cell, ...]
    player: Cell
    shortest: int  # turns of the shortest solution


class States:
    """Every state of a room as a number: F floor cells, B sets of cells where the boxes may be, state b F + p.

    `after` [4, S] is the state after each action; solved states stay as they are. `starts` [S]: no box is on a target
    and the player not in a box (such states have numbers too, but no game comes there).
    """

    def __init__(self, floor: np.ndarray, targets: tuple[Cell, ...]):
        self.cells = [tuple(cell) for cell in np.argwhere(floor).tolist()]
        number = {cell: k for k, cell in enumerate(self.cells)}
        n = wall = len(self.cells)  # all walls have the number after the last cell
        beside = np.array([[number.get((r + down, c + right), wall) for r, c in self.cells] for down, right in MOVES])
        self.sets = np.array(list(combinations(range(n), len(targets))))  # [B, boxes]
        every = np.arange(len(self.sets))
        self.set_number = np.zeros((n,) * len(targets), dtype=np.intp)
        for order in permutations(range(len(targets))):
            self.set_number[tuple(self.sets[:, order].T)] = every
        full = np.zeros((len(every), n + 1), dtype=bool)  # [B, F + 1]: who walks there is stopped, and so is a box
        full[every[:, None], self.sets], full[:, wall] = True, True

        after = np.empty((4, len(every), n), dtype=np.intp)
        for a in range(4):
            after[a] = every[:, None] * n + np.where(full[:, beside[a]], np.arange(n), beside[a])
            for j, box in enumerate(self.sets.T):  # box [B]
                behind, pusher = beside[a][box], beside[(a + 2) % 4][box]
                b = np.flatnonzero(~full[every, behind] & (pusher != wall))
                moved = self.sets[b]
                moved[:, j] = behind[b]
                after[a, b, pusher[b]] = self.set_number[tuple(moved.T)] * n + box[b]
        places = [number[cell] for cell in targets]
        done = self.set_number[tuple(places)]
        after[:, done] = done * n + np.arange(n)
        self.after = after.reshape(4, -1)
        self.solved = np.repeat(every == done, n)
        self.starts = (~full[:, :n] & ~np.isin(self.sets, places).any(1, keepdims=True)).ravel()

    def number(self, boxes: Iterable[Cell], player: Cell) -> int:
        """The number of a state."""
        places = tuple(self.cells.index(cell) for cell in boxes)
        return int(self.set_number[places]) * len(self.cells) + self.cells.index(player)


def turns_to_solve(states: States, horizon: int) -> np.ndarray:
    """Turns of the shortest solution, int16 [S], by playing backwards from the solved states; horizon + 1 stands for
    more than `horizon`."""
    turns = np.where(states.solved, 0, horizon + 1).astype(np.int16)
    for _ in range(horizon):
        turns = np.minimum(turns, turns[states.after].min(0) + 1)
    return turns


def random_success(states: States, horizon: int) -> np.ndarray:
    """Probability that uniformly random actions solve the room within `horizon` turns, float64 [S]."""
    success = states.solved.astype(float)
    for _ in range(horizon):
        success = success[states.after].mean(0)
    return success


@lru_cache(maxsize=4096)
def random_room(seed: int, side: int, boxes: int) -> Room:
    """The room of this seed: see the module's head. Walls and targets are drawn until such a start exists."""
    rng = np.random.default_rng(seed)
    shortest = int(rng.integers(boxes, LONGEST + 1))
    while True:
        floor = np.zeros((side, side), dtype=bool)
        floor[1:-1, 1:-1] = rng.random((side - 2, side - 2)) >= WALL_PROBABILITY
        free: list[Cell] = [(y, x) for y, x in np.argwhere(floor).tolist()]
        if len(free) <= 2 * boxes:
            continue
        targets = tuple(sorted(free[k] for k in rng.permutation(len(free))[:boxes]))
        states = States(floor, targets)
        starts = np.flatnonzero((turns_to_solve(states, shortest) == shortest) & states.starts)
        if len(starts):
            b, p = divmod(int(rng.choice(starts)), len(free))
            return Room(floor, targets, tuple(free[k] for k in states.sets[b]), free[p], shortest)


class Sokoban(TextEnv):
    """`style` "full" writes rules, legend, grid and form out for a pretrained model; "terse" shows the grid alone,
    without the wall around it, for a tiny one. `image` draws the room instead; `cell_size` is in pixels."""

    metrics = ("score",)
    warm_start = ((900, 1), (150, 10))  # mostly to read, then to play
    words = (*ACTIONS, "√", " X", " O", " #", " a", " b", " c", " d", " e", " f")  # a cell is a column and a row

    def __init__(
        self, side: int = 6, boxes: int = 1, image: bool = False, style: str = "terse", cell_size: int = 14,
        format_penalty: float = FORMAT_PENALTY, max_turns: int = 0,
    ):  # fmt: skip
        super().__init__(style, format_penalty, max_turns)
        if side not in (6, 7, 8) or boxes not in (1, 2):
            raise ValueError(f"side must be 6, 7 or 8 and boxes 1 or 2, got {side} and {boxes}")
        self.side, self.n_boxes, self.image, self.cell_size = side, boxes, image, cell_size
        if image:  # first to see, then to play
            self.warm_start = ((400, 1), (60, 10)) if side < 8 else ((250, 1), (30, 10))
        elif side == 8:  # so much of a Hard room as a few minutes allow
            self.warm_start = ((400, 1), (60, 10))
        self.observation_space = observations(5000, side * cell_size, side * cell_size)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Observation, dict]:
        """The room follows from `seed`."""
        super().reset(seed=seed)
        self.room = random_room(self.episode_seed(seed), self.side, self.n_boxes)
        self.boxes, self.player = set(self.room.boxes), self.room.player
        self.turn, self.score, self.last_reward = 0, 0.0, 0.0
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self.turn += 1
        action = parse_answer(reply)
        valid, before = action in ACTIONS, self._in_place()
        if valid:
            self._move(*MOVES[ACTIONS.index(action)])
        solved = self._in_place() == self.n_boxes
        reward = -0.1 + self._in_place() - before + 10.0 * solved
        self.score += reward
        self.last_reward = reward if valid else reward - self.format_penalty
        info = {"success": solved, "valid": valid, "metrics": {"score": self.score}}
        return self.observe(), self.last_reward, solved, self.turn >= self.max_turns, info

    def _move(self, down: int, right: int) -> None:
        row, col = self.player
        ahead, behind = (row + down, col + right), (row + 2 * down, col + 2 * right)
        if ahead in self.boxes and self.room.floor[behind] and behind not in self.boxes:
            self.boxes ^= {ahead, behind}
        if self.room.floor[ahead] and ahead not in self.boxes:
            self.player = ahead

    def _in_place(self) -> int:
        return len(self.boxes.intersection(self.room.targets))

    def random_reply(self, rng: np.random.Generator) -> str:
        return f"<answer>{ACTIONS[rng.integers(4)]}</answer>"

    def optimal_reply(self) -> str:
        """A step of the shortest solution; where there is none within the turns that are left, any action."""
        states = States(self.room.floor, self.room.targets)
        turns = turns_to_solve(states, self.max_turns - self.turn)
        after = states.after[:, states.number(self.boxes, self.player)]
        return f"<answer>{ACTIONS[int(turns[after].argmin())]}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Exact probability of success in the room of this seed, for a `random` and an `optimal` player."""
        self.reset(seed=seed)
        states = States(self.room.floor, self.room.targets)
        start = states.number(self.room.boxes, self.room.player)
        random = random_success(states, self.max_turns)[start]
        return {"random": float(random), "optimal": float(self.room.shortest <= self.max_turns)}

    def caption(self) -> str:
        """`P b1 X c2 O d3 # a2 b4`: you, boxes, targets, walls; columns a.., rows 1.., the wall around left out."""
        inner = np.argwhere(~self.room.floor[1:-1, 1:-1]) + 1
        places = {"P": [self.player], " X": sorted(self.boxes), " O": self.room.targets, " #": inner}
        named = {m: "".join(f" {'abcdef'[col - 1]}{row}" for row, col in cells) for m, cells in places.items()}
        return "".join(mark + cells for mark, cells in named.items() if cells)

    def symbol(self, cell: Cell) -> str:
        """What stands in a cell: one of `# _ O √ X P S`."""
        if not self.room.floor[cell]:
            return "#"
        here = "P" if cell == self.player else "X" if cell in self.boxes else "_"
        return {"P": "S", "X": "√", "_": "O"}[here] if cell in self.room.targets else here

    def _grid(self, separator: str, border: int) -> str:
        shown = range(border, self.side - border)
        return "\n".join(separator.join(self.symbol((row, col)) for col in shown) for row in shown)

    def observe(self) -> Observation:
        images = (self._draw(),) if self.image else ()
        if self.style == "terse":
            return Observation("" if self.image else self._grid("", border=1), images)
        state = "The picture shows the room." if self.image else "State:\n" + self._grid(" ", border=0)
        opening = f"Reward: {self.last_reward:g}.\n"
        if self.turn == 0:
            legend = PICTURE_LEGEND if self.image else LEGEND
            opening = RULES.format(side=self.side, turns=self.max_turns, legend=legend)
        left = self.max_turns - self.turn
        return Observation(f"{opening}Turn {self.turn + 1}, actions left: {left}.\n{state}\n{FORM}", images)

    def _draw(self) -> np.ndarray:
        """The room from above, uint8 [side cell_size, side cell_size, 3]."""
        side, size = range(self.side), self.cell_size
        rows = [[tile(self.symbol((r, c)), r, c, self.side, size) for c in side] for r in side]
        return np.concatenate([np.concatenate(row, axis=1) for row in rows])


WALL, MORTAR, FLOOR, LINE = (92, 84, 96), (150, 142, 150), (246, 236, 214), (208, 196, 170)
CRATE, CRATE_EDGE, DONE, DONE_EDGE = (196, 124, 40), (96, 52, 8), (40, 176, 72), (8, 80, 24)
RING, PLAYER = (224, 24, 40), (24, 72, 224)


@cache
def tile(symbol: str, row: int, col: int, side: int, size: int) -> np.ndarray:
    """One cell, drawn at four times its size and scaled down, uint8 [size, size, 3].

    A ruler along its left and its top edge shades from dark to light with row and column, so that both can be seen in
    the picture itself: a tiny vision tower cannot yet tell them from positions alone.
    """
    big = 4 * size
    picture = Image.new("RGB", (big, big), WALL if symbol == "#" else FLOOR)
    pen = ImageDraw.Draw(picture)
    line = max(1, big // 28)

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, ...]:
        return left * big, top * big, right * big, bottom * big

    if symbol == "#":  # three courses of bricks
        for y in (1 / 3, 2 / 3):
            pen.line(box(0, y, 1, y), MORTAR, 2 * line)
        for x, top in ((0.5, 0), (0.25, 1 / 3), (0.75, 1 / 3), (0.5, 2 / 3)):
            pen.line(box(x, top, x, top + 1 / 3), MORTAR, 2 * line)
    else:
        pen.rectangle((0, 0, big - 1, big - 1), outline=LINE, width=line)
    if symbol in "OS":
        pen.ellipse(box(0.18, 0.18, 0.86, 0.86), outline=RING, width=big // 8)
    if symbol in "X√":
        fill, edge = (CRATE, CRATE_EDGE) if symbol == "X" else (DONE, DONE_EDGE)
        pen.rectangle(box(0.16, 0.16, 0.92, 0.92), fill=fill, outline=edge, width=big // 12)
        pen.line(box(0.2, 0.2, 0.88, 0.88), edge, big // 14)
        pen.line(box(0.2, 0.88, 0.88, 0.2), edge, big // 14)
    if symbol in "PS":
        pen.ellipse(box(0.4, 0.14, 0.66, 0.4), fill=PLAYER)  # head
        pen.polygon([(0.53 * big, 0.34 * big), (0.8 * big, 0.92 * big), (0.26 * big, 0.92 * big)], fill=PLAYER)
    small = np.array(picture.resize((size, size), Image.Resampling.BOX))
    ruler = max(1, size // 7)
    small[:, :ruler] = 40 + 180 * row // (side - 1)
    small[:ruler, :] = 40 + 180 * col // (side - 1)
    return small


if __name__ == "__main__":
    from envs.play import main

    main(Sokoban)
