"""Draw docs/frozenlake.gif: one held-out map of FrozenLake in images, before and after training.

    python -m docs.make_gif out/frozenlake_vlm-freshper-42/checkpoint

On the left acts the warm-started model that training starts from, on the right the policy of the
folder, both sampled as in an evaluation. Beside each large drawing of the lake stands the image
that the policy gets, pixel by pixel: 56 x 70, with a ruler along each cell, and with a fifth row of
what is left, below, right and above of the player. Of the first held-out maps the GIF shows one on
which the left one falls into a hole and the right one reaches the goal without visiting a cell
twice: the one with the longest way.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from envs.base import EVAL_SEEDS, Observation, parse_answer
from envs.frozenlake import FrozenLake, draw
from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.flags import parse_args
from freshper.models import load_policy
from freshper.rollout import rollout
from freshper.tiny import tiny_model

MAPS = 256
# Pixels.
CELL = 50
SIDE = 4 * CELL
ENLARGED = 3  # of the policy's image
SEEN = ENLARGED * 56  # its width
GAP = 12
PANEL = SIDE + SEEN + 3 * GAP
HEADER = 52
FOOTER = 34
# Milliseconds that a frame stays.
TURN_MS = 600
LAST_MS = 2500
RESULTS = {"H": ", in a hole", "G": ", at the goal"}


class FilmedLake(FrozenLake):
    """A FrozenLake that keeps two images of every state, and the text of every reply."""

    def reset(self, **options: Any) -> tuple:
        self.images: list[np.ndarray] = []
        self.seen: list[np.ndarray] = []
        self.replies = [""]
        return super().reset(**options)

    def observe(self) -> Observation:
        observation = super().observe()
        self.images.append(draw(self.grid(), CELL))
        self.seen.append(observation.images[0])
        return observation

    def step(self, reply: str) -> tuple:
        self.replies.append(reply)
        return super().step(reply)

    def cell(self) -> str:
        """Return the cell on which the episode stands: S, F, H or G."""
        return str(self.cells[self.position()])

    def way(self) -> tuple[bool, int, int]:
        """Return what ranks the way: whether no cell came twice, the number of turns, the number of
        holes."""
        different = {image.tobytes() for image in self.images}
        turns = len(self.images) - 1
        return len(different) > turns, turns, int((self.cells == "H").sum())

    def text(self, turn: int) -> str:
        """Return the line below the image of a turn: the reply, and after the last one the
        result."""
        if turn == 0:
            return ""
        action = parse_answer(self.replies[turn]) or "(unreadable)"
        ended = turn == len(self.images) - 1
        result = RESULTS.get(self.cell(), ", out of turns") if ended else ""
        return f"turn {turn}: {action}{result}"


def act(folder: str, config: Config) -> list[FilmedLake]:
    """Roll out the policy of a folder on the first held-out maps and return their lakes."""
    policy = load_policy(folder, "cpu", torch.float32, freeze_vision=True)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    engine = HFEngine(policy, sampling, config.seed)

    lakes = [FilmedLake(image=True) for _ in range(MAPS)]
    seeds = list(range(EVAL_SEEDS, EVAL_SEEDS + MAPS))
    rollout(engine, policy, lakes, seeds, config.max_tokens, config.max_new_tokens)
    return lakes


def frames(before: FilmedLake, after: FilmedLake) -> list[Image.Image]:
    """Draw both lakes side by side, a frame per turn. A lake that has ended stays as it is."""
    title = ImageFont.load_default(19)
    font = ImageFont.load_default(14)
    drawn = []
    for turn in range(max(len(before.images), len(after.images))):
        page = Image.new("RGB", (2 * PANEL, HEADER + 5 * ENLARGED * 14 + FOOTER), "white")
        pen = ImageDraw.Draw(page)

        for lake, left, name in ((before, 0, "before"), (after, PANEL, "after")):
            last = min(turn, len(lake.images) - 1)
            x = left + GAP
            right = x + SIDE + GAP
            pen.text((x, 4), f"{name} training", fill="black", font=title)
            pen.text((right, HEADER - 20), "what the policy sees", fill="black", font=font)
            page.paste(Image.fromarray(lake.images[last]), (x, HEADER))
            # Nearest neighbor shows the pixels as they are.
            seen = Image.fromarray(lake.seen[last])
            page.paste(
                seen.resize((SEEN, SEEN * 5 // 4), Image.Resampling.NEAREST), (right, HEADER)
            )
            pen.text((x, page.height - FOOTER + 6), lake.text(last), fill="black", font=title)
        drawn.append(page.quantize(64))
    return drawn


def way_after(pair: tuple[FilmedLake, FilmedLake]) -> tuple[bool, int, int]:
    return pair[1].way()


def main() -> None:
    """Choose a map, draw it, and save the GIF."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="a trained policy of frozenlake_vlm: a run's checkpoint")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "frozenlake.gif")
    args = parser.parse_args()
    config = parse_args(["--env", "frozenlake_vlm", "--model", "tiny"]).config
    before = act(str(tiny_model("frozenlake_vlm")), config)
    after = act(args.folder, config)
    start = sum(lake.cell() == "G" for lake in before) / MAPS
    end = sum(lake.cell() == "G" for lake in after) / MAPS
    print(f"success on {MAPS} held-out maps: {start:.2f} before, {end:.2f} after")

    pairs = zip(before, after, strict=True)
    telling = [pair for pair in pairs if pair[0].cell() == "H" and pair[1].cell() == "G"]
    if not telling:
        maps = "none of the maps on which the start falls into a hole"
        parser.error(f"{args.folder} reaches the goal on {maps}")
    drawn = frames(*max(telling, key=way_after))
    options = {
        "append_images": drawn[1:],
        "duration": [TURN_MS] * (len(drawn) - 1) + [LAST_MS],
        "optimize": True,
    }
    drawn[0].save(args.out, save_all=True, loop=0, **options)
    print(f"{args.out}, {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
