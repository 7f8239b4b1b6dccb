"""Real pretrained weights: SmolLM2-135M-Instruct, through train.py and against plain transformers.

Batches, replies and conversations are as small as the prompts allow. What is tested is that a real
model is computed right, trained, saved and loaded, not that it learns.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import play, read, stock_logprobs
from pretrained import smollm2
from transformers import AutoModelForCausalLM

from freshper.episode import collate
from freshper.flags import parse_args
from freshper.models import load_policy
from freshper.trainer import TorchTrainer

# Entropy moves the weights also if all rewards are equal.
SHORT = """--rollout_batch_size 2 --batch_size 2 --replay_ratio 1 --capacity 4 --micro_batch_size 2
--eval_episodes 1 --eval_every 2 --save_every 0 --max_new_tokens 8 --entropy_coef 0.01"""
GSM8K = "--env gsm8k --preset small --max_tokens 200"
NQ_SEARCH = "--env nq_search --preset paper --max_turns 2 --max_tokens 400"
TORCH = "--backend hf+torch --dtype float32 --iterations 2"


def train_py(out, flags, model):
    """Return the table of a run. It is a process of its own, whose memory is free afterwards."""
    subprocess.run(
        [sys.executable, "train.py", *f"{flags} {SHORT} --model {model} --out {out}".split()],
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=600,
    )
    return read(out, "metrics.csv")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The table and the folder of two iterations of GSM8K."""
    out = tmp_path_factory.mktemp("pretrained") / "gsm8k"
    return train_py(out, f"{GSM8K} {TORCH}", smollm2()), out


def test_two_iterations_with_replay_of_one_turn_and_of_several(trained, tmp_path):
    for table in (trained[0], train_py(tmp_path / "nq", f"{NQ_SEARCH} {TORCH}", smollm2())):
        assert table["step"].tolist() == table["episodes"].tolist() == [0, 2, 4]
        assert np.isfinite(table["eval_success"][[0, 2]]).all()
        assert np.isfinite(table["replay_loss"][1:]).all()
        assert (table["mismatch"][1:] < 1e-4).all()


def test_vllm_and_deepspeed_train_the_checkpoint_in_bfloat16(trained, tmp_path):
    flags = f"{GSM8K} --backend vllm+deepspeed --dtype bfloat16 --iterations 2"
    table = train_py(tmp_path / "run", flags, trained[1] / "checkpoint")
    assert (table["mismatch"][1:] < 0.1).all()
    assert (table["grad_norm"][1:] > 0).all()


@torch.no_grad()
def test_log_probs_are_those_of_the_checkpoint_in_plain_transformers(trained):
    """In turns of FrozenLake, by engine and trainer."""
    folder = str(trained[1] / "checkpoint")
    policy = load_policy(folder, "cpu", torch.float32)
    episodes = play(policy, n=3)
    config = parse_args(f"{GSM8K} {TORCH} {SHORT} --temperature 0.99 --model {folder}".split())
    computed = TorchTrainer(policy, config, 2).logprobs(collate(episodes))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    assert not torch.equal(model.model.norm.weight, start.model.norm.weight)  # it has trained
    plain = dataclasses.replace(policy, model=model)
    for episode, row in zip(episodes, computed, strict=True):
        expected = stock_logprobs(plain, episode)
        np.testing.assert_allclose(episode.behavior_logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-4)
