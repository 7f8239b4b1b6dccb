"""FrozenLake, as text and as images: walk over the ice to the goal, and avoid the holes.

Paper: appendix D, "FrozenLake (LLM)" and "FrozenLake (VLM)"; Table 2 (10 actions, binary reward).
The dynamics are those of Gymnasium's `FrozenLake-v1`. Each seed gives a random solvable 4x4 map: a
cell is frozen with probability 0.8, and start and goal are any two cells (as the authors ran it).
Lakes with the same holes and goal are all held out, or none is. Therefore no state of a held-out
episode ever occurs in training.

Where we differ: `slippery` is a parameter. The paper's ice is slippery: the player moves in the
intended direction with probability 1/3. There no policy exceeds a success of 0.502 on these maps
(exact, by `solve`). The paper's VLM result of 0.630 is above that.
"""

from functools import cache
from typing import Any

import gymnasium
import numpy as np
from PIL import Image, ImageDraw

from envs.base import Observation, same_split
from envs.grid_world import FORM, GridWorld, name_cells

SIDE = 4
SYMBOLS = str.maketrans("SFH", "__O")  # of cells
PLAYER_ON = {"S": "P", "F": "P", "H": "X", "G": "√"}  # symbols of the player, by the cell below
CAPTION_MARKS = {"P": "P", "X": "X", "√": "√", "G": "G√", "O": "OX"}

RULES = """\
You are walking on a frozen lake, seen from above as a grid of 4 x 4 cells. Reach the goal without \
falling into a hole; you have {budget}.{slippery}
{legend}
Actions: Left, Down, Right, Up."""
LEGEND = "Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you on the goal."
IMAGE_LEGEND = (
    "In the image the red figure is you, dark blue cells are holes, the green flag is the goal."
)
SLIPPERY = " The ice is slippery: you may slide to either side of where you want to go."


def random_map(seed: int) -> list[str]:
    """Return the solvable map of this seed: 4 rows of S (start), G (goal), F (frozen), H (hole)."""
    rng = np.random.default_rng(seed)
    while True:
        cells = np.where(rng.random((SIDE, SIDE)) < 0.8, "F", "H")
        start, goal = (divmod(int(k), SIDE) for k in rng.permutation(SIDE * SIDE)[:2])
        cells[start] = "F"
        cells[goal] = "G"
        key = ["".join(row) for row in cells]  # the start is no part of it

        if same_split(key, seed) and is_connected(cells, start, goal):
            cells[start] = "S"
            return ["".join(row) for row in cells]


def is_connected(cells: np.ndarray, start: tuple[int, int], goal: tuple[int, int]) -> bool:
    """Return whether a way without holes leads from start to goal: a flood fill."""
    unvisited = {(row, col) for row, col in np.argwhere(cells != "H")}
    frontier = [start]
    while frontier:
        row, col = frontier.pop()
        neighbours = {(row, col - 1), (row + 1, col), (row, col + 1), (row - 1, col)}
        frontier += neighbours & unvisited
        unvisited -= neighbours
    return goal not in unvisited


def solve(transitions: dict, horizon: int) -> np.ndarray:
    """Return the exact values of all actions with `horizon` actions left, float64 [2, S, A].

    The first row holds if the best actions follow, the second if random ones follow. This is value
    iteration on Gymnasium's table P[s][a] = [(probability, s', reward, done), ...].
    """
    values = np.zeros((2, len(transitions), len(transitions[0])))
    for _ in range(horizon):
        state_values = np.stack([values[0].max(-1), values[1].mean(-1)])  # [2, S]
        values = np.zeros_like(values)
        for state, actions in transitions.items():
            for action, outcomes in actions.items():
                for probability, after, reward, done in outcomes:
                    future = 0.0 if done else state_values[:, after]
                    values[:, state, action] += probability * (reward + future)
    return values


