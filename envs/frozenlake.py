"""FrozenLake, as text and as images: walk over the ice to the goal, and avoid the holes.

Paper: appendix D, "FrozenLake (LLM)" and "FrozenLake (VLM)"; Table 2 (10 actions, binary reward).
The dynamics are those of Gymnasium's `FrozenLake-v1`. Each seed gives a random solvable 4x4 map: a
cell is frozen with probability 0.8, and start and goal are any two cells (as the authors ran it).
Maps that share holes and goal always belong to the same split. Therefore no state of a held-out
episode ever occurs in training.

Where we differ: `slippery` is a parameter. The paper's ice is slippery: the player moves in the
intended direction with probability 1/3. There the optimal policy succeeds in 0.49 of the episodes
(exact, by `action_values`; the first 1,024 held-out maps). The paper's VLM result is 0.630.
"""

from functools import cache
from typing import Any

import gymnasium
import numpy as np
from PIL import Image, ImageDraw

from envs.base import Observation, same_split
from envs.grid_world import FORM, GridWorld, Outcome, name_cells

SIDE = 4
# Cells are Gymnasium's letters: S (start), F (frozen), H (hole), G (goal). # is the edge.
SYMBOLS = str.maketrans("SFH", "__O")  # of cells in texts
PLAYER_ON = str.maketrans("SFHG", "PPX√")  # of the player on a cell
CAPTION_MARKS = {"P": "P", "X": "X", "√": "√", "G": "G√", "O": "HX"}

RULES = """\
You are walking on a frozen lake, seen from above as a grid of 4 x 4 cells. Reach the goal without \
falling into a hole; you have {budget} actions.{slippery}
{legend}
Actions: Left, Down, Right, Up."""
LEGEND = "Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you on the goal."
IMAGE_LEGEND = (
    "In the image the red figure is you, dark blue cells are holes, the green flag is the goal."
)
SLIPPERY = " The ice is slippery: you may slide to either side of where you want to go."


def random_map(seed: int) -> np.ndarray:
    """Return the cells of the solvable map of this seed, [4, 4] of S, F, H, G."""
    # The import takes a third of a second, and other tasks do without.
    from scipy import ndimage

    rng = np.random.default_rng(seed)
    while True:
        cells = np.where(rng.random((SIDE, SIDE)) < 0.8, "F", "H")
        start, goal = rng.permutation(SIDE * SIDE)[:2]
        cells.flat[start] = "F"
        cells.flat[goal] = "G"
        holes_and_goal = ["".join(row) for row in cells]
        if not same_split(holes_and_goal, seed):
            continue

        # Cells with the same number are connected by ways without holes.
        areas, _ = ndimage.label(cells != "H")
        if areas.flat[start] == areas.flat[goal]:
            cells.flat[start] = "S"
            return cells


def action_values(transitions: dict, horizon: int) -> np.ndarray:
    """Return the exact value of each action if the best ones follow, with `horizon` actions left,
    float64 [S, A].

    This is value iteration on Gymnasium's table P[s][a] = [(probability, s', reward, done), ...].
    """
    values = np.zeros((len(transitions), len(transitions[0])))
    for _ in range(horizon):
        best = values.max(axis=1)  # [S]
        for state, actions in transitions.items():
            for action, outcomes in actions.items():
                values[state, action] = sum(
                    probability * (reward + (not done) * best[after])
                    for probability, after, reward, done in outcomes
                )
    return values


