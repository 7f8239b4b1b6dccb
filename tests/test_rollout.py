"""The multi-turn loop: when an episode ends, and which instances it plays."""

import numpy as np
from conftest import play

from envs.base import EVAL_SEEDS
from freshper.config import Config
from freshper.rollout import training_seeds


def test_an_episode_ends_if_its_next_reply_might_not_fit(text_policy):
    """Its conversation and a reply of five tokens, to the token."""
    whole = play(text_policy, n=8)
    needed = [np.flatnonzero(~e.action_mask)[-1] + 1 + 5 for e in whole]
    for room in (max(needed), max(needed) - 1):
        turns = [len(e.turn_rewards) for e in play(text_policy, n=8, max_tokens=room)]
        expected = [len(e.turn_rewards) - (n > room) for e, n in zip(whole, needed)]
        assert turns == expected


def test_training_seeds_do_not_repeat():
    def of_run(seed):
        config = Config(seed=seed, rollout_batch_size=6)
        return [x for i in range(1, 101) for x in training_seeds(config, i)]

    seeds = {*of_run(42)}
    assert len(seeds) == 600
    assert max(seeds) < EVAL_SEEDS
    for seed in (43, 942, 1042, 2**31):  # 42 and 942 had the same instances
        assert seeds.isdisjoint(of_run(seed))
