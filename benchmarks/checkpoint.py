"""Saving a full replay buffer: our checkpoint against torch.save of the same objects, in the same run.

    python benchmarks/checkpoint.py                       50,000 text episodes of about 130 tokens
    python benchmarks/checkpoint.py --tokens 1000         long ones
    python benchmarks/checkpoint.py --pictures 20000      with pictures, of which each stands in many episodes

torch.save pickles every array of every episode on its own. Ours joins them, so that a handful of large arrays is
written, and packs at the next save only what is new; it also computes and stores the SHA-256 of each file and flushes
it to the disk, which torch.save does not: its seconds are given with an fsync as well. The tiny model (0.5 MB) is part
of ours only.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from envs import ENVS
from freshper import checkpoint
from freshper.buffer import ReplayBuffer
from freshper.episode import Episode
from freshper.episode_files import EpisodeFiles
from freshper.tiny import build_policy


def full_buffer(capacity, tokens, pictures):
    """Episodes of ten turns of six action tokens, as FrozenLake's are; ten pictures each, drawn from `pictures`."""
    rng = np.random.default_rng(0)
    shown = list(rng.integers(0, 256, (pictures, 56, 56, 3), dtype=np.uint8)) if pictures else []
    mask = np.zeros(tokens, dtype=bool)
    for turn in range(10):
        end = (turn + 1) * tokens // 10
        mask[end - 6 : end] = True
    episodes = []
    for k in range(capacity):
        episodes.append(
            Episode(
                tokens=rng.integers(0, 280, tokens).astype(np.int32),
                action_mask=mask.copy(),
                behavior_logprobs=np.where(mask, -rng.random(tokens), 0.0).astype(np.float32),
                reward=float(k % 2),
                turn_rewards=np.zeros(10, np.float32),
                images=[shown[i] for i in rng.integers(0, pictures, 10)] if pictures else [],
                env="frozenlake",
                seed=k,
                info={"success": bool(k % 2), "invalid": 0, "moments": (0.5, 0.5)},
            )
        )
    buffer = ReplayBuffer(capacity, 0.6, None)
    buffer.add(episodes, np.ones(capacity), step=0)
    return buffer


def timed(what):
    began = time.perf_counter()
    result = what()
    return time.perf_counter() - began, result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=130)
    parser.add_argument("--new", type=int, default=2560, help="between two saves: 20 iterations of 128")
    parser.add_argument("--pictures", type=int, default=0, help="different ones; 0: a text task")
    args = parser.parse_args()
    buffer = full_buffer(args.episodes, args.tokens, args.pictures)
    policy = build_policy(ENVS["frozenlake"]())
    print(f"{args.episodes:,} episodes of {args.tokens} tokens, {args.pictures:,} different pictures")

    files = EpisodeFiles()

    def save_ours(out, done):
        state = buffer.state_dict()
        episodes = state.pop("episodes")
        checkpoint.save(out, done, policy, {"buffer": state}, 0, 1, episodes, files)

    def load_ours(out):
        found, problems = checkpoint.find(out)
        assert not problems
        return checkpoint.read_state(found)["episodes"]

    def save_theirs(path):
        with path.open("wb") as file:
            torch.save(buffer.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    with tempfile.TemporaryDirectory() as folder:
        out, path = Path(folder), Path(folder) / "state.pt"
        seconds, _ = timed(lambda: save_ours(out, 1))
        buffer.add(buffer.episodes[: args.new], np.ones(args.new), step=1)  # copies: new episodes to the buffer
        increment, _ = timed(lambda: save_ours(out, 2))
        size = sum(p.stat().st_size for p in (out / "checkpoint").iterdir()) / 1e6
        loading, episodes = timed(lambda: load_ours(out))
        print(f"this project: {seconds:6.2f} s to save, {loading:6.2f} s to check and load, {size:8.1f} MB")
        print(f"              {increment:6.2f} s to save again with {args.new} new episodes")
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(episodes, buffer.episodes, strict=True))
        seconds, _ = timed(lambda: save_theirs(path))
        size = path.stat().st_size / 1e6
        loading, _ = timed(lambda: torch.load(path, weights_only=False))
        print(f"torch.save:   {seconds:6.2f} s to save, {loading:6.2f} s to load,           {size:8.1f} MB")


if __name__ == "__main__":
    main()