class FrozenLake(GridWorld):
    """The environment, as text.

    The style "terse" shows the grid alone, and in a fifth row what is left, below, right and above
    of the player. There # is the edge.
    """

    image = False  # whether the grid is drawn instead of written
    settings = ("slippery",)
    warm_start = ((400, 1), (200, 10))
    # Captions name columns by these letters, and rows by digits.
    words = (*GridWorld.actions, " _", " #", "√", " G", " O", " a", " b", " c", " d")

    def __init__(self, slippery: bool = False, **common: Any):
        super().__init__(**common)
        self.slippery = slippery

    def start(self, seed: int) -> None:
        self.cells = random_map(seed)
        self.edged = np.pad(self.cells, 1, constant_values="#")
        self.lake = gymnasium.make(
            "FrozenLake-v1", desc=self.cells, is_slippery=self.slippery
        ).unwrapped
        self.lake.reset()
        # random_map drew from the stream of this seed. Slips from it would follow from the map.
        self.lake.np_random = np.random.default_rng((seed, 2))

    def act(self, action: int) -> Outcome:
        # `GridWorld.actions` are in Gymnasium's order.
        _, reward, ended, *_ = self.lake.step(action)
        return reward, reward > 0, ended

    def optimal_reply(self) -> str:
        """Return the action that maximises the probability of success within the turns left."""
        values = action_values(self.lake.P, self.max_turns - self.turn)
        return f"<answer>{self.actions[values[self.lake.s].argmax()]}</answer>"

    def grid(self) -> np.ndarray:
        """Return the cells [4, 4] with the player: P, or X in a hole, or √ at the goal."""
        grid = self.cells.copy()
        grid.flat[self.lake.s] = grid.flat[self.lake.s].translate(PLAYER_ON)
        return grid

    def beside(self) -> list[str]:
        """Return the cells left, below, right and above of the player."""
        row, col = divmod(self.lake.s, SIDE)
        return self.edged[row : row + 3, col : col + 3].flat[[3, 7, 5, 1]].tolist()

    def caption(self) -> str:
        """Return the cells of player, goal and holes, such as `P b1 G d3 O a2 c4`. The caption of
        an image ends with its fifth row."""
        caption = name_cells(self.grid(), CAPTION_MARKS)
        if self.image:
            caption += f" {' '.join(self.beside())}"
        return caption.translate(SYMBOLS)

    def observe(self) -> Observation:
        grid = self.grid()
        if self.style == "full":
            rows = "\n".join(map(" ".join, grid)).translate(SYMBOLS)
            state = "The image shows the lake." if self.image else f"State:\n{rows}"
            legend = IMAGE_LEGEND if self.image else LEGEND
            slippery = SLIPPERY if self.slippery else ""
            text = self.prompt(RULES, f"{state}\n{FORM}", slippery=slippery, legend=legend)
        elif self.image:
            text = ""
            grid = np.vstack([grid, self.beside()])
        else:
            rows = "\n".join(map("".join, grid))
            text = f"{rows}\n {' '.join(self.beside())}".translate(SYMBOLS)

        images = (draw(grid, self.cell_size),) if self.image else ()
        return Observation(text, images)


class FrozenLakeVLM(FrozenLake):
    """The environment, as images."""

    image = True
    warm_start = ((250, 1), (150, 10))


ICE = "#d6eeff"
EDGE = "#5a5a5a"
LINE = "#82aad2"
RED = "#e01828"
SHAPES = [  # on which cells, shape, colour, corners x, y, x, y, ... as shares of the cell
    ("HX", "ellipse", "#102060", (0.04, 0.04, 0.96, 0.96)),
    ("G√", "rectangle", "#46321e", (0.18, 0.08, 0.28, 0.94)),  # pole
    ("G√", "polygon", "#00a848", (0.28, 0.08, 0.95, 0.33, 0.28, 0.6)),  # flag
    ("PX√", "ellipse", RED, (0.36, 0.1, 0.64, 0.38)),  # head
    ("PX√", "polygon", RED, (0.5, 0.3, 0.82, 0.92, 0.18, 0.92)),
]


@cache
def tile(symbol: str, cell_size: int) -> np.ndarray:
    """Return the image of a symbol, uint8 [cell_size, cell_size, 3], which cannot be written to.

    It is drawn four times as large and scaled down, so that edges are smooth.
    """
    large = 4 * cell_size
    canvas = Image.new("RGB", (large, large), EDGE if symbol == "#" else ICE)
    pen = ImageDraw.Draw(canvas)
    for symbols, shape, color, corners in SHAPES:
        if symbol in symbols:
            getattr(pen, shape)([large * share for share in corners], fill=color)
    pen.rectangle((0, 0, large - 1, large - 1), outline=LINE, width=large // 28)
    return np.asarray(canvas.reduce(4))


def draw(grid: np.ndarray, cell_size: int) -> np.ndarray:
    """Return the image of a grid of symbols [R, C], uint8 [R cell_size, C cell_size, 3].

    Along the left and the top edge of each cell, a ruler shades with row and column, because a tiny
    vision tower cannot yet tell them from positions alone.
    """
    rows, columns = grid.shape
    image = np.zeros((rows, cell_size, columns, cell_size, 3), np.uint8)  # row, y, column, x
    ruler = cell_size // 7

    for (row, col), symbol in np.ndenumerate(grid):
        cell = image[row, :, col]  # [cell_size, cell_size, 3]
        cell[:] = tile(symbol, cell_size)
        cell[:, :ruler] = 40 + 50 * row
        cell[:ruler] = 40 + 50 * col

    return image.reshape(rows * cell_size, -1, 3)
