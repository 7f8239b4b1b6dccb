"""Real pretrained weights through all of train.py: SmolLM2-135M-Instruct, with the numbers and
prompts of pretrained models.

Batches, replies and conversations are as small as the prompts allow. What is tested is that a real
model is computed right, trained, saved and loaded, not that it learns.
"""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pretrained import smollm2
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from envs.base import Observation
from freshper.backends import backends, load
from freshper.diagnostics import read
from freshper.engine_hf import HFEngine, Sampling
from freshper.episode import Episode, collate
from freshper.flags import parse_args
from freshper.rollout import Conversation, rollout, training_seeds

SHORT = """--dtype float32 --rollout_batch_size 2 --batch_size 2 --replay_ratio 1 --capacity 4
--micro_batch_size 2 --eval_episodes 1 --eval_every 2 --save_every 0 --max_new_tokens 8""".split()
TORCH = "--backend hf+torch --iterations 2".split()
ENGINES = "--backend vllm+deepspeed --iterations 1".split()
TASKS = {
    # entropy moves the weights also if all rewards are equal
    "gsm8k": "--preset small --max_tokens 200 --entropy_coef 0.01".split(),
    "frozenlake": "--max_turns 1 --max_tokens 240".split(),
    "nq_search": "--max_turns 2 --max_tokens 400".split(),
    "sokoban_simple": "--max_turns 1 --max_tokens 280".split(),
    "aime": "--data= --max_turns 1 --max_tokens 240".split(),
    "cliffwalking": "--max_turns 1 --max_tokens 280".split(),
    "sokoban_hard": "--max_turns 1 --max_tokens 360".split(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For runs. It is removed in the end: their checkpoints take gigabytes."""
    folder = tmp_path_factory.mktemp("pretrained")
    yield folder
    shutil.rmtree(folder)


def flags(env, out, *more, model=None):
    paths = ["--out", str(out), "--model", str(model or smollm2())]
    return ["--env", env, *paths, *SHORT, *TASKS[env], *more]


def train_py(given):
    """Run train.py in a process of its own, whose memory is free afterwards."""
    subprocess.run(
        [sys.executable, "train.py", *given],
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )


@pytest.fixture(scope="module")
def run(folder):
    """A function that returns the folder of a task's run, which is made at first use."""

    def run(env):
        if not (folder / env).exists():
            train_py(flags(env, folder / env, *TORCH))
        return folder / env

    return run


@pytest.mark.parametrize("env", TASKS)
def test_two_iterations_with_replay(env, run):
    settings = json.loads((run(env) / "config.json").read_text())
    assert (settings["preset"], settings["lr"]) == (
        ("small", 3e-5) if env == "gsm8k" else ("paper", 1e-6)
    )
    table = read(run(env), "metrics.csv")
    assert table["step"].tolist() == table["episodes"].tolist() == [0, 2, 4]
    assert np.isfinite(table["eval_success"][[0, 2]]).all()
    assert np.isfinite(table["replay_loss"][1:]).all()
    assert not any(np.isinf(column).any() for column in table.values())
    assert (table["mismatch"][1:] < 1e-4).all()
    if env != "gsm8k":  # others go on from its checkpoint
        shutil.rmtree(run(env))


def test_a_resumed_run_is_the_run_that_never_stopped(folder):
    """In bfloat16, from the checkpoint after the first of two iterations."""
    out, again = folder / "plain", folder / "again"
    train_py(flags("gsm8k", out, *TORCH, "--dtype", "bfloat16", "--save_every", "1"))
    shutil.copytree(out, again, ignore=shutil.ignore_patterns("checkpoint", "checkpoint-best"))
    train_py(["--resume", str(again)])
    assert filecmp.cmp(
        *(path / "checkpoint/model.safetensors" for path in (out, again)), shallow=False
    )
    states = [torch.load(path / "checkpoint/state.pt", weights_only=True) for path in (out, again)]
    for state in states:
        del state["report"]  # with times
    for one, two in zip(*map(tree_leaves, states), strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    shutil.rmtree(out)
    shutil.rmtree(again)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_vllm_and_deepspeed_train_the_checkpoint(dtype, error, run, folder):
    """In bfloat16 a single token of a prompt differs by 0.7."""
    given = [*ENGINES, "--dtype", dtype]
    train_py(flags("gsm8k", folder / dtype, *given, model=run("gsm8k") / "checkpoint"))
    last = {name: column[-1] for name, column in read(folder / dtype, "metrics.csv").items()}
    assert last["mismatch"] < error
    assert last["sync_error"] < error
    assert last["grad_norm"] > 0


def play(given):
    """A policy, its trainer, and episodes of two turns, each with another return."""
    config = parse_args([*given, "--max_turns", "2", "--max_tokens", "300"]).config
    seeds = training_seeds(config.seed, 0, config.rollout_batch_size, config.group_size)
    policy, make_env, _ = load(config)
    with backends(policy, config, make_env()) as (trainer, engine):
        envs = [make_env() for _ in seeds]
        episodes = rollout(engine, policy, envs, seeds, config.max_tokens, config.max_new_tokens)
    for reward, episode in enumerate(episodes):
        episode.turn_rewards[-1] = reward
    return policy, trainer, episodes


def test_log_probs_are_those_of_the_checkpoint_in_plain_transformers(run, folder):
    given = flags("gsm8k", folder / "none", *TORCH, model=run("gsm8k") / "checkpoint")
    policy, trainer, episodes = play(given)
    weights = [at / "model.safetensors" for at in (smollm2(), run("gsm8k") / "checkpoint")]
    assert not filecmp.cmp(*weights, shallow=False)  # it has trained
    model = AutoModelForCausalLM.from_pretrained(run("gsm8k") / "checkpoint", dtype=torch.float32)
    for episode, trained in zip(episodes, trainer.logprobs(collate(episodes)), strict=True):
        tokens, mask = torch.from_numpy(episode.tokens).long(), episode.action_mask
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1] / trainer.config.temperature
        logits[:, policy.suppressed_ids] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[mask[1:], 0]
        assert len(episode.turn_rewards) == 2
        np.testing.assert_allclose(episode.behavior_logprobs[mask], expected, atol=1e-4)
        np.testing.assert_allclose(trained[: len(mask)][mask], expected, atol=1e-4)


class Reader(HFEngine):
    """An engine that replies what it is told."""

    def sample(self, logits):
        logprobs = (logits / self.sampling.temperature).log_softmax(-1)
        token = self.reply.pop(0)
        return [token], [logprobs[0, token].item()]


def test_bfloat16_mixed_precision(folder):
    """Two turns of fixed tokens, at learning rate 0 (warm-up). `rounding` is by how much bfloat16
    moves a log-prob on this machine; the other bounds follow from it. No ratio is clipped: that
    would be a jump."""
    more = [*TORCH, "--dtype", "bfloat16", "--ratio_clip", "9"]
    policy, trainer, _ = play(flags("gsm8k", folder / "none", *more))
    assert policy.mixed
    question = (
        "Tom has 9 fish and loses 2. How many fish does Tom have left? "
        "Answer in one short sentence."
    )
    first = Observation(question)
    again = Observation("Wrong. " + question)
    episodes = []
    replies = ("Tom has 9 + 2 = 11 fish.", "I do not know."), ("He has 2 fish.", "9 - 2 = 7")
    engine = Reader(policy, Sampling(trainer.config.temperature), seed=0)
    for reward, texts in enumerate(replies):
        conversation, mask, logprobs = Conversation([]), [], []
        turns = policy.user_turn(first), policy.bridge(again, closed=True)
        for text, turn in zip(texts, turns, strict=True):
            engine.reply = [*policy.tokenizer.encode(text), policy.eos_id]
            conversation.tokens += turn
            (reply,) = engine.generate([conversation], 99)
            conversation.tokens += reply.tokens
            mask += [False] * len(turn) + [True] * len(reply.tokens)
            logprobs += [0.0] * len(turn) + reply.logprobs
        tokens, logprobs = np.array(conversation.tokens, np.int32), np.array(logprobs, np.float32)
        rewards = np.array([0.0, reward], dtype=np.float32)
        episodes.append(Episode(tokens, np.array(mask), logprobs, float(reward), rewards))

    mismatch = trainer.record_behavior_logprobs(episodes)["mismatch"]
    batch = collate(episodes)
    passes = []
    episodes[0].behavior_logprobs -= 0.1  # away from rho = 1
    for policy.mixed in (True, False):
        trainer.step = 0
        logprobs = trainer.logprobs(batch)[batch.action_mask]
        loss = trainer.update(episodes).stats["loss"]
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        passes.append((logprobs, loss, gradient.double()))

    state = trainer.optimizer.state_dict()["state"][0]
    tensors = *policy.model.parameters(), state["exp_avg"], state["exp_avg_sq"]
    assert {x.dtype for x in tensors} == {torch.float32}
    policy.model.to(torch.bfloat16)  # weights and the sums of layers, too
    rounded = trainer.logprobs(batch)[batch.action_mask]

    (logprobs, loss, gradient), (expected_logprobs, expected_loss, expected) = passes
    rounding = float(abs(logprobs - expected_logprobs).mean())
    assert 0.0 < rounding < 2 * float(abs(rounded - expected_logprobs).mean())
    assert 0.0 < mismatch < 3 * rounding  # engine and trainer round in different places
    assert abs(loss - expected_loss) < 2 * rounding  # the two advantages are about -1 and 1
    assert 0.0 < (gradient - expected).norm() < 10 * rounding * expected.norm()
