"""FrozenLake, as text and as pictures: walk over the ice to the goal, avoid the holes.

Paper: appendix D, "FrozenLake (LLM)" and "FrozenLake (VLM)"; Table env_details (10 actions, binary reward).
The dynamics are Gymnasium's own `FrozenLake-v1`; ours are the maps, the words and the drawing.

Each seed gives a new random solvable 4x4 map: every cell is frozen with probability 0.8, start and goal are
any two cells (as the authors ran it). Success earns 1 at the goal; an unparsable reply leaves the state as it
is, costs the turn and earns the format penalty.

Where we differ: `slippery` is a parameter. The paper describes slippery ice (the intended direction with
probability 1/3), for which no policy exceeds a success of 0.502 on these maps within 10 actions; its VLM
result of 0.630 is therefore from ice that is not slippery. `solve` below gives these bounds exactly.
"""

from functools import cache

import gymnasium
import numpy as np
from PIL import Image, ImageDraw

from envs.base import FORMAT_PENALTY, Observation, TextEnv, observations, parse_answer

ACTIONS = ("Left", "Down", "Right", "Up")  # Gymnasium's order
SIDE = 4
FROZEN_PROBABILITY = 0.8

RULES = """\
You are walking on a frozen lake, seen from above as a grid of {side} x {side} cells. Reach the goal without \
falling into a hole; you have {turns} actions.{slippery}
{legend}
Actions: Left, Down, Right, Up.
"""
LEGEND = "Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you on the goal."
PICTURE_LEGEND = "In the picture the red figure is you, dark blue cells are holes, the green flag is the goal."
FORM = "Reply with one action in the form <answer> action </answer>, for example <answer> Right </answer>."


def random_map(seed: int) -> list[str]:
    """The solvable map of this seed: 4 rows of S (start), G (goal), F (frozen), H (hole)."""
    rng = np.random.default_rng(seed)
    while True:
        cells = np.where(rng.random((SIDE, SIDE)) < FROZEN_PROBABILITY, "F", "H")
        start, goal = (divmod(int(k), SIDE) for k in rng.permutation(SIDE * SIDE)[:2])
        cells[start], cells[goal] = "S", "G"
        if _reachable(cells, start, goal):
            return ["".join(row) for row in cells]


def cell_name(row: int, col: int) -> str:
    """Column a to d, row 1 to 4 from the top."""
    return f"{'abcd'[col]}{row + 1}"


def _reachable(cells: np.ndarray, start: tuple[int, int], goal: tuple[int, int]) -> bool:
    seen, frontier = {start}, [start]
    while frontier:
        row, col = frontier.pop()
        for cell in ((row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)):
            if max(cell) < SIDE and min(cell) >= 0 and cells[cell] != "H" and cell not in seen:
                seen.add(cell)
                frontier.append(cell)
    return goal in seen


