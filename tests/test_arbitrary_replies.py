"""Whatever a policy writes, an environment answers: 10,000 replies to each, none of which may crash or pay."""

import numpy as np
import pytest

from envs import ENVS

PIECES = [
    "<answer>", "</answer>", "<think>", "</think>", "<search>", "</search>", "<information>", "</information>",
    "<answer", "answer>", "<ANSWER>", "</", "<|im_end|>", "<|image_pad|>", "<script>alert(1)</script>",
    "Up", "Left", " 7", "042", "nan", "1e999", "inf", "-", "6*7", "\\boxed{", "}", "$", ",", ".",
    "e", "__import__('os')",
    "\x00",
    "\n", "\t", " ", "\u202e", "\ud800", "é", "漢字", "𝟟", "٣", "🙂", "%s", "{turns}", "'; --", "a" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", list(ENVS))
def test_ten_thousand_replies(name):
    """No exception, no reward for a reply that cannot be read, and always an observation of the space."""
    rng, env = np.random.default_rng(0), ENVS[name]()
    env.reset(seed=0)
    unreadable = 0
    for k in range(10_000):
        pieces = rng.choice(len(PIECES), rng.integers(0, 6))
        reply = "".join(PIECES[i] for i in pieces)
        if k % 2000 == 0:
            reply = (reply or "<answer>") * (100_000 // max(1, len(reply or "<answer>")))
        observation, reward, terminated, truncated, info = env.step(reply)
        assert isinstance(info["success"], bool)
        assert np.isfinite(reward)
        if not info["valid"]:
            unreadable += 1
            assert reward < 0, reply[:200]
        if k % 20 == 0:
            assert env.observation_space.contains(observation)
        if terminated or truncated:
            env.reset(seed=k)
    assert unreadable > 9_000
