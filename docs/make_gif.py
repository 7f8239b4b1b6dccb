"""Draw docs/frozenlake.gif: one held-out map of FrozenLake in images, before and after training.

    python -m docs.make_gif out/frozenlake_vlm-freshper-42/checkpoint

On the left acts the warm-started model that training starts from, on the right the policy of the given folder, both
sampled as in an evaluation. Of the first held-out maps it shows one on which the left one falls into a hole and the
right one reaches the goal without visiting a cell twice: the one with the longest way.
"""

import argparse
from pathlib import Path

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
CELL, MARGIN, HEADER, FOOTER = 56, 14, 28, 30  # pixels
TURN_MS, LAST_MS = 600, 2500


class FilmedLake(FrozenLake):
    """A FrozenLake that keeps an image of every state and the text of every reply."""

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[Observation, dict]:
        result = super().reset(seed=seed, options=options)
        self.images, self.replies = [draw(self.grid(), CELL)], [""]
        return result

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        result = super().step(reply)
        self.images.append(draw(self.grid(), CELL))
        self.replies.append(reply)
        return result

    def cell(self) -> str:
        """Return the cell on which the episode stands: S, F, H or G."""
        return str(self.cells[self.position()])

    def way(self) -> tuple[bool, int, int]:
        """Return what ranks the way: whether no cell came twice, the number of turns, the number of holes."""
        no_cell_twice = len({image.tobytes() for image in self.images}) == len(self.images)
        return no_cell_twice, len(self.images) - 1, int((self.cells == "H").sum())


def act(folder: str, config: Config) -> list[FilmedLake]:
    """Roll out the policy of a folder on the first held-out maps and return their lakes."""
    policy = load_policy(folder, "cpu", torch.float32, freeze_vision=True)
    engine = HFEngine(policy, Sampling(config.temperature, config.top_k, config.top_p), config.seed)
    lakes = [FilmedLake(image=True) for _ in range(MAPS)]
    seeds = list(range(EVAL_SEEDS, EVAL_SEEDS + MAPS))
    rollout(engine, policy, lakes, seeds, config.max_tokens, config.max_new_tokens)
    return lakes


def frames(lakes: tuple[FilmedLake, FilmedLake]) -> list[Image.Image]:
    """Draw both lakes side by side, a frame per turn; one that has ended stays as it is."""
    side, font = 4 * CELL, ImageFont.load_default(15)
    results = {"H": "in a hole", "G": "at the goal"}
    drawn = []
    for turn in range(max(len(lake.images) for lake in lakes)):
        page = Image.new("RGB", (2 * side + 3 * MARGIN, side + HEADER + FOOTER), "white")
        pen = ImageDraw.Draw(page)
        for k, (lake, name) in enumerate(
            zip(lakes, ("before training", "after training"), strict=True)
        ):
            x, last = MARGIN + k * (side + MARGIN), len(lake.images) - 1
            page.paste(Image.fromarray(lake.images[min(turn, last)]), (x, HEADER))
            result = results.get(lake.cell(), "out of turns")
            said = parse_answer(lake.replies[min(turn, last)]) or "(unreadable)"
            below = f"turn {min(turn, last)}: {said}" + (f", {result}" if turn >= last else "")
            pen.text((x, 5), name, fill="black", font=font)
            pen.text((x, HEADER + side + 6), below if turn else "", fill="black", font=font)
        drawn.append(page.quantize(64))
    return drawn


def main() -> None:
    """Choose a map, draw it, and save the GIF."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="a trained policy of frozenlake_vlm: a run's checkpoint")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "frozenlake.gif")
    args = parser.parse_args()
    config = parse_args(["--env", "frozenlake_vlm", "--model", "tiny"]).config
    pairs = list(
        zip(act(str(tiny_model("frozenlake_vlm")), config), act(args.folder, config), strict=True)
    )
    rates = [np.mean([lake.cell() == "G" for lake in lakes]) for lakes in zip(*pairs, strict=True)]
    print(f"success on {MAPS} held-out maps: {rates[0]:.2f} before, {rates[1]:.2f} after")
    telling = [pair for pair in pairs if pair[0].cell() == "H" and pair[1].cell() == "G"]
    if not telling:
        parser.error(
            f"{args.folder} reaches the goal on none of the maps on which the start falls into a hole"
        )
    drawn = frames(max(telling, key=lambda pair: pair[1].way()))
    durations = [TURN_MS] * (len(drawn) - 1) + [LAST_MS]
    drawn[0].save(
        args.out, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True
    )
    print(f"{args.out}, {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
