"""How informative is a trajectory, and how stale? Base priority, age decay, and their product.

Paper: section 3.3 (eq. age_decay), section 3.4 (eq. fresh_priority).

    p_i = p_i^base * exp(-Delta_i / tau)          Delta_i = t - t_i, counted in optimizer steps

The buffer draws with P(i) ~ p_i^alpha, hence P(i) itself decays with the constant tau / alpha: at the
paper's tau = 500, alpha = 0.6 the priority halves in tau ln 2 = 347 steps, the probability in 578.

A law worth knowing: under *exponential* decay every entry shrinks by the same factor per step, so a
refresh never changes P(i) among entries that were already in the tree. Line 6 of Algorithm 1 matters
because new entries arrive at age 0 beside leaves that were frozen earlier. Polynomial decay, which the
paper announces as a comparison (end of section 3.3) but does not show, has no such law.

Where we differ: the paper does not give epsilon (the authors' code uses 1e-6). With 0/1 rewards it
decides how often failures are replayed: P(success) / P(failure) = ((1 + epsilon) / epsilon)^alpha, about
4,000 at epsilon = 1e-6 and 4 at our tiny presets' 0.1 (alpha = 0.6). It is therefore a parameter.

Exercise: plot `exponential_decay` and `polynomial_decay` at equal half-life over ages 0 to 10 tau.
"""

import numpy as np


def reward_priority(rewards: np.ndarray, epsilon: float) -> np.ndarray:
    """p_base = |r_i| + epsilon, for critic-free methods (section 3.4). Episode returns [n] -> [n]."""
    return np.abs(np.asarray(rewards, dtype=np.float64)) + epsilon


def advantage_priority(advantages: np.ndarray, epsilon: float) -> np.ndarray:
    """p_base = |A_i| + epsilon, for actor-critic methods (section 3.4). One advantage an episode, [n] -> [n]."""
    return np.abs(np.asarray(advantages, dtype=np.float64)) + epsilon


def td_error_priority(td_errors: np.ndarray, epsilon: float) -> np.ndarray:
    """p_base = |delta_i| + epsilon, the classical form (Schaul et al. 2016; section 3.2). [n] -> [n]."""
    return np.abs(np.asarray(td_errors, dtype=np.float64)) + epsilon


def exponential_decay(age: np.ndarray, tau: float) -> np.ndarray:
    """w_age(Delta) = exp(-Delta / tau), eq. age_decay. Ages in optimizer steps [n] -> factors in [0, 1].

    Raises ValueError unless tau > 0. tau = inf gives 1 everywhere (Standard PER).
    """
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return np.exp(np.asarray(age, dtype=np.float64) * (-1.0 / tau))


def age_limit(age: np.ndarray, tau: float) -> np.ndarray:
    """1 up to the age tau and 0 beyond: the hard limit of asynchronous trainers, as a form of decay. [n] -> [n].

    Raises ValueError unless tau > 0.
    """
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return (np.asarray(age) <= tau).astype(np.float64)


def polynomial_decay(age: np.ndarray, tau: float, power: float) -> np.ndarray:
    """(1 + Delta / tau)^(-power): the heavier-tailed alternative announced at the end of section 3.3.

    Starts like exp(-power Delta / tau). Raises ValueError unless tau > 0 and power > 0.
    """
    if not (tau > 0 and power > 0):
        raise ValueError(f"tau and power must be positive, got tau={tau}, power={power}")
    return (1.0 + np.asarray(age, dtype=np.float64) / tau) ** -power
