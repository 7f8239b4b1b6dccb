"""Priorities, decay and IS weights against their formulas, and the laws that follow from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freshper.is_weights import annealed_beta, importance_weights
from freshper.priority import (
    advantage_priority,
    age_limit,
    exponential_decay,
    polynomial_decay,
    reward_priority,
    td_error_priority,
)


def test_base_priorities_are_magnitudes_plus_epsilon():
    signal = np.array([-2.0, 0.0, 0.5])
    for priority in (reward_priority, advantage_priority, td_error_priority):
        np.testing.assert_allclose(priority(signal, 0.01), [2.01, 0.01, 0.51])


def test_decay_at_known_ages():
    tau = 500.0
    np.testing.assert_allclose(exponential_decay(np.array([0.0, tau, tau * np.log(2)]), tau), [1, np.exp(-1), 0.5])
    np.testing.assert_allclose(polynomial_decay(np.array([0.0, tau, 3 * tau]), tau, 2.0), [1, 1 / 4, 1 / 16])
    np.testing.assert_array_equal(exponential_decay(np.array([0, 10, 10**6]), np.inf), 1.0)


def test_half_lives_stated_in_the_module():
    """At tau = 500 and alpha = 0.6 the priority halves in 347 steps, the probability in 578."""
    assert exponential_decay(np.array([347.0]), 500.0)[0] == pytest.approx(0.5, abs=1e-3)
    assert exponential_decay(np.array([578.0]), 500.0)[0] ** 0.6 == pytest.approx(0.5, abs=1e-3)


@given(
    base=arrays(np.float64, 20, elements=st.floats(1e-6, 10)),
    ages=arrays(np.int64, 20, elements=st.integers(0, 300)),
    more=st.integers(1, 300),
)
def test_exponential_decay_never_changes_p_and_polynomial_decay_does(base, ages, more):
    def p(decay, extra):
        leaves = (base * decay(ages + extra)) ** 0.6
        return leaves / leaves.sum()

    def exponential(age):
        return exponential_decay(age, 50.0)

    def polynomial(age):
        return polynomial_decay(age, 50.0, 1.0)

    np.testing.assert_allclose(p(exponential, 0), p(exponential, more), rtol=1e-9)
    if np.ptp(ages) > 20 and more > 50:
        assert np.abs(p(polynomial, 0) / p(polynomial, more) - 1).max() > 1e-3


@pytest.mark.parametrize("tau", [0.0, -1.0, np.nan])
def test_tau_must_be_positive(tau):
    with pytest.raises(ValueError, match="tau"):
        exponential_decay(np.array([1]), tau)
    with pytest.raises(ValueError, match="tau"):
        polynomial_decay(np.array([1]), tau, 1.0)
    with pytest.raises(ValueError, match="tau"):
        age_limit(np.array([1]), tau)


def test_a_hard_limit_is_one_up_to_it_and_nothing_beyond():
    np.testing.assert_array_equal(age_limit(np.array([0, 1, 67, 68, 10_000]), 67.0), [1, 1, 1, 0, 0])


@given(
    leaves=arrays(np.float64, 30, elements=st.floats(1e-3, 1e3)),
    beta=st.floats(0, 1),
    drawn=st.lists(st.integers(0, 29), min_size=1, max_size=40),
)
def test_weights_are_the_formula(leaves, beta, drawn):
    p = (leaves / leaves.sum())[drawn]
    raw = [(1.0 / (30 * p_i)) ** beta for p_i in p]
    weights = importance_weights(p, 30, beta)
    np.testing.assert_allclose(weights, [w / max(raw) for w in raw], rtol=1e-9)
    assert weights.max() == 1.0
    assert weights.min() > 0.0


def test_beta_one_makes_the_weighted_mean_unbiased():
    """Monte Carlo: sum(w f) / sum(w) over prioritized draws tends to the plain mean of f; without w it does not."""
    rng = np.random.default_rng(0)
    f, leaves = rng.normal(size=50), rng.random(50) + 0.05
    leaves[f > 0] *= 10  # priorities that correlate with f, so that the bias is large
    p = leaves / leaves.sum()
    drawn = rng.choice(50, size=200_000, p=p)
    w = importance_weights(p[drawn], 50, 1.0)
    error = np.std(w * (f[drawn] - f.mean())) / w.mean() / np.sqrt(len(drawn))
    assert abs((w * f[drawn]).sum() / w.sum() - f.mean()) < 4 * error
    assert abs(f[drawn].mean() - f.mean()) > 40 * error


def test_the_maximum_over_the_buffer_would_silence_successes():
    """One success among failures at the paper's alpha 0.6 and beta 0.4 and the authors' epsilon: drawn alone, it weighs
    1 against the maximum of the batch, but 0.036 against the buffer's."""
    leaves = reward_priority(np.array([1.0, 0.0, 0.0, 0.0]), 1e-6) ** 0.6
    p = leaves / leaves.sum()
    assert importance_weights(p[:1], 4, 0.4) == 1.0
    assert importance_weights(p, 4, 0.4)[0] == pytest.approx(0.036, abs=5e-4)


def test_impossible_weights_are_refused():
    for p, beta in (([0.0, 0.5], 0.4), ([1.1], 0.4), ([np.nan], 0.4), ([0.5], 1.5)):
        with pytest.raises(ValueError):
            importance_weights(np.array(p), 10, beta)


def test_beta_anneals_linearly_to_one():
    assert [annealed_beta(0.4, x) for x in (0.0, 0.5, 1.0, 2.0)] == pytest.approx([0.4, 0.7, 1.0, 1.0])
