"""Importance-sampling weights: undo the bias of drawing some trajectories more often than others.

Paper: eq. 3 (section 3.2) and eq. 15 (section 3.5), Algorithm 1 line 9.

    w_i = (1 / (N P(i)))^beta / max_j w_j         beta: beta_0 -> 1 over training

These weights correct *which* trajectories are drawn; the ratio in freshper/reinforce.py corrects
for an older policy.

The paper does not say over which j the maximum goes. Here it goes over the drawn batch. Over the
buffer (examples/buffer_maximum.patch), it is the weight of a failure that is hardly ever drawn: at
epsilon = 1e-6 every drawn success has a weight of 0.036 at beta = 0.4, and of 0.00025 at beta = 1.
But the buffer's maximum does not depend on the batch. So at beta = 1 the buffer's undoes the
sampling exactly, and the batch's does not.
"""

import numpy as np


def importance_weights(probabilities: np.ndarray, beta: float) -> np.ndarray:
    """Return w_i in (0, 1], float64 [B] (eq. 3), from P(i) of drawn entries [B].

    N cancels. Raises ValueError unless 0 < P(i) <= 1 and 0 <= beta <= 1."""
    probabilities = np.asarray(probabilities)
    least = probabilities.min()
    most = probabilities.max()
    if not 0.0 < least <= most <= 1.0:
        raise ValueError(f"probabilities must lie in (0, 1], got {least} to {most}")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must lie in [0, 1], got {beta}")
    return (least / probabilities) ** beta  # the quotient inside the power: nothing overflows


def annealed_beta(beta0: float, progress: float) -> float:
    """Return beta: linearly from beta0 to 1 as `progress` goes from 0 to 1 (section 3.5)."""
    return np.interp(progress, [0.0, 1.0], [beta0, 1.0])
