"""`--tau auto`: the age decay constant, estimated from how fast the policy drifts.

Paper: section 3.3 absorbs the drift rate c into tau = 1/c, "a single tunable hyperparameter"; section 5 leaves tuning
it to future work. Ours is one of several possible estimates:

    KL(pi_mu || pi_theta) ~ c Delta              of a turn: k3 summed over a trajectory's action tokens, over its turns
    ESS / n = 1 / (1 + Var[rho]) = exp(-2 c Delta)     if log rho is normal: its variance is twice the KL
    P(i) ~ p_i^alpha ~ exp(-alpha Delta / tau)   the probability decays with tau / alpha, not with tau
    tau = alpha / (2 c)                          the probability then decays as the effective sample size does
    1 iteration <= tau <= 5 iterations           whatever the drift

Of a turn, because rho of eq. 4 is of an action given its state, and in section 3.1 an action is a reply. c is the
least-squares line through the origin over the trajectories of the last replay batches (an exponential window of about
20). The upper bound has no theory: a tenth of the learning rate slowed the drift twentyfold, and the best fixed tau did
not grow (docs/log.md). Below the lower bound most of a batch has just been trained on, and drift and tau feed each
other.
"""

import numpy as np

from freshper.priority import exponential_decay

MEMORY = 0.95  # weight of earlier replay batches, per batch
ITERATIONS = 5  # the upper bound of tau


class AutoTau:
    """A decay function of age, exp(-Delta / tau), whose tau follows `observe`. `iteration` is the number of optimizer
    steps per iteration. Before the first observation tau is `longest`."""

    def __init__(self, alpha: float, iteration: int):
        self.alpha, self.shortest, self.longest = alpha, float(iteration), float(ITERATIONS * iteration)
        self.age_age = self.age_kl = 0.0  # windowed sums of Delta^2 and of Delta KL

    @property
    def tau(self) -> float:
        """alpha / (2 c) in optimizer steps, within [shortest, longest]."""
        c = self.age_kl / self.age_age if self.age_age else 0.0
        return float(np.clip(self.alpha / (2.0 * c), self.shortest, self.longest)) if c > 0.0 else self.longest

    def __call__(self, age: np.ndarray) -> np.ndarray:
        return exponential_decay(age, self.tau)

    def observe(self, ages: np.ndarray, kl: np.ndarray) -> None:
        """Add a replayed batch: ages [B], and the mean KL of a turn of each trajectory [B], in nats."""
        ages = np.asarray(ages, dtype=np.float64)
        self.age_age = MEMORY * self.age_age + float((ages * ages).mean())
        self.age_kl = MEMORY * self.age_kl + float((ages * kl).mean())

    def state_dict(self) -> dict[str, float]:
        return {"age_age": self.age_age, "age_kl": self.age_kl}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.age_age, self.age_kl = state["age_age"], state["age_kl"]
