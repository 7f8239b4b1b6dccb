"""The multi-turn loop: when an episode ends, and which instances it plays."""

from conftest import play

from envs.base import EVAL_SEEDS
from freshper.config import Config
from freshper.rollout import training_seeds


def test_a_conversation_that_would_grow_too_long_is_truncated(text_policy):
    longest = max(len(e.tokens) for e in play(text_policy, n=8))
    episodes = play(text_policy, n=8, max_tokens=longest - 1)
    assert any(e.outcome["truncated"] for e in episodes)
    assert all(len(e.tokens) < longest for e in episodes)


def test_training_seeds_do_not_repeat():
    def of_run(seed):
        config = Config(seed=seed, rollout_batch_size=6)
        return [x for i in range(100) for x in training_seeds(config, i)]

    seeds = {*of_run(42)}
    assert len(seeds) == 600
    assert max(seeds) < EVAL_SEEDS
    for seed in (43, 942, 1042, 2**31):  # 42 and 942 had the same instances
        assert seeds.isdisjoint(of_run(seed))
