"""FrozenLake, as text and as images: walk over the ice to the goal, avoid the holes.

Paper: appendix D, "FrozenLake (LLM)" and "FrozenLake (VLM)"; Table 2 (10 actions, binary reward). The dynamics are
Gymnasium's own `FrozenLake-v1`. Each seed gives a random solvable 4x4 map: a cell is frozen with probability 0.8, start
and goal are any two cells (as the authors ran it). Lakes with the same holes and goal are all held out, or none is: no
state of a held-out episode ever occurs in training.

Where we differ: `slippery` is a parameter. On the paper's slippery ice (the intended direction with probability 1/3)
no policy exceeds a success of 0.502 on these maps (exact, by `solve`); its VLM result of 0.630 is above that.
"""

from typing import Any

import gymnasium
import numpy as np
from PIL import Image, ImageDraw

from envs.base import Observation, fits
from envs.grid_world import FORM, GridWorld, cell_name

SIDE = 4
SYMBOLS = str.maketrans("SFH", "__O")  # of cells
PLAYER_ON = {"S": "P", "F": "P", "H": "X", "G": "√"}  # symbols of the player, by the cell under it

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
        cells[start], cells[goal] = "F", "G"
        if not fits(["".join(row) for row in cells], seed):
            continue
        cells[start] = "S"
        near = np.pad(cells == "S", 1)  # has a border, `reached` none
        reached = near[1:-1, 1:-1]
        for _ in range(SIDE * SIDE):
            reached |= (cells != "H") & (
                near[:-2, 1:-1] | near[2:, 1:-1] | near[1:-1, :-2] | near[1:-1, 2:]
            )
        if reached[goal]:
            return ["".join(row) for row in cells]


def solve(transitions: dict, horizon: int) -> np.ndarray:
    """Return the exact value of each action with `horizon` actions left, if the best ones follow and if random ones
    follow, float64 [2, S, A], from Gymnasium's table P[s][a] = [(probability, s', reward, done)]."""
    values = np.zeros((2, len(transitions), len(transitions[0])))
    for _ in range(horizon):
        after = np.stack([values[0].max(-1), values[1].mean(-1)])
        values = np.zeros_like(values)
        for s, actions in transitions.items():
            for a, outcomes in actions.items():
                for p, to, reward, done in outcomes:
                    values[:, s, a] += p * (reward + (not done) * after[:, to])
    return values


