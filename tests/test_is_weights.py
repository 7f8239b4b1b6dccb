"""IS weights: eq. 3, and what each maximum undoes."""

import numpy as np
import pytest

from freshper.is_weights import importance_weights
from freshper.priority import reward_priority


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_the_formula(beta):
    """Eq. 3, with the maximum over the drawn batch."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 30):
        buffer = 10.0 ** rng.uniform(-5, 3, 30)
        p = rng.choice(buffer / buffer.sum(), size)
        raw = (1.0 / (30 * p)) ** beta
        np.testing.assert_allclose(importance_weights(p, beta), raw / raw.max(), rtol=1e-9)


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


def test_impossible_weights_are_refused():
    for p, beta in ([0.0, 0.5], 0.4), ([1.1], 0.4), ([0.5], 1.5):
        with pytest.raises(ValueError, match="must lie in"):
            importance_weights(np.array(p), beta)
