"""Shared set-up: one torch thread, tiny policies with random weights, and episodes of random tokens."""

import json
import os
import runpy
from pathlib import Path

SHIM = (
    Path(__file__).parent / "engines/torchvision_shim"
)  # for this process, and for those that tests start
runpy.run_path(str(SHIM / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH")]))

import hypothesis
import numpy as np
import pyarrow.parquet
import pytest
import torch

from envs import ENVS
from freshper.episode import Episode
from freshper.tiny import build_policy

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "repeatable", derandomize=True
)  # the same examples on every machine
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def text_policy():
    return build_policy(ENVS["frozenlake"]())


@pytest.fixture(scope="session")
def vision_policy():
    return build_policy(ENVS["frozenlake_vlm"]())


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, text_policy, vision_policy):
    """Folders of both families, as `--model` wants them."""
    folders = {}
    for family, policy in (("text", text_policy), ("vision", vision_policy)):
        folders[family] = str(tmp_path_factory.mktemp(family))
        policy.save(folders[family])
    return folders


def make_episode(rng, turns=3, prompt=0, vocabulary=200, **fields):
    """Return an episode of random tokens: turns of 1 to 5 action tokens between bridges of 1 to 6."""
    mask = [False] * (prompt or int(rng.integers(2, 8)))
    for turn in range(turns):
        mask += [True] * int(rng.integers(1, 6))
        if turn < turns - 1:
            mask += [False] * int(rng.integers(1, 7))
    mask = np.array(mask)
    turn_rewards = rng.normal(size=turns).astype(np.float32)
    return Episode(
        tokens=rng.choice(vocabulary, len(mask)).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(len(mask)), 0.0).astype(np.float32),
        reward=float(turn_rewards.sum()),
        turn_rewards=turn_rewards,
        **fields,
    )


def speakable_episodes(policy, n):
    """Return n episodes of 1, 3, 5 or 7 turns of tokens that the policy can sample, with an image if it takes any."""
    rng, words = (
        np.random.default_rng(0),
        np.setdiff1d(np.arange(len(policy.tokenizer)), policy.suppressed_ids),
    )
    episodes = [
        make_episode(rng, turns=1 + 2 * (k % 4), prompt=20, vocabulary=words, seed=k)
        for k in range(n)
    ]
    for k, e in enumerate(episodes if policy.image_processor else ()):
        e.images = [np.random.default_rng(k % 3).integers(0, 255, (56, 56, 3), dtype=np.uint8)]
        e.tokens[:16] = policy.image_token_id
    return episodes


def write_rows(path, rows):
    """Write rows of data in the format of the file's ending. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))
    return str(path)