def solve(transitions: dict, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Finite-horizon dynamic programming over Gymnasium's table P[s][a] = [(probability, s', reward, done)].

    Returns the probability of success from each state with h = 0..horizon actions left, for the best policy
    `optimal` float64 [horizon + 1, S, A] (the value of each action; the maximum over A is the state's) and
    for uniformly random actions `random` float64 [horizon + 1, S].
    """
    n_states, n_actions = len(transitions), len(transitions[0])
    optimal = np.zeros((horizon + 1, n_states, n_actions))
    random = np.zeros((horizon + 1, n_states))
    for h in range(1, horizon + 1):
        best, mean = optimal[h - 1].max(-1), random[h - 1]
        for s in range(n_states):
            for a in range(n_actions):
                for p, after, reward, done in transitions[s][a]:
                    optimal[h, s, a] += p * (reward + (not done) * best[after])
                    random[h, s] += p * (reward + (not done) * mean[after]) / n_actions
    return optimal, random


class FrozenLake(TextEnv):
    """`style` "full" writes rules, legend, grid and form out for a pretrained model; "terse" shows the grid alone
    for a tiny one. `image` draws the grid instead of writing it; `cell_size` is in pixels."""

    words = (*ACTIONS, "√", " G", " O", " a", " b", " c", " d")  # in captions a cell is a column and a row

    def __init__(
        self,
        slippery: bool = False,
        image: bool = False,
        style: str = "terse",
        cell_size: int = 14,
        format_penalty: float = FORMAT_PENALTY,
        max_turns: int = 0,
    ):
        super().__init__(style, format_penalty, max_turns)
        self.slippery, self.image, self.cell_size = slippery, image, cell_size
        self.warm_start = ((250, 1), (150, 10)) if image else ((400, 1), (200, 10))
        side = SIDE * cell_size
        self.observation_space = observations(5000, side, side)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Observation, dict]:
        """The map and every slip of the ice follow from `seed`."""
        super().reset(seed=seed)
        map_seed = self.episode_seed(seed)
        desc = random_map(map_seed)
        lake = gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=self.slippery, disable_env_checker=True)
        self.lake = lake.unwrapped
        self.lake.reset(seed=map_seed)
        self.turn, self.last_reward = 0, 0.0
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self.turn += 1
        action = parse_answer(reply)
        info = {"success": False, "valid": action in ACTIONS}
        terminated, reward = False, -self.format_penalty
        if info["valid"]:
            _, reward, terminated, _, _ = self.lake.step(ACTIONS.index(action))
            info["success"] = self._cell() == "G"
        self.last_reward = float(reward)
        return self.observe(), self.last_reward, bool(terminated), self.turn >= self.max_turns, info

    def random_reply(self, rng: np.random.Generator) -> str:
        return f"<answer>{ACTIONS[rng.integers(4)]}</answer>"

    def optimal_reply(self) -> str:
        """The action that maximises the probability of success within the turns that are left."""
        optimal, _ = solve(self.lake.P, self.max_turns - self.turn)
        return f"<answer>{ACTIONS[int(optimal[-1, self.lake.s].argmax())]}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Exact probability of success on the map of this seed, for a `random` and an `optimal` player."""
        self.reset(seed=seed)
        optimal, random = solve(self.lake.P, self.max_turns)
        return {"random": float(random[-1, self.lake.s]), "optimal": float(optimal[-1, self.lake.s].max())}

    def caption(self) -> str:
        """The state in words, cell by cell: `P b1 G d3 O a2 c4`. Columns are a to d, rows 1 to 4 from the top."""
        marks = {b"S": "P", b"F": "P", b"H": "X", b"G": "√"}
        player = divmod(int(self.lake.s), SIDE)
        holes = "".join(f" {cell_name(*cell)}" for cell in np.argwhere(self.lake.desc == b"H"))
        goal = cell_name(*np.argwhere(self.lake.desc == b"G")[0])
        return f"{marks[self.lake.desc[player]]} {cell_name(*player)} G {goal}" + (" O" + holes if holes else "")

    def _cell(self) -> str:
        return self.lake.desc[divmod(int(self.lake.s), SIDE)].decode()

    def _grid(self, separator: str) -> str:
        symbols = {"S": "_", "F": "_", "H": "O", "G": "G"}
        rows = [[symbols[cell.decode()] for cell in row] for row in self.lake.desc]
        row, col = divmod(int(self.lake.s), SIDE)
        rows[row][col] = {"_": "P", "O": "X", "G": "√"}[rows[row][col]]
        return "\n".join(separator.join(row) for row in rows)

    def observe(self) -> Observation:
        """What a player sees now."""
        images = (draw(self.lake.desc, int(self.lake.s), self.cell_size),) if self.image else ()
        if self.style == "terse":
            return Observation("" if self.image else self._grid(""), images)
        state = "The picture shows the lake." if self.image else "State:\n" + self._grid(" ")
        if self.turn == 0:
            slippery = " The ice is slippery: you may slide to either side of where you want to go."
            opening = RULES.format(
                side=SIDE,
                turns=self.max_turns,
                slippery=slippery if self.slippery else "",
                legend=PICTURE_LEGEND if self.image else LEGEND,
            )
        else:
            opening = f"Reward: {self.last_reward:g}.\n"
        left = self.max_turns - self.turn
        return Observation(f"{opening}Turn {self.turn + 1}, actions left: {left}.\n{state}\n{FORM}", images)


ICE, HOLE, GOAL, PLAYER, LINE = (214, 238, 255), (16, 32, 96), (0, 168, 72), (224, 24, 40), (130, 170, 210)


@cache
def _tile(cell: str, player: bool, size: int) -> np.ndarray:
    """One cell, drawn at four times its size and scaled down, uint8 [size, size, 3]."""
    big = 4 * size
    tile = Image.new("RGB", (big, big), ICE)
    pen = ImageDraw.Draw(tile)

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, ...]:
        return left * big, top * big, right * big, bottom * big

    if cell == "H":
        pen.ellipse(box(0.04, 0.04, 0.96, 0.96), fill=HOLE)
    if cell == "G":
        pen.rectangle(box(0.18, 0.08, 0.28, 0.94), fill=(70, 50, 30))  # the pole
        pen.polygon([(0.28 * big, 0.08 * big), (0.95 * big, 0.33 * big), (0.28 * big, 0.6 * big)], fill=GOAL)
    if player:
        pen.ellipse(box(0.36, 0.1, 0.64, 0.38), fill=PLAYER)  # head
        pen.polygon([(0.5 * big, 0.3 * big), (0.82 * big, 0.92 * big), (0.18 * big, 0.92 * big)], fill=PLAYER)
    pen.rectangle((0, 0, big - 1, big - 1), outline=LINE, width=max(1, big // 28))
    return np.asarray(tile.resize((size, size), Image.Resampling.BOX))


def draw(desc: np.ndarray, state: int, cell_size: int) -> np.ndarray:
    """The lake from above, uint8 [4 cell_size, 4 cell_size, 3].

    A ruler along the left and the top edge shades from dark to light, so that a cell's row and column can be
    seen in the picture itself: a tiny vision tower cannot yet tell them from positions alone.
    """
    picture = np.zeros((SIDE * cell_size, SIDE * cell_size, 3), dtype=np.uint8)
    ruler = max(1, cell_size // 7)
    for row in range(SIDE):
        for col in range(SIDE):
            tile = _tile(desc[row, col].decode(), row * SIDE + col == state, cell_size).copy()
            tile[:, :ruler] = 40 + 60 * row
            tile[:ruler, :] = 40 + 60 * col
            picture[row * cell_size : (row + 1) * cell_size, col * cell_size : (col + 1) * cell_size] = tile
    return picture


if __name__ == "__main__":
    from envs.play import main

    main(FrozenLake)