class FrozenLake(GridWorld):
    """The environment. `image` draws the grid instead of writing it.

    The style "terse" shows the grid alone, and in a fifth row what is left, below, right and above
    of the player. There # is the edge.
    """

    layers = 4  # detours need depth
    # Captions name columns, and rows as digits.
    words = (*GridWorld.actions, " _", " #", "√", " G", " O", " a", " b", " c", " d")

    def __init__(self, slippery: bool = False, image: bool = False, **common: Any):
        super().__init__(**common)
        self.slippery = slippery
        self.image = image
        self.warm_start = ((250, 1), (150, 10)) if image else ((400, 1), (200, 10))

    def start(self, seed: int) -> None:
        lake = gymnasium.make("FrozenLake-v1", desc=random_map(seed), is_slippery=self.slippery)
        self.lake = lake.unwrapped
        self.lake.reset(seed=seed)
        self.cells = self.lake.desc.astype(str)  # [4, 4] of S, G, F, H

    def act(self, action: int) -> tuple[float, bool, bool]:
        # `GridWorld.actions` are in Gymnasium's order.
        _, reward, ended, _, _ = self.lake.step(action)
        return float(reward), reward > 0, bool(ended)

    def optimal_reply(self) -> str:
        """Return the action that maximises the probability of success within the turns left."""
        best, _ = solve(self.lake.P, self.max_turns - self.turn)[:, self.lake.s]
        return f"<answer>{self.actions[int(best.argmax())]}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Return the exact probability of success on the map of this seed."""
        self.reset(seed=seed)
        best, random = solve(self.lake.P, self.max_turns)[:, self.lake.s]
        return {"random": float(random.mean()), "optimal": float(best.max())}

    def position(self) -> tuple[int, int]:
        """Return row and column of the player."""
        return divmod(int(self.lake.s), SIDE)

    def grid(self) -> list[str]:
        """Return the rows of the lake with the player, in symbols."""
        cells = self.cells.copy()
        cells[self.position()] = PLAYER_ON[cells[self.position()]]
        return ["".join(row).translate(SYMBOLS) for row in cells]

    def beside(self) -> str:
        """Return the cells left, below, right and above of the player: S, F, H, G, or # (edge)."""
        row, col = np.add(self.position(), 1)
        cells = np.pad(self.cells, 1, constant_values="#")
        return cells[row, col - 1] + cells[row + 1, col] + cells[row, col + 1] + cells[row - 1, col]

    def fifth_row(self) -> str:
        """Return the cells beside the player in symbols."""
        return " ".join(self.beside()).translate(SYMBOLS)

    def caption(self) -> str:
        """Return the cells of player, goal and holes, such as `P b1 G d3 O a2 c4`; of an image also
        its fifth row."""
        caption = name_cells(self.grid(), CAPTION_MARKS)
        return f"{caption} {self.fifth_row()}" if self.image else caption

    def images(self) -> tuple[np.ndarray, ...]:
        """Return the image of the lake, or none if the task is in text."""
        if not self.image:
            return ()
        rows = [*self.cells, [*self.beside()]] if self.style == "terse" else self.cells
        return (draw(np.array(rows), self.position(), self.cell_size),)

    def observe(self) -> Observation:
        if self.style == "terse":
            text = "" if self.image else "\n".join([*self.grid(), f" {self.fifth_row()}"])
            return Observation(text, self.images())

        if self.image:
            legend, state = IMAGE_LEGEND, "The image shows the lake."
        else:
            rows = "\n".join(" ".join(row) for row in self.grid())
            legend, state = LEGEND, f"State:\n{rows}"
        slippery = SLIPPERY if self.slippery else ""
        rules = RULES.format(budget=self.budget(), slippery=slippery, legend=legend)
        return Observation(self.prompt(rules, f"{state}\n{FORM}"), self.images())


ICE = (214, 238, 255)
LINE = (130, 170, 210)
RED = (224, 24, 40)
SHAPES = [  # on which cells, shape, colour, corners x, y, x, y, ... as shares of the cell
    ("#", "rectangle", (90, 90, 90), (0, 0, 1, 1)),
    ("H", "ellipse", (16, 32, 96), (0.04, 0.04, 0.96, 0.96)),
    ("G", "rectangle", (70, 50, 30), (0.18, 0.08, 0.28, 0.94)),  # pole
    ("G", "polygon", (0, 168, 72), (0.28, 0.08, 0.95, 0.33, 0.28, 0.6)),  # flag
    ("player", "ellipse", RED, (0.36, 0.1, 0.64, 0.38)),  # head
    ("player", "polygon", RED, (0.5, 0.3, 0.82, 0.92, 0.18, 0.92)),
]


@cache
def draw_cell(cell: str, has_player: bool, cell_size: int) -> np.ndarray:
    """Return the image of one cell, uint8 [cell_size, cell_size, 3].

    It is drawn four times as large and scaled down, so that its edges are smooth.
    """
    size = 4 * cell_size
    canvas = Image.new("RGB", (size, size), ICE)
    pen = ImageDraw.Draw(canvas)
    for on, shape, color, corners in SHAPES:
        if on == cell or (on == "player" and has_player):
            getattr(pen, shape)([size * share for share in corners], fill=color)
    pen.rectangle((0, 0, size - 1, size - 1), outline=LINE, width=size // 28)
    return np.array(canvas.reduce(4))


def draw(cells: np.ndarray, player: tuple[int, int], cell_size: int) -> np.ndarray:
    """Return the image of cells [R, C] from above, uint8 [R cell_size, C cell_size, 3].

    A ruler along the left and the top edge of each cell shades from dark to light with row and
    column. The image itself shows them, because a tiny vision tower cannot yet tell them from
    positions alone.
    """
    rows, columns = cells.shape
    tiles = np.zeros((rows, cell_size, columns, cell_size, 3), dtype=np.uint8)
    ruler = cell_size // 7
    for row, col in np.ndindex(rows, columns):
        tile = tiles[row, :, col]  # a view, [cell_size, cell_size, 3]
        tile[:] = draw_cell(cells[row, col], (row, col) == player, cell_size)
        tile[:, :ruler] = 40 + 50 * row
        tile[:ruler] = 40 + 50 * col
    return tiles.reshape(rows * cell_size, columns * cell_size, 3)
