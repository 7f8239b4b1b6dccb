"""Saving and loading a full replay buffer: our checkpoint against torch.save of the same objects,
in the same run.

    python benchmarks/checkpoint.py                      50,000 text episodes of 130 tokens
    python benchmarks/checkpoint.py --tokens 1000        long ones
    python benchmarks/checkpoint.py --images 20000       with images, each of them in many episodes

torch.save pickles every array of every episode on its own. A checkpoint joins them, so that it
writes a handful of large arrays. Every file is hashed when it is written and before it is loaded.
It can be read without running code, where torch.load needs `weights_only=False`. The tiny model
(0.5 MB) is part of the checkpoint only.
"""

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import common
import numpy as np
import torch

from envs import ENVS
from freshper.buffer import ReplayBuffer
from freshper.checkpoint import RunState, StopSignals, newest
from freshper.config import Config
from freshper.episode import Episode
from freshper.tiny import build_policy


def full_buffer(capacity, tokens, images):
    """Return a buffer of episodes of ten turns with six action tokens, and ten images each, drawn
    from `images`."""
    rng = np.random.default_rng(0)
    pool = list(rng.integers(0, 256, (images, 56, 56, 3), dtype=np.uint8))
    mask = np.zeros(tokens, dtype=bool)
    for turn in range(10):
        end = (turn + 1) * tokens // 10
        mask[end - 6 : end] = True

    episodes = []
    for seed in range(capacity):
        success = bool(seed % 2)
        episode = Episode(
            tokens=rng.integers(0, 280, tokens).astype(np.int32),
            action_mask=mask.copy(),
            behavior_logprobs=np.where(mask, -rng.random(tokens), 0.0).astype(np.float32),
            reward=float(success),
            turn_rewards=np.zeros(10, np.float32),
            images=[pool[k] for k in rng.integers(0, images, 10)] if images else [],
            seed=seed,
            success=success,
        )
        episodes.append(episode)

    buffer = ReplayBuffer(capacity, 0.6, None)
    buffer.add(episodes, np.ones(capacity), step=0)
    return buffer


def run_state(out, buffer, policy):
    """Return the state of a run that has nothing but a buffer and a policy."""
    trainer = SimpleNamespace(
        save=policy.save,
        save_optimizer=lambda folder: None,
        load_optimizer=lambda folder: None,
        state_dict=lambda: {"step": 1},
        load_state_dict=lambda state: None,
    )
    report = SimpleNamespace(folder=out, done=1, evaluations=dict, say=lambda line: None)
    config = Config(resume=str(out), save_every=1, iterations=2)
    parts = {"trainer": trainer, "buffer": buffer}
    return RunState(config, policy, report, StopSignals(), newest(out), parts)


def timed(function, *arguments, **options):
    """Return the seconds of a call."""
    began = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - began


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=130)
    parser.add_argument("--images", type=int, default=0, help="different ones; 0: a text task")
    args = parser.parse_args()
    buffer = full_buffer(args.episodes, args.tokens, args.images)
    policy = build_policy(ENVS["frozenlake"]())
    print(f"{args.episodes:,} episodes of {args.tokens} tokens, {args.images:,} different images")

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        loaded = ReplayBuffer(args.episodes, 0.6, None)
        saving = timed(run_state(out, buffer, policy).save_if_due)
        size = sum(file.stat().st_size for file in (out / "checkpoint").iterdir()) / 1e6
        checking = timed(newest, out)
        loading = timed(run_state(out, loaded, policy).restore)
        times = f"{saving:5.2f} s to save, {loading:5.2f} s to load, {checking:4.2f} s to check"
        print(f"checkpoint:  {times}, {size:.1f} MB")
        for episode, original in zip(loaded.episodes, buffer.episodes, strict=True):
            assert np.array_equal(episode.tokens, original.tokens)

        path = out / "pickled.pt"
        saving = timed(torch.save, buffer.state_dict(), path)
        loading = timed(torch.load, path, weights_only=False)
        size = path.stat().st_size / 1e6
        print(f"torch.save:  {saving:5.2f} s to save, {loading:5.2f} s to load, {size:6.1f} MB")


if __name__ == "__main__":
    main()
