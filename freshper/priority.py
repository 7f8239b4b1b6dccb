"""How informative is a trajectory, and how stale? Base priority, age decay, and their product.

Paper: section 3.3 (eq. 13), section 3.4 (eq. 14).

    p_i = p_i^base * exp(-Delta_i / tau)          Delta_i = t - t_i, in optimizer steps

The buffer draws with P(i) ~ p_i^alpha, so P(i) decays with the constant tau / alpha: at the paper's tau = 500 and
alpha = 0.6 the priority halves in tau ln 2 = 347 steps, the probability in 578. The authors' code counts iterations:
its 500 are 1,500 of our steps (one on-policy and K = 2 replay updates per iteration).

Under exponential decay every entry shrinks by the same factor per step, so a refresh never changes P(i) among entries
that were already in the tree. Line 6 of Algorithm 1 matters because new entries arrive at age 0 beside leaves that were
computed earlier. Polynomial decay, announced at the end of section 3.3 but not shown, has no such law.

Where we differ: the paper gives no epsilon (the authors' code: 1e-6). With 0/1 rewards it decides how often failures
are replayed: P(success) / P(failure) = ((1 + epsilon) / epsilon)^alpha, about 4,000 at 1e-6 and 4 at the tiny
preset's 0.1.

Exercise: plot `exponential_decay` and `polynomial_decay` at equal half-life over ages 0 to 10 tau.
"""

import numpy as np


def reward_priority(rewards: np.ndarray, epsilon: float) -> np.ndarray:
    """Return p_base = |x| + epsilon, float64 [n], from one signal per episode [n] (section 3.4): the return for
    critic-free methods, the advantage A_i for actor-critic methods, the TD error delta_i in classical PER."""
    return np.abs(np.asarray(rewards, dtype=np.float64)) + epsilon


advantage_priority = td_error_priority = reward_priority


def exponential_decay(age: np.ndarray, tau: float) -> np.ndarray:
    """Return w_age(Delta) = exp(-Delta / tau), eq. 13. Ages in optimizer steps [n] -> factors in [0, 1].

    Raises ValueError unless tau > 0. tau = inf gives 1 everywhere (Standard PER).
    """
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return np.exp(np.asarray(age, dtype=np.float64) * (-1.0 / tau))


def age_limit(age: np.ndarray, tau: float) -> np.ndarray:
    """Return 1 up to age tau and 0 beyond: the hard limit of asynchronous trainers. [n] -> [n].

    Raises ValueError unless tau > 0.
    """
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return (np.asarray(age) <= tau).astype(np.float64)


def polynomial_decay(age: np.ndarray, tau: float, power: float) -> np.ndarray:
    """Return (1 + Delta / tau)^(-power), the heavier-tailed alternative named in section 3.3. [n] -> [n].

    Starts like exp(-power Delta / tau). Raises ValueError unless tau > 0 and power > 0.
    """
    if not (tau > 0 and power > 0):
        raise ValueError(f"tau and power must be positive, got tau={tau}, power={power}")
    return (1.0 + np.asarray(age, dtype=np.float64) / tau) ** -power
