"""How informative is a trajectory, and how stale? Base priority, age decay, and their product.

Paper: section 3.3 (eq. 13), section 3.4 (eq. 14).

    p_i = p_i^base * exp(-Delta_i / tau)          Delta_i = t - t_i, in optimizer steps

The buffer draws with P(i) ~ p_i^alpha: at the paper's tau = 500 and alpha = 0.6 the priority halves in tau ln 2 = 347
steps, the probability in 578. The authors' 500 *iterations* are 1,500 of our steps. Under exponential decay all entries
shrink by the same factor, so a refresh matters only beside new ones, of age 0; polynomial decay has no such law.

The paper gives no epsilon (the authors' code: 1e-6). With 0/1 rewards it decides how often failures are replayed:
P(success) / P(failure) = ((1 + epsilon) / epsilon)^alpha, about 4,000 at 1e-6 and 4 at the tiny preset's 0.1.

Exercise: plot `exponential_decay` and `polynomial_decay` at equal half-life over ages 0 to 10 tau.
"""

import numpy as np


def reward_priority(rewards: np.ndarray, epsilon: float) -> np.ndarray:
    """Return p_base = |x| + epsilon, float64 [n], of returns, advantages or TD errors x [n] (section 3.4)."""
    return np.abs(np.asarray(rewards, dtype=np.float64)) + epsilon


advantage_priority = td_error_priority = reward_priority


def exponential_decay(age: np.ndarray, tau: float) -> np.ndarray:
    """Return w_age(Delta) = exp(-Delta / tau), eq. 13: ages in optimizer steps [n] -> factors in [0, 1]. tau = inf: 1
    everywhere (Standard PER). This and the other forms raise ValueError unless tau (and power) > 0."""
    return np.exp(np.asarray(age, dtype=np.float64) * (-1.0 / _positive(tau)))


def age_limit(age: np.ndarray, tau: float) -> np.ndarray:
    """Return 1 up to age tau and 0 beyond: the hard limit of asynchronous trainers. [n] -> [n]."""
    return (np.asarray(age) <= _positive(tau)).astype(np.float64)


def polynomial_decay(age: np.ndarray, tau: float, power: float) -> np.ndarray:
    """Return (1 + Delta / tau)^(-power), the heavier-tailed alternative named in section 3.3. [n] -> [n]."""
    return (1.0 + np.asarray(age, dtype=np.float64) / _positive(tau)) ** -_positive(power)


def _positive(x: float) -> float:
    if not x > 0:
        raise ValueError(f"tau and power must be positive, got {x}")
    return x
