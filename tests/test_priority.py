"""Priorities and IS weights against their formulas and the laws they imply."""

import numpy as np
import pytest

from freshper import priority
from freshper.is_weights import annealed_beta, importance_weights
from freshper.priority import age_limit, exponential_decay, polynomial_decay, reward_priority


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


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_the_formula(beta):
    """Eq. 3, with the maximum over the drawn batch."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 30):
        buffer = 10.0 ** rng.uniform(-5, 3, 30)
        p = rng.choice(buffer / buffer.sum(), size)
        raw = (1.0 / (30 * p)) ** beta
        weights = importance_weights(p, beta)
        np.testing.assert_allclose(weights, raw / raw.max(), rtol=1e-9)
        assert beta > 0 or (weights == 1.0).all()  # no correction


def test_beta_one_undoes_the_sampling_with_the_buffers_maximum_only():
    """Batches of 128 at epsilon 1e-6 and 10 % successes.

    The ratio is the weighted share of successes over failures, divided by that in the buffer. With
    the batch's maximum a success weighs 1 in a batch of successes, 0.00025 beside a failure."""
    rng = np.random.default_rng(0)
    successes = np.arange(1000) < 100
    leaves = reward_priority(successes.astype(float), 1e-6) ** 0.6
    p = leaves / leaves.sum()
    drawn = rng.choice(1000, size=(20_000, 128), p=p)

    def ratio(weights):
        return weights[successes[drawn]].sum() / weights[~successes[drawn]].sum() * 900 / 100

    weights = np.array([importance_weights(p[batch], 1.0) for batch in drawn])
    assert ratio(weights) == pytest.approx(2_820, rel=0.15)
    # 5,800 failures are drawn: a standard error of 0.013.
    of_buffer = weights * p.min() / p[drawn].min(1, keepdims=True)
    assert ratio(of_buffer) == pytest.approx(1.0, abs=0.05)
    # at the paper's beta of 0.4 the buffer's maximum makes every success weigh 0.036
    assert importance_weights(p, 0.4)[0] == pytest.approx(0.036, abs=5e-4)
    assert importance_weights(p[:1], 0.4) == 1.0


def test_impossible_weights_are_refused_and_beta_anneals_to_one():
    for p, beta in ([0.0, 0.5], 0.4), ([1.1], 0.4), ([0.5], 1.5):
        with pytest.raises(ValueError, match="must lie in"):
            importance_weights(np.array(p), beta)
    betas = [annealed_beta(0.4, progress) for progress in (0.0, 0.5, 1.0, 2.0)]
    assert betas == pytest.approx([0.4, 0.7, 1.0, 1.0])
