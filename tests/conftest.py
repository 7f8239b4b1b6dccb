"""Shared set-up: one torch thread, tiny policies with random weights, and episodes of random tokens."""

import os
import runpy
from pathlib import Path

SHIM = Path(__file__).parent / "engines/torchvision_shim"  # for this process, and for those that tests start
runpy.run_path(str(SHIM / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH")]))

import hypothesis
import numpy as np
import pytest
import torch

from envs import ENVS
from freshper.episode import Episode
from freshper.tiny import build_policy

torch.set_num_threads(1)
hypothesis.settings.register_profile("repeatable", derandomize=True)  # the same examples on every machine
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


def make_episode(rng, turns=3, vocabulary=200, image=None, reward=None, **fields):
    """Return an episode of random tokens: turns of 1 to 5 action tokens between bridges of 1 to 6."""
    mask = [False] * int(rng.integers(2, 8))
    for turn in range(turns):
        mask += [True] * int(rng.integers(1, 6))
        if turn < turns - 1:
            mask += [False] * int(rng.integers(1, 7))
    mask = np.array(mask)
    turn_rewards = rng.normal(size=turns).astype(np.float32)
    return Episode(
        tokens=rng.integers(0, vocabulary, len(mask)).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(len(mask)), 0.0).astype(np.float32),
        reward=float(turn_rewards.sum()) if reward is None else reward,
        turn_rewards=turn_rewards,
        images=[] if image is None else [image],
        **fields,
    )


def assert_frequencies(seen, p):
    """Assert by a chi-square test that counts [n] follow probabilities [n]: 5 standard deviations above its mean."""
    assert (seen[p == 0] == 0).all()
    expected = seen.sum() * p[p > 0]
    statistic = ((seen[p > 0] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)
