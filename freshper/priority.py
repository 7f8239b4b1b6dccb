"""How informative is a trajectory, and how stale? Base priority, age decay, and their product.

Paper: section 3.3 (eq. 13), section 3.4 (eq. 14).

    p_i = p_i^base * exp(-Delta_i / tau)          Delta_i = t - t_i, in optimizer steps

The buffer draws with P(i) ~ p_i^alpha: at the paper's tau = 500 and alpha = 0.6 the priority halves
in tau ln 2 = 347 steps, the leaf p_i^alpha in 578. The authors count *iterations*: their 500 are
1,500 of our steps, 1 + K = 3 each. Exponential decay shrinks all entries by the same factor: a
refresh keeps the ratios among them, and lowers them only against entries added since the last one.
Polynomial decay shrinks young entries faster than old ones.

The paper gives no epsilon (the authors' code: 1e-6). With 0/1 rewards it decides how often failures
are replayed: P(success) / P(failure) = ((1 + epsilon) / epsilon)^alpha, about 4,000 at 1e-6 and 4
at the tiny preset's 0.1.

Exercise 4 of docs/exercises.md is about this.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from freshper.episode import Episode, collate

if TYPE_CHECKING:
    from freshper.config import Config
    from freshper.reinforce import ReturnNormalizer


def priorities(
    base_priorities: np.ndarray, ages: np.ndarray, decay: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return p_i = p_i^base * w_age(Delta_i), float64 [n] (eq. 14).

    `ages` are Delta_i [n] in optimizer steps, `decay` is one of the forms below."""
    return base_priorities * decay(ages)


def reward_priority(rewards: np.ndarray, epsilon: float) -> np.ndarray:
    """Return p_base = |r_i| + epsilon, float64 [n] (section 3.4).

    Its two aliases take advantages or TD errors [n] instead."""
    return np.abs(np.asarray(rewards, float)) + epsilon


advantage_priority = td_error_priority = reward_priority


def base_priorities(
    episodes: list[Episode], normalizer: "ReturnNormalizer", config: "Config"
) -> np.ndarray:
    """Return p_i^base of episodes, float64 [n] (section 3.4), of the kind of --base_priority.

    `reward`: |r_i| + epsilon. `advantage`: |A_i| + epsilon, with A_i the mean A_t of the action
    tokens. A_t is unclipped: under Config A's clip of 0.2 all priorities would be equal. With
    --baseline batch it is 0 for fresh episodes whose rewards are equal, turn by turn."""
    if config.base_priority == "reward":
        returns = np.array([episode.reward for episode in episodes])
        return reward_priority(returns, config.epsilon)

    action_tokens = np.array([episode.action_mask.sum() for episode in episodes])
    totals = normalizer.advantages(collate(episodes)).double().sum(-1).numpy()
    return advantage_priority(totals / action_tokens, config.epsilon)


def exponential_decay(age: np.ndarray, tau: float) -> np.ndarray:
    """Return w_age(Delta) = exp(-Delta / tau), eq. 13. [n] -> [n], factors in [0, 1].

    Ages are in optimizer steps. tau = inf: 1 everywhere (Standard PER)."""
    return np.exp(-np.asarray(age) / tau)


def age_limit(age: np.ndarray, tau: float) -> np.ndarray:
    """Return 1 up to age tau and 0 beyond: the hard limit of asynchronous trainers. [n] -> [n]."""
    return np.where(np.asarray(age) <= tau, 1.0, 0.0)


def polynomial_decay(age: np.ndarray, tau: float, power: float) -> np.ndarray:
    """Return (1 + Delta / tau)^(-power), the heavier tail named in section 3.3. [n] -> [n]."""
    return (1.0 + np.asarray(age) / tau) ** -power


def age_decay(config: "Config") -> Callable[[np.ndarray], np.ndarray]:
    """Return the decay of age that --decay names; 1 everywhere for Standard PER."""
    tau = config.tau
    forms = {
        "exponential": partial(exponential_decay, tau=tau),
        "polynomial": partial(polynomial_decay, tau=tau, power=1.0),
        "limit": partial(age_limit, tau=tau),
        "none": partial(exponential_decay, tau=np.inf),
    }
    return forms[config.decay]
