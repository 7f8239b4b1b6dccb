"""Importance-sampling weights: undo the bias of drawing some trajectories more often than others.

Paper: eq. 3 (section 3.2) and eq. 15 (section 3.5), Algorithm 1 line 9.

    w_i = (1 / (N P(i)))^beta / max_j w_j         beta: beta_0 -> 1 over training

At beta = 1, E_{i~P}[w_i f_i] is proportional to the plain mean of f over the buffer, if the maximum is a constant:
taken over the buffer (`smallest` is the least P(i) in it). Taken over each drawn batch, the default, it varies with
the batch, and the law holds only for large batches.

Where we differ: the paper's max over j allows both; ours is over the drawn batch. With 0/1 rewards almost every entry
is a failure that is hardly ever drawn. Its huge weight, as the buffer's maximum, shrinks every drawn success to a few
per cent, and with it the learning rate. The batch maximum keeps the largest drawn weight at 1.

These weights correct *which* trajectories are drawn. That an older policy generated them is what the ratio
pi_theta / pi_mu in freshper/reinforce.py corrects.
"""

import numpy as np


def importance_weights(probabilities: np.ndarray, size: int, beta: float, smallest: float | None = None) -> np.ndarray:
    """Return w_i in (0, 1], float64 [B], from P(i) of the drawn entries [B], N = `size` and beta in [0, 1] (eq. 3).

    `smallest` is the least P(i) over which the maximum is taken; None: over this batch. Raises ValueError if a
    probability is not in (0, 1], is below `smallest`, or beta is not in [0, 1].
    """
    probabilities = np.asarray(probabilities, dtype=np.float64)
    least = probabilities.min()
    if not (least > 0.0 and probabilities.max() <= 1.0):
        raise ValueError(f"probabilities must lie in (0, 1], got {least} to {probabilities.max()}")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must lie in [0, 1], got {beta}")
    smallest = least if smallest is None else smallest
    if not 0.0 < smallest <= least:
        raise ValueError(f"smallest must lie in (0, {least}], the least drawn probability, got {smallest}")
    # w_i / max_j w_j with the quotient inside the power: N cancels and nothing overflows
    return (smallest / probabilities) ** beta


def annealed_beta(beta0: float, progress: float) -> float:
    """Return beta, which rises linearly from beta0 to 1 while `progress` goes from 0 to 1 (section 3.5)."""
    return beta0 + (1.0 - beta0) * min(max(progress, 0.0), 1.0)
