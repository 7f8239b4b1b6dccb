"""Priorities against their formulas and the laws they imply."""

import dataclasses

import numpy as np
import pytest
from conftest import make_episode
from test_reinforce import normalizer_of, slow_advantages

from freshper import priority
from freshper.config import Config
from freshper.episode import collate
from freshper.priority import (
    age_limit,
    base_priorities,
    exponential_decay,
    polynomial_decay,
    reward_priority,
)


def test_priorities_and_decays_at_known_values():
    for base in (reward_priority, priority.advantage_priority, priority.td_error_priority):
        np.testing.assert_allclose(base(np.array([-2.0, 0.0, 0.5]), 0.01), [2.01, 0.01, 0.51])
    np.testing.assert_allclose(exponential_decay(np.array([0.0, 500.0]), 500.0), [1, np.exp(-1)])
    np.testing.assert_array_equal(exponential_decay(np.array([0, 10, 10**6]), np.inf), 1.0)
    limited = age_limit(np.array([0, 1, 67, 68, 10_000]), 67.0)
    np.testing.assert_array_equal(limited, [1, 1, 1, 0, 0])
    heavy_tail = polynomial_decay(np.array([0.0, 500.0, 1500.0]), 500.0, 2.0)
    np.testing.assert_allclose(heavy_tail, [1, 1 / 4, 1 / 16])

    # Section 3.4: at tau = 500 the priority halves in 347 steps. At alpha = 0.6 the probability
    # halves in 578.
    factors = exponential_decay(np.array([347, 578]), 500.0)
    np.testing.assert_allclose(factors ** [1.0, 0.6], 0.5, atol=1e-3)


def test_exponential_decay_never_changes_p_and_polynomial_decay_does():
    rng = np.random.default_rng(0)
    base, ages = rng.random(50) + 1e-6, rng.integers(0, 300, 50)

    def p(decay, extra, *settings):
        leaves = (base * decay(ages + extra, 50.0, *settings)) ** 0.6
        return leaves / leaves.sum()

    for more in (10, 347, 5000):
        np.testing.assert_allclose(p(exponential_decay, 0), p(exponential_decay, more), rtol=1e-9)
        assert np.abs(p(polynomial_decay, 0, 1.0) / p(polynomial_decay, more, 1.0) - 1).max() > 0.01


@pytest.mark.parametrize("kind", ["batch", "turn", "recompute"])
def test_a_base_priority_is_of_the_return_or_of_the_unclipped_advantage(kind):
    """Never against the replay batch: four successes would then have the priority epsilon."""
    episodes = [make_episode(np.random.default_rng(k), turns=1 + k % 3) for k in range(8)]
    config = Config(advantage_clip=0.2, epsilon=0.1, baseline=kind)
    unclipped = dataclasses.replace(config, advantage_clip=1e9)
    normalizer = normalizer_of(config)
    normalizer.observe(collate(episodes))
    for drawn in (episodes, episodes[:2], episodes[:1]):
        means = [np.mean(row) for row in slow_advantages(drawn, unclipped, episodes)]
        for source, expected in (("advantage", means), ("reward", [e.reward for e in drawn])):
            kind = dataclasses.replace(config, base_priority=source)
            priorities = base_priorities(drawn, normalizer, kind)
            np.testing.assert_allclose(priorities, np.abs(expected) + 0.1, rtol=1e-4)
