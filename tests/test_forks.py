"""The forks in examples/: each patch is its own file and one line elsewhere, applies, runs through the real train.py,
resumes bit for bit, and computes what it says. (A new environment is in test_own_environment.py.)"""

import copy
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_episode
from hypothesis import given
from hypothesis import strategies as st
from kill_loop import contents
from test_resume import stop_at_call
from test_train import SHORT, run

import train
from freshper import backends, checkpoint
from freshper.config import Config
from freshper.episode import collate

ROOT = Path(__file__).parent.parent
FORKS = {"group_advantage": "GroupAdvantageTrainer", "ppo": "PPOTrainer"}
GROUPS = ["--group_size", "4", "--rollout_batch_size", "8", "--max_turns", "3"]


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """By fork: a copy of the tree with its patch applied."""
    found = {}
    for fork in FORKS:
        found[fork] = tree = tmp_path_factory.mktemp(fork)
        for name in ("freshper", "envs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "weights"))
        for name in ("train.py", "sumtree.py"):
            shutil.copy(ROOT / name, tree / name)
        subprocess.run(["git", "apply", str(ROOT / f"examples/{fork}.patch")], cwd=tree, check=True)
    return found


@pytest.fixture(scope="module")
def modules(trees):
    """By fork: its own file as a module."""
    found = {}
    for fork, tree in trees.items():
        spec = importlib.util.spec_from_file_location(f"fork_{fork}", tree / f"freshper/{fork}.py")
        found[fork] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[fork])
    return found


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_is_its_own_file_and_one_line_elsewhere(name):
    """The one line: what the name TorchTrainer stands for. Were more needed, the house would be to blame."""
    files = re.split(r"^diff --git ", (ROOT / f"examples/{name}.patch").read_text(), flags=re.MULTILINE)[1:]
    new = [text for text in files if "\nnew file mode" in text]
    assert [text.split()[0] for text in new] == [f"a/freshper/{name}.py"]
    (other,) = [text for text in files if text not in new]
    removed, added = (re.findall(rf"^\{sign}(?!\{sign}\{sign})(.+)$", other, re.MULTILINE) for sign in "-+")
    (line,) = removed
    assert line == "from freshper.trainer import TorchTrainer"
    assert added == [f"from freshper.{name} import {FORKS[name]} as TorchTrainer"]


