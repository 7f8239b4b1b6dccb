"""The tiny models: a tokenizer for any text, Qwen's classes, weights as good as the random policy,
and one's own task."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from envs import ENVS
from envs.base import EVAL_SEEDS, WARM_START_SEEDS, UserError
from envs.check import check_environment
from freshper import tiny
from freshper.config import Config, defaults
from freshper.engine_hf import HFEngine, Sampling
from freshper.episode import collate
from freshper.models import load_policy
from freshper.report import summarize
from freshper.rollout import rollout
from freshper.tiny import tiny_model, transcripts, warm_start

# Share of tokens of held-out captions that shipped models predict. RL teaches gsm8k's to read its
# problems.
CAPTIONS = {
    "frozenlake": 0.85,
    "frozenlake_vlm": 0.97,
    "sokoban_simple": 0.8,
    "sokoban_hard": 0.55,
    "nq_search": 0.85,
    "cliffwalking": 0.55,
    "aime": 0.9,
    "gsm8k": 0.35,
    "geoqa": 0.85,
}
PAGE = (Path(__file__).parent.parent / "docs/own_environment.md").read_text()


def caption_accuracy(policy, name, n=64):
    """The share of tokens of captions of held-out states that the model predicts right, given those
    before."""
    envs = [ENVS[name](max_turns=1) for _ in range(n)]
    # Held-out episodes of CliffWalking have one start.
    first = WARM_START_SEEDS + 10**8 if name == "cliffwalking" else EVAL_SEEDS
    episodes = transcripts(policy, envs, list(range(first, first + n)))
    batch = collate(episodes)
    with torch.no_grad():
        predicted = policy.model.lm_head(policy.batch_hidden(batch)).argmax(-1)  # [B, T]

    right = []
    for row, episode in enumerate(episodes):
        end_of_reply = episode.turn_ends()[0]
        caption = np.flatnonzero(episode.action_mask[end_of_reply + 1 :]) + end_of_reply + 1
        right += (predicted[row, caption - 1] == batch.tokens[row, caption]).tolist()
    return np.mean(right)


@pytest.mark.parametrize("name", sorted(path.name for path in tiny.SHIPPED.iterdir()))
def test_the_shipped_weights_read_and_play_like_the_random_policy(name):
    n = 100
    preset = defaults(Config(env=name))
    policy = load_policy(str(tiny_model(name)), "cpu", torch.float32)
    engine = HFEngine(policy, Sampling(), 0)
    envs = [ENVS[name](max_turns=preset.get("max_turns", 0)) for _ in range(n)]
    seeds = list(range(EVAL_SEEDS, EVAL_SEEDS + n))
    limits = preset["max_tokens"], preset["max_new_tokens"]
    played = summarize(rollout(engine, envs, seeds, *limits))

    # Up to 0.009 and 0, of three seeds.
    assert played["invalid"] < (0.02 if "sokoban" in name else 0.005)
    random = np.mean([envs[0].policy_levels(seed)["random"] for seed in seeds])
    p = max(random, 1 / n)  # CliffWalking's is 0
    assert abs(played["success"] - random) <= 4 * (2 * p * (1 - p) / n) ** 0.5  # standard errors
    assert caption_accuracy(policy, name) > CAPTIONS[name]


def test_one_s_own_environment(tmp_path, monkeypatch):
    """The game of the page passes Gymnasium's checks. A tiny model is built for it once, and learns
    to reply."""
    code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    source = tmp_path / "digits.py"
    source.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    digits = importlib.import_module("digits").Digits
    monkeypatch.setitem(ENVS, "digits", digits)
    env = digits()
    check_environment(env)
    check_env(env, skip_render_check=True)

    monkeypatch.setattr(digits, "warm_start", ((50, 2),))
    folder = tiny_model("digits")
    policy = load_policy(str(folder), "cpu", torch.float32)
    envs = [digits() for _ in range(50)]
    played = rollout(HFEngine(policy, Sampling(), 0), envs, list(range(50)), 256, 6)
    assert summarize(played)["invalid"] < 0.3  # with random weights, all

    monkeypatch.setattr(tiny, "warm_start", lambda *_: pytest.fail("built again"))
    assert tiny_model("digits") == folder
    source.write_text(code.replace("I think", "We think"))
    with pytest.raises(pytest.fail.Exception, match="built again"):
        tiny_model("digits")

    # A tiny model never samples bytes.
    digits.random_reply = lambda self, rng: "<answer>zwölf</answer>"
    with pytest.raises(UserError, match=r"^Digits.random_reply\(\) returned '<answer>zw.* ASCII"):
        warm_start(policy, digits)


@pytest.mark.parametrize("two, chosen", [(0.9, 2), (40.0, 1)])
def test_threads_are_those_that_are_faster_now(two, chosen, monkeypatch):
    """One thread takes 1 s; two take longer beside a busy process."""
    set_to = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    seconds = iter([1.0, two])
    monkeypatch.setattr(tiny.timeit, "timeit", lambda *_, **__: next(seconds))
    tiny.choose_threads()
    assert set_to[-1] == chosen