class FrozenLake(GridWorld):
    """`image` draws the grid instead of writing it. `style` "terse" shows the grid alone, and in a fifth row what is
    left, below, right and above of the player, # the edge."""

    settings = ("slippery",)
    layers = 4  # detours need depth
    words = (
        *GridWorld.actions,
        " _",
        " #",
        "√",
        " G",
        " O",
        " a",
        " b",
        " c",
        " d",
    )  # captions name column and row

    def __init__(self, slippery: bool = False, image: bool = False, **common: Any):
        super().__init__(**common)
        self.slippery, self.image = slippery, image
        self.warm_start = ((250, 1), (150, 10)) if image else ((400, 1), (200, 10))

    def start(self, seed: int) -> None:
        self.lake = gymnasium.make(
            "FrozenLake-v1", desc=random_map(seed), is_slippery=self.slippery
        ).unwrapped
        self.lake.reset(seed=seed)
        self.cells = self.lake.desc.astype(str)  # [4, 4] of S, G, F, H

    def act(self, action: int) -> tuple[float, bool, bool]:
        _, reward, ended, _, _ = self.lake.step(
            action
        )  # GridWorld.actions are in Gymnasium's order
        return float(reward), reward > 0, bool(ended)

    def optimal_reply(self) -> str:
        """Return the action that maximises the probability of success within the turns that are left."""
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

    def beside(self) -> np.ndarray:
        """Return the cells left, below, right and above of the player, [4] of S, G, F, H and, for the edge, #."""
        walled, (row, col) = np.pad(self.cells, 1, constant_values="#"), np.add(self.position(), 1)
        return walled[[row, row + 1, row, row - 1], [col - 1, col, col + 1, col]]

    def caption(self) -> str:
        """Return the cells of player, goal and holes, such as `P b1 G d3 O a2 c4`; of an image also its fifth row."""
        here = self.position()
        goal, holes = (
            "".join(f" {cell_name(*at)}" for at in np.argwhere(self.cells == cell)) for cell in "GH"
        )
        beside = f" {' '.join(self.beside())}".translate(SYMBOLS) if self.image else ""
        return (
            f"{PLAYER_ON[self.cells[here]]} {cell_name(*here)} G{goal}"
            + (f" O{holes}" if holes else "")
            + beside
        )

    def observe(self) -> Observation:
        here, cells = self.position(), self.cells.copy()
        shown = np.vstack([cells, self.beside()]) if self.style == "terse" else cells
        images = (draw(shown, here, self.cell_size),) if self.image else ()
        cells[here] = PLAYER_ON[cells[here]]
        grid = "\n".join(map(("" if self.style == "terse" else " ").join, cells)).translate(SYMBOLS)
        if self.style == "terse":
            beside = f" {' '.join(self.beside())}".translate(SYMBOLS)
            return Observation("" if self.image else f"{grid}\n{beside}", images)
        state = "The image shows the lake." if self.image else f"State:\n{grid}"
        slippery, legend = SLIPPERY if self.slippery else "", IMAGE_LEGEND if self.image else LEGEND
        rules = RULES.format(budget=self.budget(), slippery=slippery, legend=legend)
        return Observation(self.prompt(rules, f"{state}\n{FORM}"), images)


ICE, LINE, RED = (214, 238, 255), (130, 170, 210), (224, 24, 40)
SHAPES = [  # on which cells, shape, colour, corners x, y, x, y, ... as shares of the cell
    ("#", "rectangle", (90, 90, 90), (0, 0, 1, 1)),
    ("H", "ellipse", (16, 32, 96), (0.04, 0.04, 0.96, 0.96)),
    ("G", "rectangle", (70, 50, 30), (0.18, 0.08, 0.28, 0.94)),  # pole
    ("G", "polygon", (0, 168, 72), (0.28, 0.08, 0.95, 0.33, 0.28, 0.6)),  # flag
    ("player", "ellipse", RED, (0.36, 0.1, 0.64, 0.38)),  # head
    ("player", "polygon", RED, (0.5, 0.3, 0.82, 0.92, 0.18, 0.92)),
]


def draw(cells: np.ndarray, player: tuple[int, int], cell_size: int) -> np.ndarray:
    """Return cells [R, 4] from above, uint8 [R cell_size, 4 cell_size, 3], drawn four times as large and scaled down.
    A ruler along the left and the top edge of each cell shades from dark to light, so that the image itself shows row
    and column: a tiny vision tower cannot yet tell them from positions alone."""
    (rows, columns), big = cells.shape, 4 * cell_size
    canvas = Image.new("RGB", (columns * big, rows * big), ICE)
    pen = ImageDraw.Draw(canvas)
    for row, col in np.ndindex(rows, columns):
        for on, shape, color, corners in SHAPES:
            if on == cells[row, col] or (on == "player" and (row, col) == player):
                places = [
                    big * (at + share) for at, share in zip((col, row) * 3, corners, strict=False)
                ]
                getattr(pen, shape)(places, fill=color)
        pen.rectangle(
            (big * col, big * row, big * (col + 1) - 1, big * (row + 1) - 1),
            outline=LINE,
            width=big // 28,
        )
    image = np.array(canvas.reduce(4))
    tiles, ruler = (
        image.reshape(rows, cell_size, columns, cell_size, 3),
        cell_size // 7,
    )  # row, y, column, x
    shades = np.arange(40, 250, 50, dtype=np.uint8)
    tiles[:, :, :, :ruler] = shades[:rows, None, None, None, None]
    tiles[:, :ruler] = shades[:columns, None, None]
    return image
