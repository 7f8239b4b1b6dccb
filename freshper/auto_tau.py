"""`--tau auto`: the age decay constant, estimated from how fast the policy is seen to drift.

Paper: section 3.3 absorbs the drift rate c into tau = 1/c, "a single tunable hyperparameter"; the conclusion leaves
tuning it from the measured divergence to future work. Ours, and one estimate among several that are possible:

    KL(pi_mu || pi_theta) ~ c Delta              of a turn: k3 summed over a trajectory's action tokens, over its turns
    ESS / n = 1 / (1 + Var[rho]) = exp(-2 c Delta)     where log rho is normal: its variance is twice the KL
    P(i) ~ p_i^alpha ~ exp(-alpha Delta / tau)   the probability decays with tau / alpha, not with tau
    tau = alpha / (2 c)                          so that the probability decays as the effective sample size does
    1 iteration <= tau <= 5 iterations           whatever the drift

A turn, since eq. importance_ratio is of an action given its state, and in section 3.1 an action is a reply. c is the
least-squares line through the origin over the trajectories of the last replay batches, with an exponential window of
about 20. Log-probs that the update computes anyway are all it needs. As the learning rate anneals, drift slows and tau
grows, up to its bound. The upper bound has no theory, and was found with tiny models: a tenth of the learning rate
slowed the drift twentyfold, and the best fixed tau did not grow (RESULTS.md, "Automatic tau"): replay ages by more than
drift. The lower one is what replay means: below it most of a batch has just been trained on, and drift and tau feed
each other, since a policy that is trained on the same few episodes again moves all the faster.
"""

import numpy as np

from freshper.priority import exponential_decay

MEMORY = 0.95  # of an earlier replay batch, a batch
ITERATIONS = 5  # the upper bound of tau


class AutoTau:
    """A decay function of age for `ReplayBuffer`, exp(-Delta / tau), whose tau follows `observe`. `iteration` is what
    an iteration takes in units of age; before the first observation tau is `longest`."""

    def __init__(self, alpha: float, iteration: int):
        self.alpha, self.shortest, self.longest = alpha, float(iteration), float(ITERATIONS * iteration)
        self.age_age = self.age_kl = 0.0  # windowed sums of Delta^2 and of Delta KL

    @property
    def tau(self) -> float:
        """alpha / (2 c), in units of age, within [shortest, longest]."""
        c = self.age_kl / self.age_age if self.age_age else 0.0
        return float(np.clip(self.alpha / (2.0 * c), self.shortest, self.longest)) if c > 0.0 else self.longest

    def __call__(self, age: np.ndarray) -> np.ndarray:
        return exponential_decay(age, self.tau)

    def observe(self, ages: np.ndarray, kl: np.ndarray) -> None:
        """A replayed batch: age [B] of its trajectories and their mean KL [B] of a turn, in nats (`drift["kl"]` of the
        trainer's update over the number of turns)."""
        ages = np.asarray(ages, dtype=np.float64)
        self.age_age = MEMORY * self.age_age + float((ages * ages).mean())
        self.age_kl = MEMORY * self.age_kl + float((ages * kl).mean())

    def state_dict(self) -> dict[str, float]:
        return {"age_age": self.age_age, "age_kl": self.age_kl}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.age_age, self.age_kl = state["age_age"], state["age_kl"]