@pytest.mark.parametrize("fork", FORKS)
def test_it_runs_through_train(trees, fork, tmp_path):
    """The patched tree's own train.py, as a user starts it, with weights that can already play."""
    weights = next((ROOT / "freshper/weights").glob("frozenlake-*"))
    command = [sys.executable, "train.py", "--model", str(weights), "--out", str(tmp_path / "run")]
    done = subprocess.run([*command, *SHORT, *GROUPS], cwd=trees[fork], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, _ = checkpoint.find(tmp_path / "run")
    state = checkpoint.read_state(found)
    assert found.done == 3
    assert ("critic" in state["trainer"]) == (fork == "ppo")
    buffer = state["buffer"]
    episodes = state["episodes"]
    seeds = [e.seed for e in episodes]
    assert [seeds.count(s) for s in seeds] == [4] * 24  # groups of four
    own = buffer["base_priorities"]
    assert not np.allclose(own, [abs(e.reward) + 0.1 for e in episodes])
    if fork == "group_advantage":  # recomputed where an episode was replayed, as it was stored where not
        means = {s: np.mean([e.reward for e in episodes if e.seed == s]) for s in seeds}
        at_collection = np.array([abs(e.reward - means[e.seed]) + 0.1 for e in episodes])
        moved = ~np.isclose(own, at_collection, atol=1e-9)
        assert moved.any()
        assert moved.sum() <= 3 * 2 * 4  # iterations, K, B


@pytest.mark.parametrize("fork", FORKS)
def test_a_fork_that_was_stopped_goes_on_bit_for_bit(modules, fork, model_folder, tmp_path, monkeypatch):
    flags = ["--iterations", "4", *GROUPS]
    monkeypatch.setattr(backends, "TorchTrainer", getattr(modules[fork], FORKS[fork]))
    assert run(model_folder, tmp_path / "plain", *flags) == 0
    with monkeypatch.context() as patch:
        stop_at_call(patch, 8, [15])
        assert run(model_folder, tmp_path / "stopped", *flags) == 143
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert contents(tmp_path / "stopped") == contents(tmp_path / "plain")


def copy_of(policy):
    """One whose weights may be trained."""
    own = copy.copy(policy)
    own.model = copy.deepcopy(policy.model)
    return own


CONFIG = Config(lr=3e-3, epsilon=0.1, micro_batch_size=3, dtype="float32", advantage_clip=20.0)


def ragged(rng, turns=(3, 1, 4, 2, 3), **fields):
    episodes = [make_episode(rng, turns=n, **fields) for n in turns]
    for e in episodes:
        e.tokens = 263 + e.tokens % 10  # words, which can be sampled
    return episodes


def test_group_advantage_against_its_formula(modules, text_policy):
    """At collection |r - mean of the group| + epsilon; later the mean is over pi_theta, estimated with rho."""
    trainer = modules["group_advantage"].GroupAdvantageTrainer(copy_of(text_policy), CONFIG, 100)
    rng = np.random.default_rng(0)
    groups = [ragged(rng, seed=1), ragged(rng, turns=(2, 2, 2), seed=2)]
    mixed = [*groups[0], *groups[1]]
    means = np.repeat([np.mean([e.reward for e in group]) for group in groups], [5, 3])
    returns = np.array([e.reward for e in mixed])
    np.testing.assert_allclose(trainer.base_priorities(mixed), np.abs(returns - means) + 0.1)
    trainer.record_behavior_logprobs(mixed)
    for _ in range(3):
        _, drift = trainer.update(mixed)
    rho = np.exp(drift["log_ratio"])
    assert np.ptp(rho) > 0.01
    for k, group in ((slice(0, 5), groups[0]), (slice(5, 8), groups[1])):
        expected = np.average(returns[k], weights=rho[k])
        np.testing.assert_allclose(trainer.base_priorities(group), np.abs(returns[k] - expected) + 0.1)
    assert not np.allclose(trainer.base_priorities(mixed), np.abs(returns - means) + 0.1, atol=1e-4)


@given(turns=st.lists(st.integers(1, 6), min_size=1, max_size=5), lam=st.floats(0, 1), seed=st.integers(0, 99))
def test_gae_against_its_double_sum(modules, turns, lam, seed):
    rng, width = np.random.default_rng(seed), max(turns)
    there = np.arange(width) < np.array(turns)[:, None]
    rewards, values = (torch.from_numpy(rng.normal(size=there.shape) * there) for _ in range(2))
    deltas = modules["ppo"].td_errors(rewards, values)
    found = modules["ppo"].gae(deltas, lam)
    for b, n in enumerate(turns):
        r, v = rewards[b, :n].tolist(), [*values[b, :n].tolist(), 0.0]
        d = [r[t] + v[t + 1] - v[t] for t in range(n)]
        np.testing.assert_allclose(deltas[b], d + [0.0] * (width - n), atol=1e-12)
        a = [sum(lam ** (k - t) * d[k] for k in range(t, n)) for t in range(n)]
        np.testing.assert_allclose(found[b], a + [0.0] * (width - n), atol=1e-12)
    if lam == 1.0:  # telescopes: the return from here on less the value
        np.testing.assert_allclose(found[:, 0], rewards.sum(1) - values[:, 0], atol=1e-12)


@torch.no_grad()
def values_one_by_one(critic, episode):
    """V(s_t) of an episode on its own, without padding: the head on the state before each reply."""
    starts = [t for t in np.flatnonzero(episode.action_mask) if not episode.action_mask[t - 1]]
    hidden = critic.batch_hidden(collate([episode]))[0]
    return [critic.model.lm_head(hidden[t - 1]).item() for t in starts]


def test_ppo_s_advantages_priorities_and_critic(modules, text_policy):
    trainer = modules["ppo"].PPOTrainer(copy_of(text_policy), CONFIG, 100)
    episodes = ragged(np.random.default_rng(1))
    # the value head starts at zero: then delta is the reward
    at_first = [np.abs(e.turn_rewards).mean() + 0.1 for e in episodes]
    np.testing.assert_allclose(trainer.base_priorities(episodes), at_first, rtol=1e-5)
    trainer.record_behavior_logprobs(episodes)
    for _ in range(60):
        trainer.update(episodes)
    returns = [np.cumsum(e.turn_rewards[::-1])[::-1] for e in episodes]
    error = [np.square(values_one_by_one(trainer.critic, e) - g).sum() for e, g in zip(episodes, returns, strict=True)]
    assert sum(error) < 0.1 * sum(np.square(g).sum() for g in returns)  # the critic has learnt these games
    batch = collate(episodes)
    found, priorities = trainer.advantages(batch, None), trainer.base_priorities(episodes)
    for row, e in enumerate(episodes):
        v, r = [*values_one_by_one(trainer.critic, e), 0.0], e.turn_rewards
        d = [r[t] + v[t + 1] - v[t] for t in range(len(r))]
        assert priorities[row] == pytest.approx(np.mean(np.abs(d)) + 0.1, abs=1e-4)
        a = [sum(0.95 ** (k - t) * d[k] for k in range(t, len(r))) for t in range(len(r))]
        turn = np.cumsum(e.action_mask & ~np.append(False, e.action_mask[:-1])) - 1
        expected = np.where(e.action_mask, np.array(a)[turn], 0.0)
        np.testing.assert_allclose(found[row, : len(expected)], expected, atol=1e-4)
